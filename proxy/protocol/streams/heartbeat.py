"""Heartbeats: events for a stream's client while its instance is silent.

A comment and a blank line is the standard's way. But some clients dispatch at every blank line, and
fail at data that is not JSON (openai-go before 3.43). Without the blank line the comment would hide
the next event from clients that split at blank lines. So a heartbeat is an event that changes
nothing: the dialect's own one where it has one, else a chunk without content. A comment stands in
front of it, with which clients that split at blank lines pass the event over.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from proxy.protocol.endpoints import Dialect
from proxy.protocol.streams.sse import object_of

COMMENT: Final = b": keepalive\n"
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_SHARED = ("id", "object", "created", "model")
_PLAIN = (str, int, float)
"""What is copied of an engine's: orjson reads lists that it cannot write, as they are too deep."""


def heartbeat(dialect: Dialect, first_data: bytes, events: int) -> bytes:
    """A heartbeat in a stream of a dialect, to be written between two events.

    `first_data`: of the stream's first event, whose id and model its chunks share; `events`: how
    many have passed.
    """
    if dialect is Dialect.MESSAGES:
        return _PING
    if dialect is Dialect.RESPONSES:
        told: dict[str, Any] = {"type": "keepalive", "sequence_number": events}
        return b"%bevent: keepalive\ndata: %b\n\n" % (COMMENT, orjson.dumps(told))
    first = object_of(first_data)
    if dialect is Dialect.OPENAI and not isinstance(first.get("choices"), list):
        return COMMENT + b"\n"  # of a stream of a kind that is not known no event is harmless
    is_text = dialect is Dialect.COMPLETIONS
    kind = "text_completion" if is_text else "chat.completion.chunk"
    chunk: dict[str, Any] = {"id": "", "object": kind, "created": 0, "model": ""}
    chunk |= {name: first[name] for name in _SHARED if isinstance(first.get(name), _PLAIN)}
    nothing: dict[str, Any] = {"text": ""} if is_text else {"delta": {}}
    chunk["choices"] = [{"index": 0, **nothing, "logprobs": None, "finish_reason": None}]
    return b"%bdata: %b\n\n" % (COMMENT, orjson.dumps(chunk))
