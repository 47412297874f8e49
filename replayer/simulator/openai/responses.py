"""`/v1/responses` as vLLM serves it with its store on: answers, their events, and what is kept.

What a response was made of and what it said stays in its engine's memory, and is found by its id
there only. Background requests are not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from replayer.engine.types import SimRequest
from replayer.simulator.openai.answers import Answer
from replayer.simulator.openai.errors import ApiError, invalid
from replayer.simulator.openai.requests import Ask

PREVIOUS = "previous_response_id"


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
        """Keep a complete response for ever, as vLLM does."""
        self._kept[response["id"]] = (response, messages)

    def as_chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The chat request that a body means, after what it continues."""
        given = body.get("input")
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(messages, list):
            raise invalid("missing", "body.input", "Field required", dict(body))
        previous = body.get(PREVIOUS)
        if previous is not None:
            self.get(str(previous))
            messages = [*self._kept[str(previous)][1], *messages]
        elif body.get("instructions"):
            messages = [{"role": "system", "content": body["instructions"]}, *messages]
        names = ("model", "stream", "tools", "cache_salt", "ignore_eos")
        chat = {name: body[name] for name in names if name in body}
        chat["max_tokens"] = body.get("max_output_tokens")
        return chat | {"messages": messages}


class ResponsesAnswer(Answer):
    """Renders one request's answer as a response, and keeps it once it is complete."""

    def __init__(
        self,
        ask: Ask,
        request_id: str,
        created_s: int,
        body: Mapping[str, Any],
        store: ResponseStore,
        messages: list[Any],
    ) -> None:
        super().__init__(ask, request_id, created_s)
        self._store, self._messages = store, messages
        self._keeps = body.get("store", True) is not False
        self._events = 0
        self._said: list[str] = []
        self._response: dict[str, Any] = {
            "id": str(body.get("request_id") or f"resp_{request_id}"),
            "created_at": created_s,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": ask.model,
            "object": "response",
            "output": [],
            "parallel_tool_calls": True,
            "tools": body.get("tools") or [],
            "background": False,
            PREVIOUS: body.get(PREVIOUS),
            "status": "in_progress",
            "usage": None,
        }

    def whole(
        self, requests: Sequence[SimRequest], kv_params: Mapping[str, Any] | None = None
    ) -> bytes:
        """The complete response as a body."""
        del kv_params
        self._said = [self._text(0, 0, requests[0].output_tokens)]
        return orjson.dumps(self._complete(requests))

    def opening(self) -> bytes:
        """The events before the first token."""
        item = {"id": "msg_0", "type": "message", "status": "in_progress", "content": []}
        return b"".join(
            (
                self._event("response.created", response=self._response),
                self._event("response.in_progress", response=self._response),
                self._event("response.output_item.added", item=item, output_index=0),
            )
        )

    def delta(self, index: int, start: int, request: SimRequest) -> bytes:
        """The event of some output tokens; empty where only the end has come."""
        text = self._text(index, start, request.output_tokens)
        self._said.append(text)
        where = {"content_index": 0, "item_id": "msg_0", "output_index": 0}
        return self._event("response.output_text.delta", **where, delta=text) if text else b""

    def closing(self, requests: Sequence[SimRequest]) -> bytes:
        """The last event, with the complete response."""
        return self._event("response.completed", response=self._complete(requests))

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = fields | {"sequence_number": self._events, "type": kind}
        self._events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(data))

    def _complete(self, requests: Sequence[SimRequest]) -> dict[str, Any]:
        text, counts = "".join(self._said), self.usage(requests)
        said = {"type": "output_text", "text": text, "annotations": []}
        message = {"id": "msg_0", "type": "message", "role": "assistant", "content": [said]}
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"]
            },
            "output_tokens": counts["completion_tokens"],
            "total_tokens": counts["total_tokens"],
        }
        response = self._response | {"output": [message], "status": "completed", "usage": usage}
        if self._keeps:
            spoken = {"role": "assistant", "content": text}
            self._store.keep(response, [*self._messages, spoken])
        return response
