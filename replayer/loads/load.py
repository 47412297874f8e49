"""A load: requests with their times, the SLO, and the bounds of the fleet.

These modules need no package, since another judge imports them into an environment of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 512
"""Of a block id, where a load does not say otherwise."""


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
    block_tokens: int = BLOCK_TOKENS

    @property
    def has_sessions(self) -> bool:
        """Whether requests wait for others: a closed loop inside each session."""
        return self.requests[0].turn is not None


class Blocks:
    """Fresh block ids, for prompts that share nothing."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, tokens: int) -> range:
        """Return the ids of a prompt of this length."""
        first, self._next = self._next, self._next - (-tokens // BLOCK_TOKENS)
        return range(first, self._next)
