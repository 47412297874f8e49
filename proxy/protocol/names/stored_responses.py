"""Stored responses of `/v1/responses`: the id that a request names, and the id in an answer.

An id is read where the engine writes it, before any text of the client. That is the first member of
the body, or of `response` in a stream's first event. Anywhere else it could be planted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxy.protocol.endpoints import ENDPOINTS, RESPONSES

PREVIOUS = "previous_response_id"
NAMED = "request_id"
"""The body's field that names a response. It is removed for a tenant: vLLM stores under that name
whatever is there already, so one tenant could replace another's response, or read it."""
HEAD_BYTES = 1024
"""The id is within so many bytes of an answer's beginning."""
_ID = rb'"id"\s*:\s*"([A-Za-z0-9_.:-]{1,256})"'
_BODY = re.compile(rb"\s*\{\s*" + _ID)
_EVENT = re.compile(
    rb"(?::[^\n]*\n\n?)*(?:event:\s*response\.created\s*\n)?data:\s*\{\s*"
    rb'(?:(?:"type"\s*:\s*"response\.created"|"sequence_number"\s*:\s*\d{1,9})\s*,\s*)*'
    rb'"response"\s*:\s*\{\s*' + _ID
)


@dataclass(frozen=True, slots=True)
class Reference:
    """The response that a request is about; `param`: the name of the field that has its id."""

    response_id: str
    param: str


def reference(path: str, body: Mapping[str, Any]) -> Reference | None:
    """The stored response that a request continues, reads or changes; None for any other."""
    if not path.startswith(RESPONSES):
        return None
    below = path[len(RESPONSES) :].split("/")
    if below[0] != "":
        return None  # another path that begins alike
    # A server behind may take several slashes for one.
    response_id = next(filter(None, below), "")
    if response_id and path not in ENDPOINTS:
        return Reference(response_id, "response_id")
    previous = body.get(PREVIOUS)
    return Reference(previous, PREVIOUS) if isinstance(previous, str) and previous else None


def stored_id(head: bytes, *, is_stream: bool) -> str | None:
    """The id in the beginning of an answer, as the engine wrote it; None where there is none."""
    found = (_EVENT if is_stream else _BODY).match(head)
    return found[1].decode("ascii") if found else None


def may_be_stored(path: str, body: Mapping[str, Any]) -> bool:
    """Whether the answer to a request may be asked for later."""
    return path == RESPONSES and body.get("store") is not False
