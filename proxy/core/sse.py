"""What an answer says of itself, read from its bytes while they pass.

The scanner sees the same bytes as the client, in whatever pieces they arrive. It never parses JSON:
it finds the first content, counts events, and keeps the tail, where the usage and the end are.
"""

from __future__ import annotations

import re

TAIL_BYTES = 4096
CARRY_BYTES = 65536
_CONTENT = re.compile(
    rb'"(?:content|reasoning_content|reasoning|text|refusal|delta|thinking)"\s*:\s*"[^"]'
    rb'|"tool_calls"\s*:\s*\[\s*\{'
)
_USAGE = re.compile(rb'"usage"\s*:\s*(\{(?:[^{}]|\{[^{}]*\})*\})')
_ERROR = re.compile(rb'^(?:event:[^\n]*\n)?data:\s*\{\s*"error"')
_ENDS = (b"data: [DONE]", b"data:[DONE]", b"event: message_stop", b"event: response.completed")


def first_event(head: bytes) -> bytes | None:
    """The first complete event that is not a comment; None while it is still on its way."""
    while (end := head.find(b"\n\n")) >= 0:
        event, head = head[:end], head[end + 2 :]
        if not event.startswith(b":"):
            return event
    return None


def is_error_event(event: bytes) -> bool:
    """Whether an event carries an engine error, not a chunk: vLLM sends these inside a 200."""
    return _ERROR.match(event) is not None


class Scanner:
    """Watches one answer. Feed it every piece; read its fields at any time."""

    __slots__ = ("_carry", "_newline", "_tail", "events", "has_content", "size")

    def __init__(self) -> None:
        self.events = 0
        self.size = 0
        self.has_content = False
        self._carry = b""
        self._tail = b""
        self._newline = False

    def feed(self, data: bytes) -> None:
        """Take in the next piece of the answer's body."""
        if not data:
            return
        if self._newline and data[0] == 10:
            self.events += 1
            data_events = data[1:].count(b"\n\n")
        else:
            data_events = data.count(b"\n\n")
        self.events += data_events
        self.size += len(data)
        self._newline = data[-1] == 10 and not self._is_paired(data)
        if not self.has_content:
            self._look_for_content(data)
        self._tail = data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else self._joined(data)

    def _is_paired(self, data: bytes) -> bool:
        """Whether the final newline closed an event (an odd run of newlines leaves one open)."""
        run = len(data) - len(data.rstrip(b"\n"))
        return (run + (self._newline and run == len(data))) % 2 == 0

    def _joined(self, data: bytes) -> bytes:
        return (self._tail + data)[-TAIL_BYTES:]

    def _look_for_content(self, data: bytes) -> None:
        seen = self._carry + data
        self.has_content = _CONTENT.search(seen) is not None
        self._carry = b"" if self.has_content else seen[seen.rfind(b"\n\n") + 1 :][-CARRY_BYTES:]

    @property
    def is_done(self) -> bool:
        """Whether the stream's own end marker has passed."""
        return any(end in self._tail for end in _ENDS)

    def usage(self) -> bytes | None:
        """The last usage object as JSON bytes, once it has passed."""
        found = _USAGE.findall(self._tail)
        return found[-1] if found else None
