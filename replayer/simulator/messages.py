"""`/v1/messages`, Anthropic's API, as vLLM serves it: a chat request in another form.

Answers are text; tools are read as a part of the prompt, and `agent` calls them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from replayer.engine.types import SimRequest
from replayer.simulator.openai.answers import Answer
from replayer.simulator.openai.errors import ApiError, invalid

_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}
_NOT_FOR_THE_MODEL = "x-anthropic-billing-header"
"""A system text that begins so has a hash per request: vLLM removes it, for the prefix cache."""
_SAME_IN_CHAT = ("model", "stream", "cache_salt", "kv_transfer_params", "chat_template_kwargs")


class MessagesError(ApiError):
    """An error in Anthropic's form, made of one in OpenAI's.

    What fails while the body is parsed (`EarlyError`) has OpenAI's form here too.
    """

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.status, str(error), error.param, error.kind)

    def body(self) -> bytes:
        """Return the JSON body."""
        return orjson.dumps({"type": "error", "error": {"type": self.kind, "message": str(self)}})


def as_chat(body: Mapping[str, Any], *, counts_only: bool = False) -> dict[str, Any]:
    """The chat request that a body means; one to count tokens has no limit of output."""
    needed = ("model", "messages") if counts_only else ("model", "messages", "max_tokens")
    for name in needed:
        if body.get(name) is None:
            raise invalid("missing", f"body.{name}", "Field required", dict(body))
    limit = body.get("max_tokens")
    if isinstance(limit, int) and limit <= 0:
        text = "max_tokens must be positive"
        error = ValueError(text)
        raise invalid("value_error", "body.max_tokens", f"Value error, {text}", str(limit), error)
    if not isinstance(body["messages"], list):
        text = "Input should be a valid list"
        raise invalid("list_type", "body.messages", text, body["messages"])
    messages = (
        [{"role": "system", "content": system}] if (system := _system(body.get("system"))) else []
    )
    for message in body["messages"]:
        messages += _messages(message)
    chat = {name: body[name] for name in _SAME_IN_CHAT if name in body}
    chat |= {"messages": messages, "tools": _tools(body)}
    chat["reasoning_effort"] = _effort(body)
    return chat | {"max_tokens": limit, "max_completion_tokens": limit}


def _effort(body: Mapping[str, Any]) -> Any:
    thinking, config = body.get("thinking"), body.get("output_config")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        return "none"
    return config.get("effort") if isinstance(config, dict) else None


def _system(content: Any) -> str:
    """System text; of blocks those that are for the model."""
    if isinstance(content, str):
        return content
    texts = map(_text_of, ([block] for block in _dicts(content)))
    return "".join([text for text in texts if not text.startswith(_NOT_FOR_THE_MODEL)])


def _text_of(content: Any) -> str:
    """The text of a string or of blocks, in one piece."""
    blocks = [{"text": content}] if isinstance(content, str) else _dicts(content)
    return "".join([str(block.get("text") or "") for block in blocks])


def _messages(message: Any) -> list[dict[str, Any]]:
    """The chat messages of one message: results of tools are messages of their own, before it."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        text = "Input should be 'user', 'assistant' or 'system'"
        raise invalid("literal_error", "body.messages.role", text, message)
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = _dicts(content)
    results: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            told = block.get("content") or ""
            results.append({"role": "tool", "content": _text_of(told)})
            results += [{"role": "user", "content": [image]} for image in _images(told)]
    text = _system(content) if role == "system" else _text_of(content or "")
    said: dict[str, Any] = {"role": role, "content": text}
    if images := _images(blocks):
        said["content"] = [{"type": "text", "text": text}, *images]
    if thought := "".join([str(block.get("thinking") or "") for block in blocks]):
        said["reasoning"] = thought
    if calls := [_call(block) for block in blocks if block.get("type") == "tool_use"]:
        said["tool_calls"] = calls
    return [*results, said] if len(said) > len(("role", "content")) or said["content"] else results


def _images(blocks: Any) -> list[dict[str, Any]]:
    return [block for block in _dicts(blocks) if block.get("type") == "image"]


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = orjson.dumps(block.get("input") or {}).decode()
    function = {"name": block.get("name") or "", "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": tool.get("input_schema"),
            },
        }
        for tool in _dicts(body.get("tools"))
    ]


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


class MessagesAnswer(Answer):
    """Renders one request's answer as a message, or as the events of its stream."""

    def whole(
        self, requests: Sequence[SimRequest], kv_params: Mapping[str, Any] | None = None
    ) -> bytes:
        """The message as a body; what has no value is left out."""
        text = self._text(0, 0, requests[0].output_tokens)
        body = self._head_of_message([{"type": "text", "text": text}])
        stop_reason = _STOP_REASONS.get(str(requests[0].finish_reason))
        body |= {"stop_reason": stop_reason} if stop_reason else {}
        body |= {"usage": self._token_counts(requests)}
        return orjson.dumps(body | ({"kv_transfer_params": kv_params} if kv_params else {}))

    def opening(self) -> bytes:
        """The events before the first token's text."""
        message = self._head_of_message([]) | {"stop_reason": None, "stop_sequence": None}
        message["usage"] = {"input_tokens": self._ask.prompt_tokens, "output_tokens": 0}
        block = {"type": "text", "text": ""}
        return self.event("message_start", message=message) + self.event(
            "content_block_start", content_block=block, index=0
        )

    def delta(self, index: int, start: int, request: SimRequest) -> bytes:
        """The event of some output tokens; empty where only the end has come."""
        text = self._text(index, start, request.output_tokens)
        if not text:
            return b""
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta",'
            b'"delta":{"type":"text_delta","text":"%b"},"index":0}\n\n' % text.encode()
        )

    def closing(self, requests: Sequence[SimRequest]) -> bytes:
        """The end of the text, why it ended with the token counts, and the end of the stream."""
        reason = _STOP_REASONS.get(str(requests[0].finish_reason))
        delta = {"stop_reason": reason, "stop_sequence": None}
        return b"".join(
            (
                self.event("content_block_stop", index=0),
                self.event("message_delta", delta=delta, usage=self._token_counts(requests)),
                self.event("message_stop"),
            )
        )

    def failure(self) -> bytes:
        """The event of an engine that fails after the stream has begun."""
        error = {"type": "internal_error", "message": "Internal server error"}
        return self.event("error", error=error)

    def _head_of_message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        names = {"id": self._head["id"], "type": "message", "role": "assistant"}
        return names | {"content": content, "model": self._ask.model}

    def _token_counts(self, requests: Sequence[SimRequest]) -> dict[str, int]:
        """Anthropic's counts: those of the cache are not a part of `input_tokens`."""
        counts = self.usage(requests)
        details = counts["prompt_tokens_details"]
        read, written = details["cached_tokens"], details["created_cache_tokens"]
        return {
            "input_tokens": max(0, counts["prompt_tokens"] - read - written),
            "output_tokens": counts["completion_tokens"],
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": read,
        }

    @staticmethod
    def event(kind: str, **fields: Any) -> bytes:
        """An event of the stream."""
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind} | fields))
