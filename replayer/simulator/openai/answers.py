"""Answers in vLLM's form: JSON bodies, stream chunks, usage.

Generated words are plain ASCII that needs no escaping, so a stream's chunks are joined from bytes:
a few microseconds per chunk, less than a JSON serialisation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from replayer.engine.tokens import ASSISTANT_ID
from replayer.engine.types import SimRequest
from replayer.simulator.openai.errors import ApiError
from replayer.simulator.openai.requests import AnswerChoice, Ask

DONE = b"data: [DONE]\n\n"
FINGERPRINT = "vllm-sim"
_SIGNED = b',"system_fingerprint":"%s"' % FINGERPRINT.encode()
"""Ends the last object of a stream."""
_NO_IDS = b',"prompt_token_ids":null,"token_ids":null'


class Answer:
    """Renders one request's answer; `request_id` is the client's, without a prefix."""

    def __init__(self, ask: Ask, request_id: str, created_s: int) -> None:
        self._ask = ask
        kind = "chat.completion" if ask.chat else "text_completion"
        self._head = {
            "id": f"chatcmpl-{request_id}" if ask.chat else f"cmpl-{request_id}",
            "object": kind,
            "created": created_s,
            "model": ask.model,
        }
        chunk = self._head | {"object": f"{kind}.chunk" if ask.chat else kind}
        self._chunk_head = b"data: " + orjson.dumps(chunk)[:-1]

    def whole(
        self, requests: Sequence[SimRequest], kv_params: Mapping[str, Any] | None = None
    ) -> bytes:
        """Return the body of a non-streaming answer; `kv_params`: its kv_transfer_params."""
        body: dict[str, Any] = dict(self._head)
        body["choices"] = [
            self._whole_choice(index, choice, request)
            for index, (choice, request) in enumerate(zip(self._ask.choices, requests, strict=True))
        ]
        body |= {"service_tier": None, "system_fingerprint": FINGERPRINT}
        body["usage"] = self.usage(requests)
        body["usage"]["prompt_tokens_details"].setdefault("created_cache_tokens", None)
        body["usage"]["prompt_tokens_details"]["multimodal_tokens"] = None
        body["usage"]["completion_tokens_details"] = None
        if self._ask.chat:
            body |= {"prompt_logprobs": None, "prompt_token_ids": self._prompt_ids(0)}
            body["prompt_text"] = None
        # Null with Mooncake, whose receiver asks the bootstrap server instead.
        body |= {"kv_transfer_params": kv_params, "ec_transfer_params": None, "metrics": None}
        return orjson.dumps(body)

    def usage(self, requests: Sequence[SimRequest]) -> dict[str, Any]:
        """Return the usage object; cached tokens count local hits and delivered remote KV."""
        prompt = self._ask.prompt_tokens
        output = sum(request.output_tokens for request in requests)
        first = requests[0]
        cached = first.local_hit_tokens + first.external_tokens
        p_cached = self._ask.handing.p_cached_tokens
        if p_cached is not None and first.external_tokens:
            cached = p_cached
        details = {"cached_tokens": cached}
        if self._ask.chat:
            block = self._ask.choices[0].prompt.block_size
            details["created_cache_tokens"] = (prompt // block - cached // block) * block
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
            "prompt_tokens_details": details,
        }

    def greeting(self) -> bytes:
        """Return what a stream has at once, before the engine has computed anything: nothing."""
        return b""

    def failure(self) -> bytes:
        """Return the end of a stream whose engine has failed."""
        return b"data: %b\n\n%b" % (ApiError(500, "Internal server error").body(), DONE)

    def opening(self) -> bytes:
        """Return the chunks before the first token: a role chunk per choice, for chat only."""
        if not self._ask.chat:
            return b""
        extra = b',"prompt_token_ids":%s,"prompt_text":null' % orjson.dumps(self._prompt_ids(0))
        return b"".join(
            b'%s,"choices":[{"index":%d,"delta":{"role":"assistant","content":""},'
            b'"logprobs":null,"finish_reason":null}]%s}\n\n' % (self._chunk_head, index, extra)
            for index in range(len(self._ask.choices))
        )

    def delta(self, index: int, start: int, request: SimRequest) -> bytes:
        """Return a chunk with the output tokens from `start` on, and the finish reason if any."""
        stop = request.output_tokens
        text = self._text(index, start, stop).encode()
        ids, ended = self._token_ids_field(index, start, stop), request.finish_reason is not None
        tail = b'"finish_reason":%s' % orjson.dumps(request.finish_reason)
        if ended or not self._ask.chat:
            tail += b',"stop_reason":null'
        body = b'"delta":{"content":"%s"}' if self._ask.chat else b'"text":"%s"'
        return b'%s,"choices":[{"index":%d,%s,"logprobs":null,%s%s}]%s}\n\n' % (
            self._chunk_head,
            index,
            body % text,
            tail,
            ids,
            _SIGNED if ended and not self._ask.include_usage else b"",
        )

    def closing(self, requests: Sequence[SimRequest]) -> bytes:
        """Return the end of a stream: usage if asked for, and [DONE]."""
        if not self._ask.include_usage:
            return DONE
        usage = orjson.dumps(self.usage(requests))
        head = self._chunk_head
        return b'%s,"choices":[],"usage":%s%s}\n\n%s' % (head, usage, _SIGNED, DONE)

    def _whole_choice(
        self, index: int, choice: AnswerChoice, request: SimRequest
    ) -> dict[str, Any]:
        tokens = request.output_tokens
        text = self._text(index, 0, tokens)
        ids = list(choice.output.upto(tokens)[:tokens]) if self._ask.return_token_ids else None
        ending = {
            "logprobs": None,
            "finish_reason": request.finish_reason,
            "stop_reason": None,
            "token_ids": ids,
        }
        if self._ask.chat:
            message: dict[str, Any] = {
                "role": "assistant",
                "content": text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            }
            return {"index": index, "message": message} | ending | {"routed_experts": None}
        more = {"prompt_logprobs": None, "prompt_token_ids": self._prompt_ids(index)}
        return {"index": index, "text": text} | ending | more | {"routed_experts": None}

    def _text(self, index: int, start: int, stop: int) -> str:
        """Return words [start, stop) with a space before them, but at the start of an answer.

        A chat's prompt ends with the role of the one who answers, also as token ids.
        """
        if start == stop:
            return ""
        choice = self._ask.choices[index]
        words = choice.output.words(start, stop)
        begins = start == 0 and (self._ask.chat or choice.prompt.ids[-1] == ASSISTANT_ID)
        return words if begins else " " + words

    def _prompt_ids(self, index: int) -> list[int] | None:
        return list(self._ask.choices[index].prompt.ids) if self._ask.return_token_ids else None

    def _token_ids_field(self, index: int, start: int, stop: int) -> bytes:
        if not self._ask.return_token_ids:
            return b',"token_ids":null' if self._ask.chat else _NO_IDS
        ids = self._ask.choices[index].output.upto(stop)[start:stop]
        field = b',"token_ids":' + orjson.dumps(list(ids))
        if self._ask.chat:
            return field
        prompt = self._prompt_ids(index) if start == 0 else None
        return b',"prompt_token_ids":' + orjson.dumps(prompt) + field
