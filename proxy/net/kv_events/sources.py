"""Addresses of an engine's KV events, per rank, from vLLM's `/kv_event_sources`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxy.net.peer_documents import read_json

MOST_RANKS = 64
"""Ranks of one engine whose events are followed at most."""
_TOPIC_CHARS = 256


@dataclass(frozen=True, slots=True)
class Source:
    """The events of one data-parallel rank: where they come from, and where missed ones do.

    `replay_port`: None where missed events cannot be asked for.
    """

    host: str
    port: int
    replay_port: int | None
    topic: bytes = b""


class SourcesError(ValueError):
    """An engine lists its events in an unusable way."""


def read_sources(body: bytes, host: str) -> dict[int, Source]:
    """The sources by rank of an answer to `/kv_event_sources`; raises SourcesError.

    `host`: the instance's own, which the events come from whatever address the engine names: it
    names the one that it listens on, mostly `*`. Empty where the engine publishes nothing.
    """
    try:
        told = read_json(body)
    except ValueError as error:
        raise SourcesError("/kv_event_sources does not answer JSON") from error
    if not isinstance(told, dict):
        raise SourcesError("/kv_event_sources does not answer an object")
    found = {}
    for rank, given in list(told.items())[:MOST_RANKS]:
        if rank.isdecimal() and len(rank) < 6 and isinstance(given, dict) and _publishes(given):
            found[int(rank)] = _source(given, host)
    return found


def _publishes(given: dict[str, Any]) -> bool:
    is_on = given.get("enable_kv_cache_events", True) is True
    return is_on and given.get("publisher", "zmq") == "zmq"


def _source(given: dict[str, Any], host: str) -> Source:
    endpoint, replay, topic = (given.get(k) for k in ("endpoint", "replay_endpoint", "topic"))
    port = _port(endpoint)
    if port is None:
        raise SourcesError(f"its endpoint {str(endpoint)[:100]!r} is not tcp://HOST:PORT")
    known = topic if isinstance(topic, str) else ""
    return Source(host, port, _port(replay), known[:_TOPIC_CHARS].encode())


def _port(endpoint: Any) -> int | None:
    """The port of a ZeroMQ endpoint over TCP; None for any other value."""
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        return None
    digits = endpoint.rpartition(":")[2]
    port = int(digits) if digits.isdecimal() and len(digits) < 6 else 0
    return port if 1 <= port <= 65535 else None
