"""A load: requests with their times, the SLO, the bounds of the fleet; and its trace file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
"""Of the block ids in the trace files."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request's place in a session: it begins after others have ended, and a delay."""

    request: str
    play: str
    session: str
    after: tuple[tuple[str, float], ...]
    """Names of requests, with the seconds to wait after each."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request; with a turn, `at_s` is the earliest time."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    turn: Turn | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests, and under which bounds they are to be served."""

    name: str
    seed: int
    requests: Sequence[Request]
    end_s: float
    """No request arrives later, but turns of sessions."""
    slo_ttft_s: float = 2.0
    slo_itl_s: float = 0.05
    min_replicas: int = 1
    max_replicas: int = 10
    initial_replicas: int = 3
    rises_s: tuple[float, ...] = ()
    """When the rate jumps up."""

    @property
    def has_sessions(self) -> bool:
        """Whether requests wait for others: a closed loop inside each session."""
        return self.requests[0].turn is not None

    @property
    def trace_format(self) -> str:
        """The replay's name for the form of the trace file."""
        return "agentic_mooncake" if self.has_sessions else "mooncake"


class Blocks:
    """Fresh block ids, for prompts that share nothing."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, tokens: int) -> range:
        """Return the ids of a prompt of this length."""
        first, self._next = self._next, self._next - (-tokens // BLOCK_TOKENS)
        return range(first, self._next)


def write(load: Load, path: Path) -> None:
    """Write the trace file that the replay reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for line in _lines(load):
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _lines(load: Load) -> Iterable[dict[str, Any]]:
    if load.has_sessions:
        yield {
            "schema": "dynamo.agentic_mooncake",
            "version": 2,
            "block_size": BLOCK_TOKENS,
            "hash_id_scope": "local",
            "source": {"format": "derived", "digest": f"{load.name}-{load.seed}"},
        }
    yield from map(_line, load.requests)


def _line(request: Request) -> dict[str, Any]:
    at_ms = round(1000 * request.at_s, 3)
    shape = {
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
        "hash_ids": list(request.blocks),
    }
    turn = request.turn
    if turn is None:
        return {"timestamp": at_ms, **shape}
    return {
        "request_id": turn.request,
        "play_id": turn.play,
        "session_id": turn.session,
        "model": "m",
        **shape,
        "not_before_ms": at_ms,
        "dependencies": [_dependency(name, delay_s) for name, delay_s in turn.after],
    }


def _dependency(name: str, delay_s: float) -> dict[str, Any]:
    delay_ms = round(1000 * delay_s, 3)
    return {
        "request_id": name,
        "trigger": "completion",
        "delay_ms": delay_ms,
        "relation": "sequence",
    }
