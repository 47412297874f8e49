"""What a streamed answer says and when: server-sent events scanned as they arrive.

Fed with bytes and the moment they came; knows no sockets and no clock. The first token is the first
event with content, reasoning or a tool call, not the role event that servers send at once. Token
counts come from `usage` alone: an event may carry several tokens.
"""

from array import array
from typing import Any

import orjson

CONTENT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls")
DONE = b"[DONE]"


class StreamScanner:
    """The state of one answer; times are those handed to `feed`."""

    __slots__ = (
        "_rest",
        "cached_tokens",
        "completion_tokens",
        "done",
        "error",
        "finish_reason",
        "first_token_s",
        "gaps_s",
        "last_token_s",
        "prompt_tokens",
        "texts",
    )

    def __init__(self) -> None:
        """Start with nothing seen; None means not said by the server."""
        self._rest = b""
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.gaps_s = array("d")
        self.texts: list[str] = []
        self.finish_reason: str | None = None
        self.done = False
        self.error: str | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None

    def feed(self, data: bytes, now_s: float) -> None:
        """Take the next bytes of the body."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)

    def _event(self, data: bytes, now_s: float) -> None:
        if data == DONE:
            self.done = True
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            self.error = self.error or f"event is not JSON: {data[:80]!r}"
            return
        if not isinstance(event, dict):
            self.error = self.error or f"event is not an object: {data[:80]!r}"
        elif event.get("error"):
            self.error = self.error or _error_text(event["error"])
        else:
            self._answer(event, now_s)

    def _answer(self, event: dict[str, Any], now_s: float) -> None:
        if usage := event.get("usage"):
            self._usage(usage)
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            text = choice.get("text")
            if text is None:
                text = _delta_text(choice.get("delta") or {})
            if text:
                self._token(text, now_s)

    def _token(self, text: str, now_s: float) -> None:
        if self.last_token_s is None:
            self.first_token_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_token_s)
        self.last_token_s = now_s
        self.texts.append(text)

    def _usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = usage.get("prompt_tokens")
        self.completion_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens = details.get("cached_tokens")


def _delta_text(delta: dict[str, Any]) -> str:
    for key in CONTENT_KEYS:
        value = delta.get(key)
        if value:
            return value if isinstance(value, str) else orjson.dumps(value).decode()
    return ""


def _error_text(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error)
