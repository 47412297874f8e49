"""What an answer says of itself, read from its bytes while they pass.

The scanner sees the same bytes as the client, in whatever pieces they arrive, and says the same for
every way of cutting them. It never parses JSON: it finds the first content, counts events, and
looks through the rest in steps, for usage and end. Limits: events end in two newlines, as vLLM
writes them, without carriage returns; a usage object is seen up to `TAIL_BYTES` of length.
"""

from __future__ import annotations

import re

TAIL_BYTES = 4096
CARRY_BYTES = 65536
"""How much of an answer is waited for until its first event is there."""
_CONTENT = re.compile(
    rb'"(?:content|reasoning_content|reasoning|text|refusal|delta|thinking|partial_json)"'
    rb'\s*:\s*"[^"]|"tool_calls"\s*:\s*\[\s*\{'
)
_CONTENT_BYTES = 64
"""No match of `_CONTENT` is longer, unless somebody pads JSON with blanks."""
_INNER = rb"\{(?:[^{}]++|\{[^{}]*+\})*+\}"
_USAGE = re.compile(rb'"usage"\s*:\s*(\{(?:[^{}]++|' + _INNER + rb")*+\})")
_ERROR = re.compile(rb'event:\s*error\b|(?:event:[^\n]*\n)?data:\s*\{\s*"error"')
_ENDS = (
    b"\ndata: [DONE]",
    b"\ndata:[DONE]",
    b"\nevent: message_stop",
    b"\nevent: response.completed",
    b"\nevent: response.incomplete",
    b"\nevent: response.failed",
)
"""Each at the start of a line: inside a JSON string, where a model may write it, none begins."""
_HINTS = (b"[DONE]", b"\nevent:")


def first_event(head: bytes) -> bytes | None:
    """The first complete event without its comments; None while it is still on its way."""
    *events, _ = head.split(b"\n\n")
    for event in events:
        lines = [line for line in event.split(b"\n") if line and not line.startswith(b":")]
        if lines:
            return b"\n".join(lines)
    return None


def is_error_event(event: bytes) -> bool:
    """Whether an event carries an engine error, not a chunk: vLLM sends these inside a 200."""
    return _ERROR.match(event) is not None


class Scanner:
    """Watches one answer. Feed it every piece; read its fields at any time."""

    __slots__ = ("_edge", "_ended", "_open", "_recent", "_usage", "events", "has_content", "size")

    def __init__(self) -> None:
        self.events = 0
        self.size = 0
        self.has_content = False
        self._open = b""
        self._edge = b""
        self._recent = bytearray(b"\n")
        self._ended = False
        self._usage: bytes | None = None

    def feed(self, data: bytes) -> None:
        """Take in the next piece of the answer's body."""
        self.size += len(data)
        if data.find(b"\n") == len(data) - 2 and data.endswith(b"\n\n") and not self._open:
            self.events += 1  # one event of one line, as nearly always
        else:
            self._count_events(self._open + data)
        if not self.has_content:
            seen = self._edge + data
            self.has_content = _CONTENT.search(seen) is not None
            self._edge = seen[-_CONTENT_BYTES:]
        self._recent += data
        if len(self._recent) > 3 * TAIL_BYTES:
            self._look_back()
            del self._recent[:-TAIL_BYTES]

    def _count_events(self, data: bytes) -> None:
        """Pairs of newlines; an odd one at the end waits for the next piece in `_open`."""
        self.events += data.count(b"\n\n")
        at_end = len(data) - len(data.rstrip(b"\n"))
        self._open = b"\n" if at_end & 1 else b""

    def _look_back(self) -> None:
        """Note what is in the recent bytes, before they go and whenever somebody asks."""
        recent = self._recent
        # From the end: several times as fast as `in`, where most of the text matches nothing.
        if not self._ended and (recent.rfind(_HINTS[0]) >= 0 or recent.rfind(_HINTS[1]) >= 0):
            self._ended = any(end in recent for end in _ENDS)
        self._usage = _last_usage(recent) or self._usage

    @property
    def is_done(self) -> bool:
        """Whether the stream's own end marker has passed."""
        self._look_back()
        return self._ended

    def usage(self) -> bytes | None:
        """The last usage object as JSON bytes, once it has passed."""
        self._look_back()
        return self._usage


def _last_usage(seen: bytearray) -> bytes | None:
    """The last usage object. In a string its quotes are escaped, so no text of a model matches."""
    end = len(seen)
    while (start := seen.rfind(b'"usage"', 0, end)) >= 0:
        if found := _USAGE.match(seen, start):
            return bytes(found[1])
        end = start
    return None
