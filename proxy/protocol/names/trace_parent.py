"""The W3C trace context of a request: which trace it belongs to, and who its parent is there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from multidict import istr

TRACEPARENT: Final = istr("traceparent")
TRACESTATE: Final = istr("tracestate")
TRACE_HEADERS: Final = frozenset({b"traceparent", b"tracestate"})
"""Names of the headers that a traced request's legs get of the proxy, not of the client."""
_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")
_NO_TRACE, _NO_PARENT, _NO_VERSION = "0" * 32, "0" * 16, "ff"
_SAMPLED = 1
_STATE: Final = re.compile(r"[ -~\t]{1,512}")
"""A longer tracestate need not be passed on."""


def parent_of(given: Sequence[str]) -> tuple[str, str, bool] | None:
    """Trace, parent, and whether it is sampled, by the traceparent headers of a request.

    None where there is not one, or not a valid one: then a new trace begins.
    """
    found = _FORM.fullmatch(given[0]) if len(given) == 1 else None
    if found is None:
        return None
    version, trace, parent, flags, more = found.groups()
    if version == _NO_VERSION or trace == _NO_TRACE or parent == _NO_PARENT:
        return None
    if version == "00" and more is not None:
        return None
    return trace, parent, bool(int(flags, 16) & _SAMPLED)


def state_of(given: Sequence[str]) -> str:
    """What the vendors of a valid traceparent say beside it; empty where it is not passed on."""
    state = ",".join(given)
    return state if _STATE.fullmatch(state) else ""


def context_lines(trace: str, parent: str, state: str, *, is_sampled: bool) -> bytes:
    """The header lines that name the parent of what an instance does."""
    lines = f"traceparent: 00-{trace}-{parent}-{'01' if is_sampled else '00'}\r\n"
    return (f"{lines}tracestate: {state}\r\n" if state else lines).encode()
