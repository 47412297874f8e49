"""The requests of a virtual run: options, result rows, dependencies, live state.

Times are virtual seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import xxhash

from proxy.core.admission.queue import QueueLimits
from proxy.core.latency.slo import Slo
from proxy.core.routing.actions import (
    Effect,
    FellBack,
    HedgeEnded,
    Retried,
)
from proxy.core.thermal.fleet_control import FleetControl
from proxy.core.types import RequestFacts
from replayer.engine.costs import IntakeCost
from replayer.engine.heat import FirstOrderPlant, Plant, SensorFaults
from replayer.engine.types import EngineOptions
from replayer.virtual.arrivals import Planned

QUEUE = QueueLimits(256, 64 << 20, 10.0)
"""The defaults of `--max-queue`, `--max-queue-bytes` and `--max-queue-seconds`."""


@dataclass(frozen=True, slots=True)
class WayNoise:
    """Delays of legs to their engine, beside its intake: exponential, with this mean.

    Each delay is drawn by a hash of the request and the leg's number. So equal runs are equal, and
    every policy meets the same delays on the same load. Other seeds give other delays.
    """

    mean_s: float = 0.0
    seed: int = 0

    def delay_s(self, index: int, session_id: str, leg: int) -> float:
        """Draw the delay of a request's leg, in seconds."""
        if not self.mean_s:
            return 0.0
        drawn = xxhash.xxh3_64_intdigest(f"{index} {leg} {session_id}".encode(), self.seed)
        return -self.mean_s * math.log((drawn + 1) / 2**64)


@dataclass(frozen=True, slots=True)
class Retry:
    """How a client comes again that was refused: at most `most` times, None for without end.

    It does as Retry-After says. Or it has a pause of its own: `pause_s` in the mean, from half of
    it to one and a half, drawn by a hash of the request and the number of its refusals.
    """

    most: int | None = None
    pause_s: float | None = None

    def after_s(self, row: VirtualRow, told_s: float) -> float | None:
        """Seconds until a request comes again that was just refused; None where it does not."""
        if self.most is not None and row.rejects > self.most:
            return None
        if self.pause_s is None:
            return told_s
        drawn = xxhash.xxh3_64_intdigest(f"{row.index} {row.rejects} {row.session_id}".encode())
        return self.pause_s * (0.5 + drawn / 2**64)


@dataclass(frozen=True, slots=True)
class Loss:
    """An engine that dies: its number, and when it is there again, with nothing cached."""

    engine: int
    at_s: float
    back_s: float


def _first_order(name: str) -> Plant:
    del name
    return FirstOrderPlant()


@dataclass(frozen=True, slots=True)
class HeatOptions:
    """Thermal control of a run. `make_control`: of the whole fleet; `make_plant`: by the engine.

    `faults`: what is wrong with every engine's sensors.
    """

    make_control: Callable[[], FleetControl]
    make_plant: Callable[[str], Plant] = _first_order
    faults: SensorFaults = field(default_factory=SensorFaults)


BALANCES = "random", "session"
"""How a load balancer before the replicas spreads requests: each for itself, or all of a session to
one replica."""


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """`count` replicas; `balance` is of BALANCES, `tick_s` None: they share nothing."""

    count: int
    balance: str = "random"
    tick_s: float | None = 0.025


ONE_REPLICA = ReplicaOptions(1)


@dataclass(frozen=True, slots=True)
class VirtualOptions:
    """The fleet and the client of a virtual run; one engine per entry of `engines`."""

    engines: tuple[EngineOptions, ...]
    block_tokens: int
    timeout_s: float = 60.0
    """The client gives up without a first token by then."""
    prefill_timeout_s: float = 120.0
    """The proxy's own."""
    transfer_timeout_s: float = 30.0
    """The proxy's own."""
    ttft_timeout_s: float = 300.0
    """The proxy's own."""
    queue: QueueLimits = QUEUE
    """The proxy's own."""
    scrape_interval_s: float = 2.0
    estimate_factor: float = 1.0
    """The proxy's count of prompt tokens over the engine's."""
    retry: Retry = field(default_factory=Retry)
    """How clients come again."""
    until_s: float = math.inf
    """Cuts the run: a request that has not ended has no `end_s`, a request that has not begun has
    no row."""
    proxy: IntakeCost = field(default_factory=IntakeCost)
    """Time from the client's sending to the decision."""
    way: WayNoise = field(default_factory=WayNoise)
    """Time from the decision to an engine, beside its intake."""
    joins_s: tuple[float, ...] = ()
    """Time at which each engine joins; by default the start."""
    reports_kv: bool = True
    """Engines report the size and use of their KV."""
    losses: tuple[Loss, ...] = ()
    """Engines that die; losses of one engine do not overlap."""
    migration_limit: int = 0
    """`--migration-limit`."""
    heat: HeatOptions | None = None
    """Thermal control, None for none."""
    replicas: ReplicaOptions = ONE_REPLICA
    """The proxies that requests are spread over."""
    model: str = "sim"


@dataclass(slots=True)
class VirtualRow:
    """The result of one request."""

    index: int
    session_id: str
    arrival_s: float
    """Time when the client first sent it."""
    prompt_tokens: int
    output_tokens: int
    new_tokens: int
    ttft_s: float | None = None
    end_s: float | None = None
    outcome: str = "ok"
    """ok, rejected, timeout, or failed if no attempt was left."""
    route_class: str = ""
    reason: str = ""
    decode: str = ""
    prefill: str | None = None
    predicted_ttft_s: float | None = None
    estimated_new_tokens: int = 0
    estimated_hit_ratio: float = 0.0
    cached_tokens: int = 0
    external_tokens: int = 0
    """KV transferred between instances."""
    computed_tokens: int = 0
    """Tokens that P and D prefilled."""
    rejects: int = 0
    sent_s: float | None = None
    """Time when the client last sent it, where it was refused before."""
    retries: int = 0
    fallback: str | None = None
    hedge: str | None = None
    """The winner, local or peer, if D computed too because P was late."""
    moves: int = 0
    """Number of migrations of the stream."""

    @property
    def waited_s(self) -> float:
        """Seconds from the client's first try to its last."""
        return 0.0 if self.sent_s is None else self.sent_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        """Seconds from sending to the last token; None for a request that failed."""
        return None if self.end_s is None else self.end_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two."""
        if self.end_s is None or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.arrival_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(slots=True)
class VirtualRun:
    """All rows in the order of the load; totals over all engines."""

    rows: list[VirtualRow]
    makespan_s: float = 0.0
    preemptions: int = 0
    evicted_blocks: int = 0
    drift: int = 0
    moved_bytes: int = 0
    used_ratio: list[float] = field(default_factory=list)


def note(row: VirtualRow, effect: Effect) -> None:
    """Note an effect of the flow in the row."""
    if isinstance(effect, FellBack):
        row.fallback = effect.why.value
    elif isinstance(effect, HedgeEnded):
        row.hedge = effect.winner
    elif isinstance(effect, Retried):
        row.retries += 1


@dataclass(slots=True)
class Waits:
    """Dependencies of requests: how many others each still waits for."""

    planned: Sequence[Planned]
    open: list[int] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)
    followers: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, one in enumerate(self.planned):
            self.open.append(len(one.wait_for))
            self.ready_s.append(one.earliest_s)
            for other in one.wait_for:
                self.followers.setdefault(other, []).append(index)

    def ended(self, index: int, now_s: float) -> list[int]:
        """Note a request's end; returns the requests that may now start, at their `ready_s`."""
        free = []
        for other in self.followers.pop(index, ()):
            self.open[other] -= 1
            self.ready_s[other] = max(self.ready_s[other], now_s + self.planned[other].delay_s)
            if not self.open[other]:
                free.append(other)
        return free


def facts_of(planned: Planned, options: VirtualOptions) -> RequestFacts:
    """The request's facts by the proxy's estimates."""
    turn, factor = planned.turn, options.estimate_factor * planned.estimate_factor
    return RequestFacts(
        model=options.model,
        session_id=planned.session_id,
        prompt_tokens=max(1, round(turn.prompt_tokens * factor)),
        block_hashes=planned.hashes(),
        block_tokens=options.block_tokens * factor,
        offloadable=turn.output_tokens > 1,
    )


def new_row(index: int, planned: Planned, now_s: float) -> VirtualRow:
    """The row of a request that has just been sent."""
    turn = planned.turn
    return VirtualRow(
        index, planned.session_id, now_s, turn.prompt_tokens, turn.output_tokens, turn.new_tokens
    )


def keeps_slo(row: VirtualRow, slo: Slo) -> bool:
    """Whether a request kept the SLO."""
    if row.outcome != "ok" or row.ttft_s is None:
        return False
    return slo.keeps_ttft(row.ttft_s, row.new_tokens) and slo.keeps_tpot(row.tpot_s)
