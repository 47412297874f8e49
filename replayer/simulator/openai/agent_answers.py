"""Answers of the scripted model in the three forms that agents speak: chat, messages, responses.

The events of a stream are made at once, and each token that the engine generates lets as many of
them out as are its share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from replayer.engine.types import SimRequest
from replayer.simulator.messages import MessagesAnswer
from replayer.simulator.openai.agent import Call, Step
from replayer.simulator.openai.answers import FINGERPRINT, Answer
from replayer.simulator.openai.responses import ResponsesAnswer

_PIECE_CHARS = 24


def _pieces(text: str) -> list[str]:
    return [text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS)]


class _Stepped(Answer, ABC):
    """An answer whose stream is the events of a step."""

    _waiting: list[bytes] | None = None

    @property
    def _step(self) -> Step:
        assert self._ask.step is not None
        return self._ask.step

    @abstractmethod
    def _script(self) -> Iterator[bytes]:
        """The events between the stream's opening and its closing."""

    def delta(self, index: int, start: int, request: SimRequest) -> bytes:
        """The events that are let out by some output tokens."""
        if self._waiting is None:
            self._waiting = list(self._script())
        count, tokens = len(self._waiting), self._ask.choices[index].output_tokens
        first, last = count * start // tokens, count * request.output_tokens // tokens
        return b"".join(self._waiting[first:last])


class ChatStep(_Stepped):
    """A step as an answer of /v1/chat/completions."""

    @property
    def _reason(self) -> str:
        return "tool_calls" if self._step.calls else "stop"

    def whole(
        self, requests: Sequence[SimRequest], kv_params: Mapping[str, Any] | None = None
    ) -> bytes:
        """The body of an answer in one piece."""
        del kv_params
        step = self._step
        calls = [call.in_chat() for call in step.calls]
        message = {"role": "assistant", "content": step.text, "reasoning": step.thought}
        choice = {"index": 0, "message": message | {"tool_calls": calls}, "logprobs": None}
        choice |= {"finish_reason": self._reason}
        body = {"choices": [choice], "system_fingerprint": FINGERPRINT}
        return orjson.dumps(self._head | body | {"usage": self.usage(requests)})

    def _script(self) -> Iterator[bytes]:
        step = self._step
        for piece in _pieces(step.thought):
            yield self._chunk({"reasoning": piece})
        for piece in _pieces(step.text):
            yield self._chunk({"content": piece})
        for at, call in enumerate(step.calls):
            told = call.in_chat()
            begun = told | {"function": told["function"] | {"arguments": ""}, "index": at}
            yield self._chunk({"tool_calls": [begun]})
            for piece in _pieces(call.arguments):
                more = {"index": at, "function": {"arguments": piece}}
                yield self._chunk({"tool_calls": [more]})
        yield self._chunk({}, self._reason)

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return b'%b,"choices":[%b]}\n\n' % (self._chunk_head, orjson.dumps(choice))


class MessagesStep(_Stepped, MessagesAnswer):
    """A step as an answer of /v1/messages."""

    @property
    def _reason(self) -> str:
        return "tool_use" if self._step.calls else "end_turn"

    def _blocks(self) -> Iterator[tuple[dict[str, Any], dict[str, str], list[dict[str, str]]]]:
        """Each block as it begins, what is in it then, and its deltas."""
        step = self._step
        signature = {"type": "signature_delta", "signature": f"sig-{self._head['id']}"}
        thoughts = [{"type": "thinking_delta", "thinking": p} for p in _pieces(step.thought)]
        yield {"type": "thinking"}, {"thinking": "", "signature": ""}, [*thoughts, signature]
        texts = [{"type": "text_delta", "text": piece} for piece in _pieces(step.text)]
        yield {"type": "text"}, {"text": ""}, texts
        for call in step.calls:
            called = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            inputs = [
                {"type": "input_json_delta", "partial_json": piece}
                for piece in _pieces(call.arguments)
            ]
            yield called, {}, inputs

    def whole(
        self, requests: Sequence[SimRequest], kv_params: Mapping[str, Any] | None = None
    ) -> bytes:
        """The message as a body."""
        del kv_params
        content: list[dict[str, Any]] = []
        for block, empty, deltas in self._blocks():
            whole: dict[str, Any] = dict.fromkeys(empty, "")
            for delta in deltas:
                for name, piece in delta.items():
                    if name in whole:
                        whole[name] += piece
            if block["type"] == "tool_use":
                whole["input"] = orjson.loads("".join(delta["partial_json"] for delta in deltas))
            content.append(block | whole)
        end = {"stop_reason": self._reason, "usage": self._token_counts(requests)}
        return orjson.dumps(self._head_of_message(content) | end)

    def opening(self) -> bytes:
        """The event before the first block."""
        message = self._head_of_message([]) | {"stop_reason": None, "stop_sequence": None}
        message["usage"] = {"input_tokens": self._ask.prompt_tokens, "output_tokens": 0}
        return self.event("message_start", message=message)

    def _script(self) -> Iterator[bytes]:
        for at, (block, empty, deltas) in enumerate(self._blocks()):
            yield self.event("content_block_start", index=at, content_block=block | empty)
            for delta in deltas:
                yield self.event("content_block_delta", index=at, delta=delta)
            yield self.event("content_block_stop", index=at)

    def closing(self, requests: Sequence[SimRequest]) -> bytes:
        """Why the message ended, with the token counts, and the end of the stream."""
        delta = {"stop_reason": self._reason, "stop_sequence": None}
        end = self.event("message_delta", delta=delta, usage=self._token_counts(requests))
        return end + self.event("message_stop")


class ResponsesStep(_Stepped, ResponsesAnswer):
    """A step as an answer of /v1/responses."""

    def _items(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
        """Each item as it ends, what is empty in it when it begins, and its text."""
        step, name = self._step, self._head["id"]
        thought = {"type": "reasoning_text", "text": step.thought}
        yield (
            {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": [thought]},
            {"content": []},
            step.thought,
        )
        part = {"type": "output_text", "text": step.text, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [part]}
        yield message, {"content": []}, step.text
        for at, call in enumerate(step.calls):
            yield _item_of(call, f"fc_{name}_{at}"), {"arguments": ""}, call.arguments

    def whole(
        self, requests: Sequence[SimRequest], kv_params: Mapping[str, Any] | None = None
    ) -> bytes:
        """The complete response as a body."""
        del kv_params
        return orjson.dumps(self._complete(requests))

    def opening(self) -> bytes:
        """Nothing: each item has a beginning of its own."""
        return b""

    def _script(self) -> Iterator[bytes]:
        for at, (item, empty, text) in enumerate(self._items()):
            place = {"output_index": at, "item_id": item["id"]}
            begun = item | empty | {"status": "in_progress"}
            yield self._event("response.output_item.added", output_index=at, item=begun)
            yield from self._told(item, place, text)
            done = item | {"status": "completed"}
            yield self._event("response.output_item.done", output_index=at, item=done)

    def _told(self, item: dict[str, Any], place: dict[str, Any], text: str) -> Iterator[bytes]:
        """The events of an item's text."""
        if item["type"] == "function_call":
            kind = "response.function_call_arguments"
            for piece in _pieces(text):
                yield self._event(f"{kind}.delta", **place, delta=piece)
            yield self._event(f"{kind}.done", **place, arguments=text, name=item["name"])
            return
        is_thought = item["type"] == "reasoning"
        kind = "response.reasoning_text" if is_thought else "response.output_text"
        part = "response.reasoning_part" if is_thought else "response.content_part"
        place = place | {"content_index": 0}
        (whole,) = item["content"]
        yield self._event(f"{part}.added", **place, part=whole | {"text": ""})
        for piece in _pieces(text):
            yield self._event(f"{kind}.delta", **place, delta=piece, logprobs=[])
        yield self._event(f"{kind}.done", **place, text=text, logprobs=[])
        yield self._event(f"{part}.done", **place, part=whole)

    def closing(self, requests: Sequence[SimRequest]) -> bytes:
        """The last event, with the complete response."""
        return self._event("response.completed", response=self._complete(requests))

    def _output(self) -> list[dict[str, Any]]:
        return [item | {"status": "completed"} for item, _, _ in self._items()]


def _item_of(call: Call, item_id: str) -> dict[str, Any]:
    space = {"namespace": call.namespace} if call.namespace else {}
    item = {"type": "function_call", "id": item_id, "call_id": call.id, "name": call.name}
    return item | {"arguments": call.arguments} | space
