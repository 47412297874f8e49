"""Hollow answers under status 200, found by byte search without parsing JSON.

An engine whose answer has nothing in it, or ends by `abort` or `error`, has failed, whatever its
status says. JSON escapes quotes inside a string. So no text of a model, repeated from a client or
not, looks like a member of the answer.
"""

from __future__ import annotations

import re
from typing import Final

from proxy.protocol.endpoints import ENDED, ENDED_BY_NAME, LAST_EVENTS, OTHER, Dialect, Endpoint
from proxy.protocol.streams.sse import (
    LAST_BYTES,
    Scanner,
    first_event,
    is_error_event,
    names_the_end,
)

_BROKEN = re.compile(rb'"finish_reason"\s*:\s*(?:\{\s*"type"\s*:\s*)?"(abort|error)"')
_BROKEN_HINTS = (b'"abort"', b'"error"')
_TOLD = re.compile(
    rb'"(?:finish_reason|stop_reason)"\s*:\s*["{]|"usage"\s*:\s*\{|'
    rb'"status"\s*:\s*"(?:completed|incomplete|queued|cancelled)"'
)
"""The parts of a stream that report its end."""
_CHOICES = b'"choices"'
_NO_CHOICE = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_HINTS = (*_BROKEN_HINTS, b"[DONE]")
_NAMED_HINTS = (*_BROKEN_HINTS, b"message_stop", b"response.")
"""Without any of them a stream that has begun is not at its end."""
_OBJECT = re.compile(rb"\s*[{\[]")
_ERROR = re.compile(rb'\s*\{\s*(?:"error"\s*:\s*[{"]|"object"\s*:\s*"error")')
"""An error under status 200, as it begins."""
_NOTHING = frozenset({b"", b"{}", b"null", b'""'})
_NOTHING_BYTES = 64
"""Longer ones are not looked at for being empty."""
EMPTY: Final = "it has nothing in it"


def broken(seen: bytes | bytearray) -> str | None:
    """The fault of an end by `abort` or `error`; None if these bytes have none."""
    if max(map(seen.rfind, _BROKEN_HINTS)) < 0:
        return None
    found = _BROKEN.search(seen)
    return None if found is None else f"finish reason {found[1].decode()}"


def why_hollow(row: Endpoint, kind: bytes, body: bytes) -> str | None:
    """Why a whole answer in one piece is hollow; None if it is not. `kind`: of its content."""
    if row is OTHER:
        return None
    if kind.lower().startswith(b"text/html"):
        return "it is a web page"
    if len(body) <= _NOTHING_BYTES and body.strip() in _NOTHING:
        return EMPTY
    if not row.teaches:
        return None
    if _OBJECT.match(body) is None or _ERROR.match(body) is not None:
        return "it is not an answer of this path"
    at = body.find(_CHOICES)
    has_none = at >= 0 and _NO_CHOICE.match(body, at) is not None
    return EMPTY if has_none else broken(body[-LAST_BYTES:])


def why_hollow_stream(
    dialect: Dialect, head: bytes, *, is_over: bool, may_move: bool = False
) -> str | None:
    """The fault of a stream by its bytes so far; `is_over`: these are all bytes.

    `may_move`: once it has a token it migrates, whatever its end is.
    """
    hints = _NAMED_HINTS if dialect in ENDED_BY_NAME else _HINTS
    if dialect not in ENDED or not (is_over or max(map(head.rfind, hints)) >= 0):
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
    return ends_hollow(head, has_content=scanner.has_content) if is_over else broken(head)


def is_end(dialect: Dialect, event: bytes) -> bool:
    """Whether an event is the last one of its stream, as its name or its data says."""
    if "[DONE]" in LAST_EVENTS[dialect]:
        return event.startswith(b"data:") and event[5:].strip() == b"[DONE]"
    return _TOLD.search(event) is None and names_the_end(event)


def ends_hollow(seen: bytes | bytearray, *, has_content: bool) -> str | None:
    """Why a finished stream is hollow; `seen`: its last events."""
    if (why := broken(seen)) is not None:
        return why
    return None if has_content or _TOLD.search(seen) is not None else EMPTY
