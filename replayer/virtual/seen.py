"""What a planner's sources would read of a virtual fleet: counters, loads, and who serves.

The counters are those that a proxy and its engines export. They only grow; whoever reads them takes
differences. Nothing here is known of requests to come.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from proxy.core.types import Load


@dataclass(slots=True)
class Told:
    """Counters of the proxy since the start; requests, or tokens where the name says so.

    `offered`: as `issued_total` with what waits: started, not completed. One that is refused and
    comes again counts again. All others are of requests that have ended well.
    """

    offered: int = 0
    ended: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    def copy(self) -> Told:
        """These values, as they are now."""
        return Told(
            self.offered, self.ended, self.prompt_tokens, self.output_tokens, self.cached_tokens
        )


@dataclass(frozen=True, slots=True)
class SeenInstance:
    """One instance that serves: the proxy's account of it, and the engine's counters.

    `iterations`, `computed_tokens` of prompts: since its start. `gaps`, `gap_s`: number and sum of
    the times between two tokens of a stream, seconds.
    """

    name: str
    load: Load
    iterations: int
    computed_tokens: int
    gaps: int
    gap_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """The fleet at one moment. `ordered`: not ready yet, paid for. `queued`: in the proxy's queue.

    `instances`: those that are up, proven and not draining.
    """

    now_s: float
    ordered: int
    draining: int
    queued: int
    told: Told
    instances: tuple[SeenInstance, ...]

    @property
    def wanted(self) -> int:
        """The replicas that are kept: those that serve, and those to come."""
        return len(self.instances) + self.ordered


@dataclass(frozen=True, slots=True)
class Wish:
    """What a scaler wants: so many replicas, None to leave them; and when it is asked again."""

    replicas: int | None = None
    next_s: float = math.inf


class Scaler(Protocol):
    """Decides how many replicas there are to be. `first_s`: when it is asked first, seconds."""

    first_s: float

    def tick(self, look: Callable[[], Seen], now_s: float) -> Wish:
        """Answer; whoever looks costs the simulation some time, others do not."""
        ...


@dataclass(slots=True)
class Schedule:
    """Orders that are known beforehand: at each time, in seconds, so many replicas."""

    orders: list[tuple[float, int]]
    first_s: float = field(init=False)

    def __post_init__(self) -> None:
        """Begin with the first order."""
        self.orders = sorted(self.orders)
        self.first_s = self.orders[0][0] if self.orders else math.inf

    def tick(self, look: Callable[[], Seen], now_s: float) -> Wish:
        """The last order that is due."""
        del look
        due = [replicas for at_s, replicas in self.orders if at_s <= now_s]
        later = [at_s for at_s, _ in self.orders if at_s > now_s]
        return Wish(due[-1] if due else None, min(later, default=math.inf))
