"""`/v1/responses` as vLLM serves it with its store on: answers, their events, stored responses.

What a response was made of and what it said stays in its engine's memory, and is found by its id
there only. Answers are text; tools are read as a part of the prompt, and `agent` calls them.
Background requests and encrypted content are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from replayer.engine.types import SimRequest
from replayer.simulator.openai.answers import Answer
from replayer.simulator.openai.errors import ApiError, invalid
from replayer.simulator.openai.requests import Ask

PREVIOUS = "previous_response_id"
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Types of items that call a tool, and their member with what the tool is given."""
_PARTS = ("reasoning", "content", "tool_calls")
"""Parts of an assistant's message, in this order."""
_RESULTS = ("function_call_output", "custom_tool_call_output")
_SAME_IN_CHAT = ("model", "stream", "tools", "cache_salt", "ignore_eos", "chat_template_kwargs")
_REPEATED: dict[str, Any] = {
    "instructions": None,
    "metadata": None,
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "background": False,
    "max_tool_calls": None,
    PREVIOUS: None,
    "prompt": None,
    "reasoning": None,
    "service_tier": "auto",
    "text": None,
    "top_logprobs": None,
    "truncation": "disabled",
    "user": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Members of a response that say again what the request had, with their defaults."""


def not_found(response_id: str) -> ApiError:
    """The error for an id that this engine does not keep."""
    text = f"Response with id '{response_id}' not found."
    return ApiError(404, text, "response_id", "invalid_request_error")


class ResponseStore:
    """The responses of one engine, each with the messages that a follow-up continues."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[dict[str, Any], list[Any]]] = {}

    def get(self, response_id: str) -> dict[str, Any]:
        """A kept response; ApiError where there is none."""
        if response_id not in self._kept:
            raise not_found(response_id)
        return self._kept[response_id][0]

    def cancel(self, response_id: str) -> dict[str, Any]:
        """Refused: every response is complete when it is kept."""
        self.get(response_id)
        text = "Cannot cancel a synchronous response."
        raise ApiError(400, text, "response_id", "invalid_request_error")

    def keep(self, response: dict[str, Any], messages: list[Any]) -> None:
        """Keep a complete response, and the messages that it answers, for ever as vLLM does."""
        self._kept[response["id"]] = (response, [*messages, *messages_of(response["output"])])

    def as_chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The chat request that a body means, after what it continues.

        Instructions hold for one response: those of the continued ones are left out.
        """
        given = body.get("input")
        if not isinstance(given, str | list):
            # By then vLLM has added a member to the body, and says how many it has.
            raise invalid("missing", "body.input", "Field required", {"input": None, **body})
        messages: list[Any] = []
        if body.get("instructions"):
            messages.append({"role": "system", "content": body["instructions"]})
        previous = body.get(PREVIOUS)
        if previous is not None:
            self.get(str(previous))
            told = self._kept[str(previous)][1]
            messages += [message for message in told if message.get("role") != "system"]
        messages += messages_of(given)
        chat = {name: body[name] for name in _SAME_IN_CHAT if name in body}
        reasoning = body.get("reasoning")
        chat["reasoning_effort"] = reasoning.get("effort") if isinstance(reasoning, dict) else None
        return chat | {"messages": messages, "max_tokens": body.get("max_output_tokens")}


def messages_of(given: str | list[Any]) -> list[dict[str, Any]]:
    """The chat messages that a request's `input` stands for.

    Reasoning, text and calls that follow each other are one message. ApiError for an item of
    another type.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for message in map(_message_of, given):
        if messages and _continues(messages[-1], message):
            calls = [*messages[-1].get("tool_calls", ()), *message.get("tool_calls", ())]
            messages[-1] |= message | ({"tool_calls": calls} if calls else {})
        elif message:
            messages.append(message)
    return messages


def _message_of(item: Any) -> dict[str, Any]:
    """The message that an item is a part of; empty for reasoning without a text."""
    kind = str(item.get("type")) if isinstance(item, dict) else type(item).__name__
    if kind in _CALLS:
        asked = {"name": item.get("name"), "arguments": item.get(_CALLS[kind])}
        if item.get("namespace"):
            asked["namespace"] = item["namespace"]
        call = {"id": item.get("call_id"), "type": "function", "function": asked}
        return {"role": "assistant", "tool_calls": [call]}
    if kind in _RESULTS:
        return {"role": "tool", "content": item.get("output")}
    if kind == "reasoning":
        thought = _thought(item)
        return {"role": "assistant", "reasoning": thought} if thought else {}
    if isinstance(item, dict) and "role" in item:
        return dict(item)
    raise ApiError(400, f"Unsupported input item type: {kind}", "input")


def _continues(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether a message goes on with the assistant's last one: its next part, or one more call."""
    if not last.get("role") == message.get("role") == "assistant":
        return False
    told = [place for place, part in enumerate(_PARTS) if part in last]
    first = min([place for place, part in enumerate(_PARTS) if part in message], default=0)
    return "tool_calls" in message or first > max(told, default=-1)


def _thought(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item, of its content or else of its summary."""
    parts = item.get("content") or item.get("summary")
    texts = (
        [part.get("text") for part in parts if isinstance(part, dict)]
        if isinstance(parts, list)
        else []
    )
    return "".join(map(str, filter(None, texts)))


class ResponsesAnswer(Answer):
    """Renders one request's answer as a response.

    `body` is the request's, with the limit of output that it has from the context where it set
    none. `keep` gets the complete response if the request wants it kept.
    """

    def __init__(
        self,
        ask: Ask,
        request_id: str,
        created_s: int,
        body: Mapping[str, Any],
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(ask, request_id, created_s)
        self._keep = keep
        self._keeps = body.get("store", True) is not False
        self._events = 0
        self._said: list[str] = []
        self._item_id = f"msg_{request_id}"
        self._where = {"content_index": 0, "item_id": self._item_id, "output_index": 0}
        self._response: dict[str, Any] = {
            "id": str(body.get("request_id") or f"resp_{request_id}"),
            "created_at": created_s,
            "incomplete_details": None,
            "model": ask.model,
            "object": "response",
            "output": [],
            **_repeated(body),
            "max_output_tokens": body.get("max_output_tokens"),
            "status": "in_progress",
            "usage": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def whole(
        self, requests: Sequence[SimRequest], kv_params: Mapping[str, Any] | None = None
    ) -> bytes:
        """The complete response as a body."""
        del kv_params
        self._said = [self._text(0, 0, requests[0].output_tokens)]
        return orjson.dumps(self._complete(requests))

    def greeting(self) -> bytes:
        """The events before any output, which are sent as soon as the request is taken."""
        return b"".join(
            self._event(kind, response=self._response)
            for kind in ("response.created", "response.in_progress")
        )

    def opening(self) -> bytes:
        """The events that begin the answer's only item and its only part."""
        item = self._message("in_progress")
        return self._event("response.output_item.added", item=item, output_index=0) + self._event(
            "response.content_part.added", **self._where, part=_part("", [])
        )

    def delta(self, index: int, start: int, request: SimRequest) -> bytes:
        """The event of some output tokens; empty where only the end has come."""
        text = self._text(index, start, request.output_tokens)
        self._said.append(text)
        if not text:
            return b""
        return self._event("response.output_text.delta", **self._where, delta=text, logprobs=[])

    def closing(self, requests: Sequence[SimRequest]) -> bytes:
        """The events that end part and item, and the last one, with the complete response."""
        text, item = "".join(self._said), self._message("completed")
        done = {"item": item, "output_index": 0}
        return b"".join(
            (
                self._event("response.output_text.done", **self._where, text=text, logprobs=[]),
                self._event("response.content_part.done", **self._where, part=_part(text)),
                self._event("response.output_item.done", **done),
                self._event("response.completed", response=self._complete(requests)),
            )
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = fields | {"sequence_number": self._events, "type": kind}
        self._events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(data))

    def _message(self, status: str) -> dict[str, Any]:
        """The answer's item, with what has been said."""
        text = "".join(self._said)
        return {
            "id": self._item_id,
            "content": [_part(text)] if text else [],
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _complete(self, requests: Sequence[SimRequest]) -> dict[str, Any]:
        is_cut = requests[0].finish_reason == "length"
        response = self._response | {
            "output": self._output(),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": self._token_counts(requests),
        }
        if self._keeps:
            self._keep(response)
        return response

    def _output(self) -> list[dict[str, Any]]:
        """The items of a complete response."""
        return [self._message("completed")] if any(self._said) else []

    def _token_counts(self, requests: Sequence[SimRequest]) -> dict[str, Any]:
        counts = self.usage(requests)
        prompt, output = counts["prompt_tokens"], counts["completion_tokens"]
        details = counts["prompt_tokens_details"]
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": details["cached_tokens"],
                "cache_write_tokens": details["created_cache_tokens"],
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": output,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": counts["total_tokens"],
        }


def _repeated(body: Mapping[str, Any]) -> dict[str, Any]:
    """The members of _REPEATED as the body has them."""
    repeated = dict(_REPEATED)
    for name, default in _REPEATED.items():
        if (value := body.get(name)) is not None:
            is_whole = isinstance(default, float) and isinstance(value, int)
            repeated[name] = float(value) if is_whole else value
    return repeated


def _part(text: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
    """A piece of a message's content."""
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}
