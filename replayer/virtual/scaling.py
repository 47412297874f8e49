"""A fleet whose instances come and go while the load runs, in virtual time.

An instance is ordered, and joins after its start-up. The proxy uses it once a probe has answered,
as any that is new. One that is to go drains: it gets nothing new, its streams end there, and only
then it leaves, or when its grace is over. With it goes its prefix cache. Orders that are not there
yet are cancelled first, as Kubernetes deletes pods that are not ready before others. GPU time
counts from order to leave.

The proxy's core is in front as in production. The times are virtual seconds, and nothing is drawn
but by hash: equal runs are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import xxhash

from proxy.core.routing.router import Router
from proxy.core.types import Instance, Reject
from replayer.engine.engine import Engine
from replayer.engine.types import EngineOptions, SimRequest
from replayer.virtual.arrivals import Planned
from replayer.virtual.fleet import Kind, LiveRequest, VirtualFleet
from replayer.virtual.requests import VirtualOptions, VirtualRun
from replayer.virtual.seen import Scaler, Seen, SeenInstance, Told

LOOK_S = 0.05
"""How often is looked whether an instance has drained, as the proxy does."""
P90_SIGMAS = NormalDist().inv_cdf(0.9)
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class StartUp:
    """Seconds from the order of an instance to its first step: log-normal, or always the median.

    Drawn by a hash of the instance's name, so that every policy meets the same delays.
    """

    median_s: float = 0.0
    p90_s: float | None = None
    seed: int = 0

    def delay_s(self, name: str) -> float:
        """Draw the delay of an instance."""
        if self.p90_s is None or not self.median_s:
            return self.median_s
        drawn = xxhash.xxh3_64_intdigest(f"start {name}".encode(), self.seed)
        sigmas = NormalDist().inv_cdf((drawn + 0.5) / 2**64)
        return self.median_s * math.exp(math.log(self.p90_s / self.median_s) * sigmas / P90_SIGMAS)


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """What is ordered. `engine`: of each new instance; those of the start are `VirtualOptions`'.

    `grace_s`: seconds after which an instance that drains is gone, whatever still runs there.
    """

    engine: EngineOptions
    start: StartUp = field(default_factory=StartUp)
    gpus_per_instance: int = 1
    grace_s: float = math.inf


@dataclass(slots=True)
class Life:
    """One instance from its order to its end; None: that has not come, seconds.

    `streams`: requests on it when it began to drain. `broken`: those that were there when its grace
    was over.
    `lost_tokens`: what its prefix cache had when it left.
    """

    name: str
    ordered_s: float
    ready_s: float | None = None
    drained_s: float | None = None
    left_s: float | None = None
    streams: int = 0
    broken: int = 0
    lost_tokens: int = 0

    def paid_s(self, end_s: float) -> float:
        """Seconds from the order until it has left, or until the end of the run."""
        return max(0.0, (end_s if self.left_s is None else self.left_s) - self.ordered_s)


@dataclass(frozen=True, slots=True)
class ScaledRun:
    """A run with the lives of its instances; `changes`: orders that changed the replicas."""

    run: VirtualRun
    lives: Sequence[Life]
    changes: int
    gpus_per_instance: int = 1

    @property
    def gpu_h(self) -> float:
        """GPU hours, from the order of each instance to its end."""
        paid_s = math.fsum(life.paid_s(self.run.makespan_s) for life in self.lives)
        return self.gpus_per_instance * paid_s / HOUR_S

    @property
    def ready(self) -> list[tuple[float, int]]:
        """Since when so many instances serve."""
        steps: dict[float, int] = {}
        for life in self.lives:
            for at_s, step in ((life.ready_s, 1), (life.drained_s, -1)):
                if life.ready_s is not None and at_s is not None:
                    steps[at_s] = steps.get(at_s, 0) + step
        found: list[tuple[float, int]] = []
        for at_s in sorted(steps):
            found.append((at_s, (found[-1][1] if found else 0) + steps[at_s]))
        return found


class ScaledFleet(VirtualFleet):
    """One run that begins with `options.engines`, and whose replicas a scaler decides."""

    def __init__(
        self,
        planned: Sequence[Planned],
        router: Router,
        options: VirtualOptions,
        scaling: ScalingOptions,
        scaler: Scaler,
    ) -> None:
        super().__init__(planned, router, options)
        self.lives = [Life(name, 0.0, ready_s=0.0) for name in self.names]
        self.changes = 0
        self._scaling, self._scaler = scaling, scaler
        self._told = Told()
        self._gaps: dict[str, tuple[int, float]] = {}
        """Number and sum of the times between two tokens, by instance."""
        self._looked_s = 0.0
        self._streams: dict[SimRequest, int] = {}
        """Tokens of each running stream when it was last looked."""
        self._plan_at(scaler.first_s)

    def _plan_at(self, at_s: float) -> None:
        if at_s < math.inf:
            self._at(at_s, Kind.PLAN, 0)

    def _handle_number(self, kind: Kind, number: int, now_s: float) -> None:
        if kind is Kind.PLAN:
            self._plan(now_s)
        elif kind is Kind.START:
            self._start(number, now_s)
        elif kind is Kind.GONE:
            self._leave_if_drained(number, now_s)
        else:
            super()._handle_number(kind, number, now_s)

    def _plan(self, now_s: float) -> None:
        wish = self._scaler.tick(lambda: self.look(now_s), now_s)
        if wish.replicas is not None:
            self.scale_to(wish.replicas, now_s)
        self._plan_at(wish.next_s)

    def scale_to(self, replicas: int, now_s: float) -> None:
        """Order what is missing, or take away what is too many; at least one is left."""
        kept = [n for n, life in enumerate(self.lives) if _is_kept(life)]
        missing = max(1, replicas) - len(kept)
        self.changes += missing != 0
        for _ in range(missing):
            self._order_one(now_s)
        coming = [n for n in kept if self.lives[n].ready_s is None]
        serving = sorted((n for n in kept if n not in coming), key=self._loss_tokens)
        for number in [*reversed(coming), *serving][: max(0, -missing)]:
            self._take_away(number, now_s)

    def _loss_tokens(self, number: int) -> tuple[int, int]:
        """What users would lose with an instance: its work and its cache. The newest goes first."""
        load = self.known.ledger.load(self.names[number])
        return load.ongoing_tokens + self._cached_tokens(number), -number

    def _cached_tokens(self, number: int) -> int:
        engine = self.engines[number]
        return engine.pool.cached_blocks * engine.options.block_size

    def _order_one(self, now_s: float) -> None:
        number = len(self.lives)
        name = f"e{number}"
        ready_s = now_s + self._scaling.start.delay_s(name)
        self.lives.append(Life(name, now_s))
        self.names.append(name)
        self.engines.append(Engine(self._scaling.engine, ready_s))
        self._due_s.append(math.inf)
        self._at(ready_s, Kind.START, number)

    def _start(self, number: int, now_s: float) -> None:
        """An ordered instance is there; the proxy has to see that it answers before it is used."""
        life, name, engine = self.lives[number], self.names[number], self.engines[number]
        if life.left_s is not None:
            return
        life.ready_s = now_s
        self._by_name[name] = engine
        self._place[engine] = number
        instance = Instance(name, f"http://{name}", f"http://{name}:8998")
        self.known.add(instance, is_proven=False)
        self._gone.add(name)

    def _take_away(self, number: int, now_s: float) -> None:
        life = self.lives[number]
        if life.ready_s is None:
            life.drained_s = life.left_s = now_s
            return
        life.drained_s = now_s
        life.streams = len(self._legs_on(number))
        member = self.known.fleet.get(life.name)
        if member is not None:
            member.is_draining = True
        self._at(now_s, Kind.GONE, number)

    def _legs_on(self, number: int) -> list[LiveRequest]:
        """The requests that have a leg on an engine."""
        return [
            live
            for request, live in self._legs.items()
            for leg in (live.leg, live.hedge, live.old)
            if leg.request is request and leg.engine == number
        ]

    def _leave_if_drained(self, number: int, now_s: float) -> None:
        """Take out an instance that drains once its last request, or its grace, is over."""
        self._advance(number, now_s)
        name, life = self.names[number], self.lives[number]
        left = self._legs_on(number)
        over_s = (life.drained_s or 0.0) + self._scaling.grace_s
        is_drained = self.known.ledger.load(name).is_idle and not left
        if not is_drained and now_s < over_s:
            self._at(min(now_s + LOOK_S, over_s), Kind.GONE, number)
            return
        life.left_s, life.lost_tokens = now_s, self._cached_tokens(number)
        life.broken = len(left)
        self._lose(number, now_s)
        for names in (self._gone, self._unseen):
            names.discard(name)
        self._gaps.pop(name, None)
        self.known.remove(name)
        self._peer_gone(self.fronts[0], name, now_s)

    def look(self, now_s: float) -> Seen:
        """What sources would read now: all that is known of the fleet from outside."""
        self._watch_streams(now_s)
        up = {member.instance.name for member in self.known.fleet.up()}
        serving = [life for life in self.lives if _is_kept(life) and life.name in up]
        kept = sum(map(_is_kept, self.lives))
        leaving = [x for x in self.lives if x.drained_s is not None and x.left_s is None]
        instances = tuple(self._instance(life.name) for life in serving)
        queued = len(self.fronts[0].waiting.queue)
        told = self._told.copy()
        return Seen(now_s, kept - len(serving), len(leaving), queued, told, instances)

    def _instance(self, name: str) -> SeenInstance:
        counters = self._by_name[name].counters
        gaps, gap_s = self._gaps.get(name, (0, 0.0))
        load = self.known.ledger.load(name)
        return SeenInstance(name, load, counters.steps, counters.prompt_computed, gaps, gap_s)

    def _watch_streams(self, now_s: float) -> None:
        """Bring every engine to now, and count what its streams have got since the last look."""
        seen: dict[SimRequest, int] = {}
        for name, engine in list(self._by_name.items()):
            self._advance(self._place[engine], now_s)
            gaps, gap_s = self._gaps.get(name, (0, 0.0))
            for stream in engine.running:
                if stream.first_token_s is None:
                    continue
                seen[stream] = stream.output_tokens
                since_s = self._looked_s if stream in self._streams else stream.first_token_s
                grown = stream.output_tokens - self._streams.get(stream, 1)
                if grown > 0:
                    gaps, gap_s = gaps + grown, gap_s + now_s - since_s
            self._gaps[name] = (gaps, gap_s)
        self._streams, self._looked_s = seen, now_s

    def _arrive(self, index: int, now_s: float) -> None:
        self._told.offered += 1
        super()._arrive(index, now_s)

    def _rejected(self, live: LiveRequest, reject: Reject, now_s: float) -> None:
        self._told.offered += self.options.retry.most != 0
        super()._rejected(live, reject, now_s)

    def _end(self, live: LiveRequest, outcome: str, now_s: float) -> None:
        if outcome == "ok":
            told, row = self._told, live.row
            told.ended += 1
            told.prompt_tokens += row.prompt_tokens
            told.output_tokens += row.output_tokens
            told.cached_tokens += row.cached_tokens
        super()._end(live, outcome, now_s)


def _is_kept(life: Life) -> bool:
    """Whether an instance serves, or is to serve."""
    return life.drained_s is None and life.left_s is None


def simulate_scaled(
    planned: Sequence[Planned],
    router: Router,
    options: VirtualOptions,
    scaling: ScalingOptions,
    scaler: Scaler,
) -> ScaledRun:
    """Run the load on a fleet that begins with `options.engines` and scales as it is told."""
    fleet = ScaledFleet(planned, router, options, scaling, scaler)
    run = fleet.run()
    return ScaledRun(run, fleet.lives, fleet.changes, scaling.gpus_per_instance)
