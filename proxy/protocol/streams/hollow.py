"""Hollow answers under status 200, found by byte search without parsing JSON.

An engine whose answer has nothing in it, or ends by `abort` or `error`, has failed, whatever its
status says. JSON escapes quotes inside a string. So no text of a model, repeated from a client or
not, looks like a member of the answer. What a client sent as JSON does, where an engine repeats it:
a Responses answer has its request's tools and metadata. So a member counts only at its depth, by
the brackets that close behind it.
"""

from __future__ import annotations

import re
from typing import Final

from proxy.protocol.endpoints import ENDED, ENDED_BY_NAME, LAST_EVENTS, OTHER, Dialect, Endpoint
from proxy.protocol.streams.sse import (
    LAST_BYTES,
    Scanner,
    carries_content,
    first_event,
    is_error_event,
    names_the_end,
)

_BROKEN: Final = re.compile(rb'"finish_reason"\s*:\s*(?:\{\s*"type"\s*:\s*)?"(abort|error)"')
_BROKEN_HINTS: Final = (b'"abort"', b'"error"')
_IN_CHOICE: Final = 3
"""Brackets around a choice's finish reason: of the answer, of its choices, of this one."""
_FAILED: Final = re.compile(rb'"status"\s*:\s*"(cancelled|failed)"')
"""How a Responses answer says the same: it has no finish reason."""
_FAILED_HINTS: Final = (b'"cancelled"', b'"failed"')
_IN_RESPONSE: Final = 1
"""Brackets around its status; in a stream one more, of the event."""
_CHUNKS: Final = (Dialect.CHAT, Dialect.COMPLETIONS)
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\Z)', re.DOTALL)
"""Also one without an end, so that nothing behind it is tried again."""
_TOLD: Final = re.compile(
    rb'"(?:finish_reason|stop_reason)"\s*:\s*["{]|"usage"\s*:\s*\{|'
    rb'"status"\s*:\s*"(?:completed|incomplete|queued|cancelled)"'
)
"""The parts of a stream that report its end."""
_MEMBERS: Final = {
    Dialect.CHAT: b'"choices"',
    Dialect.COMPLETIONS: b'"choices"',
    Dialect.MESSAGES: b'"content"',
    Dialect.RESPONSES: b'"output"',
}
"""The member without which a whole answer is none."""
_A_CHOICE: Final = b'"choices":[{'
_NO_CHOICE: Final = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_HINTS: Final = (*_BROKEN_HINTS, b"[DONE]")
_PLAIN: Final = {
    Dialect.CHAT: (_BROKEN_HINTS, b"[DONE]"),
    Dialect.COMPLETIONS: (_BROKEN_HINTS, b"[DONE]"),
    Dialect.MESSAGES: (_BROKEN_HINTS, b"message_stop"),
    Dialect.RESPONSES: (_FAILED_HINTS, b"response.completed"),
}
"""Traces of an end that is a fault, and of a good one."""
_NAMED_HINTS: Final = (*_BROKEN_HINTS, b"message_stop", b"response.")
"""Without any of them a stream that has begun is not at its end."""
_OBJECT: Final = re.compile(rb"\s*[{\[]")
_ERROR: Final = re.compile(
    rb'\s*\{\s*(?:"error"\s*:\s*[{"]|"object"\s*:\s*"error"|"detail"\s*:\s*[{"\[])'
)
"""An error under status 200, as it begins; `detail` is what web frameworks write."""
_MAYBE_ERRORS: Final = (b'{"e', b'{"o', b'{"d', b"{ ", b"{\n", b"{\r", b"{\t", b" ", b"\n", b"\r")
"""How one begins: the pattern is tried on nothing else."""
_NOTHING: Final = frozenset({b"", b"{}", b"null", b'""'})
_NOTHING_BYTES: Final = 64
"""Longer ones are not looked at for being empty."""
EMPTY: Final = "it has nothing in it"
_OTHER_KIND: Final = "it is not an answer of this path"


SHORT_BYTES: Final = 6
"""Text up to this is next to nothing: a word."""
SHORT_EVENTS, SHORT_STREAM_BYTES = 12, 8192
"""A stream of more is not looked at for being short."""
_TEXT: Final = re.compile(
    rb'"(?:content|reasoning_content|reasoning|text|refusal|delta|thinking)"'
    rb'\s*:\s*"((?:[^"\\]|\\.){0,7})'
)
_NO_TEXT: Final = re.compile(
    rb'"tool_calls"\s*:\s*\[\s*\{|"(?:function_call|audio)"\s*:\s*\{|"partial_json"|'
    rb'"type"\s*:\s*"(?:\w+_call|tool_use)"'
)
"""What is of use without a text."""


def is_short(seen: bytes | bytearray) -> bool:
    """Whether an answer, or the events of a stream, have next to nothing in them."""
    rest = SHORT_BYTES
    for found in _TEXT.finditer(seen):
        rest -= len(found[1])
        if rest < 0:
            return False
    return _NO_TEXT.search(seen) is None


def is_short_stream(scanner: Scanner) -> bool:
    """Whether a whole stream has next to nothing in it, by what is kept of it."""
    if not scanner.has_content:
        return _NO_TEXT.search(scanner.recent_events) is None
    is_small = scanner.events <= SHORT_EVENTS and scanner.size <= SHORT_STREAM_BYTES
    return is_small and is_short(scanner.recent_events)


def broken(
    dialect: Dialect, seen: bytes | bytearray, *, is_stream: bool, most: int = LAST_BYTES
) -> str | None:
    """The fault of an end by `abort` or `error`; None if these bytes have none.

    `seen`: an answer in one piece, or events of a stream, of which the last `most` bytes count.
    """
    if dialect in _CHUNKS:
        hints, form, depth, what = _BROKEN_HINTS, _BROKEN, _IN_CHOICE, "finish reason"
    elif dialect is Dialect.RESPONSES:
        hints, form, depth, what = _FAILED_HINTS, _FAILED, _IN_RESPONSE + is_stream, "status"
    else:
        return None
    seen = seen[-most:]
    if seen.rfind(hints[0]) < 0 and seen.rfind(hints[1]) < 0:
        return None
    if is_stream and dialect is Dialect.RESPONSES:
        seen = _last_line(seen)  # items of the output have a status too, in events of their own
    found = _at_depth(form, seen, depth, by_line=is_stream)
    return None if found is None else f"{what} {found.decode()}"


def _last_line(events: bytes | bytearray) -> bytes | bytearray:
    """The data of the last whole event that is JSON, with its line end."""
    end = events.rfind(b"}\n")
    end = events.rfind(b"}\r\n") if end < 0 else end
    return events[events.rfind(b"\n", 0, max(end, 0)) + 1 : end + 1] + b"\n"


def _at_depth(
    form: re.Pattern[bytes], text: bytes | bytearray, depth: int, *, by_line: bool
) -> bytes | None:
    """The value of the last match inside of so many brackets of a JSON text, or of a whole line.

    Each byte is looked at once, however many matches there are.
    """
    end, inside = len(text), 0
    is_whole = not by_line
    for found in reversed(list(form.finditer(text))):
        start = found.start()
        line_end = text.find(b"\n", start, end) if by_line else -1
        if line_end >= 0:
            end, inside, is_whole = line_end, 0, True
        inside += _closed(text[start:end])
        if is_whole and inside == depth:
            return found[1]
        end = start
    return None


def _closed(text: bytes | bytearray) -> int:
    """How many more brackets a part of a JSON text closes than it opens."""
    bare = _STRING.sub(b"", text)
    return bare.count(b"}") + bare.count(b"]") - bare.count(b"{") - bare.count(b"[")


def why_hollow(row: Endpoint, kind: bytes, body: bytes) -> str | None:
    """Why a whole answer in one piece is hollow; None if it is not.

    `kind`: of its content, in lower case.
    """
    if row is OTHER:
        return None
    if kind.startswith(b"text/html"):
        return "it is a web page"
    if len(body) <= _NOTHING_BYTES and body.strip() in _NOTHING:
        return EMPTY
    is_error = row.is_posted and body.startswith(_MAYBE_ERRORS) and _ERROR.match(body) is not None
    if is_error or not row.teaches:
        return _OTHER_KIND if is_error else None
    at = body.find(_MEMBERS[row.dialect])
    if at < 0 or not (body.startswith(b"{") or _OBJECT.match(body) is not None):
        return _OTHER_KIND
    is_plain = row.dialect not in _CHUNKS or body.startswith(_A_CHOICE, at)
    has_none = not is_plain and _NO_CHOICE.match(body, at) is not None
    return EMPTY if has_none else broken(row.dialect, body, is_stream=False)


def why_hollow_stream(
    dialect: Dialect, head: bytes, *, is_over: bool, may_move: bool = False
) -> str | None:
    """The fault of a stream by its bytes so far; `is_over`: these are all bytes.

    `may_move`: once it has a token it migrates, whatever its end is.
    """
    hints = _NAMED_HINTS if dialect in ENDED_BY_NAME else _HINTS
    may_be_over = is_over or max(map(head.rfind, hints)) >= 0
    if dialect not in ENDED or not may_be_over or _is_plainly_good(dialect, head):
        return None
    event = first_event(head)
    if event is None or is_error_event(event):
        return None
    scanner = Scanner()
    scanner.feed(head)
    if may_move and scanner.has_content:
        return None
    if is_end(dialect, event):
        return EMPTY
    if is_over:
        return ends_hollow(dialect, head, has_content=scanner.has_content)
    return _breaks(dialect, head)


def _is_plainly_good(dialect: Dialect, head: bytes) -> bool:
    """Whether a stream has content in front of its end, and no trace of an end that is a fault.

    That is most of those that come in one piece; the others are looked at event by event.
    """
    hints, end = _PLAIN[dialect]
    if head.rfind(hints[0]) >= 0 or head.rfind(hints[1]) >= 0:
        return False
    at = head.find(end)
    return carries_content(head if at < 0 else head[:at])


def _breaks(dialect: Dialect, head: bytes) -> str | None:
    """The fault of an end by `abort` or `error` that has come already."""
    if dialect in ENDED_BY_NAME and not names_the_end(head):
        return None
    return broken(dialect, head, is_stream=True, most=len(head))


def is_end(dialect: Dialect, event: bytes) -> bool:
    """Whether an event is the last one of its stream, as its name or its data says."""
    if "[DONE]" in LAST_EVENTS[dialect]:
        return event.startswith(b"data:") and event[5:].strip() == b"[DONE]"
    return _TOLD.search(event) is None and names_the_end(event)


def ends_hollow(dialect: Dialect, seen: bytes | bytearray, *, has_content: bool) -> str | None:
    """Why a finished stream is hollow; `seen`: its last events."""
    if (why := broken(dialect, seen, is_stream=True, most=len(seen))) is not None:
        return why
    return None if has_content or _TOLD.search(seen) is not None else EMPTY
