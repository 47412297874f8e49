"""Plays planners on one load: our fleet in virtual time, with the proxy's core in front."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from analysis.plan.clairvoyant import Orders, Search, World
from analysis.plan.measured import STATIC, Drain, Fleet, Name, Played, Record, measured
from analysis.plan.traffic import planned
from planner.core.perf.capacity import Slo
from planner.core.rules import Rules, Strategy
from planner.core.types import Capabilities
from planner.sources.virtual import VirtualPlanner, VirtualSite
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.router import Router
from proxy.core.types import RouterConfig
from replayer.engine.types import EngineOptions
from replayer.loads.load import Load
from replayer.virtual.requests import VirtualOptions, VirtualRow
from replayer.virtual.scaling import Life, ScaledRun, ScalingOptions, StartUp, simulate_scaled
from replayer.virtual.seen import Scaler, Schedule

BATCH = 48
"""Decodes in a batch, where an engine's work is counted."""
PLANNERS: dict[str, Mapping[str, Any]] = {
    "founding": {},
    "founding-load": {"throughput_scaling": False},
    "founding-throughput": {"load_scaling": False},
    "reserve": {"strategy": Strategy.RESERVE},
}
"""The planner's pipeline as it was founded, with both loops or one, and with a reserve.

Values are fields of `Rules`.
"""


@dataclass(frozen=True, slots=True)
class Plant:
    """What an instance is, and the client. `router`: fields of RouterConfig."""

    engine: EngineOptions
    prefill_tps: float
    gpus: int = 1
    spread: float = 1.0
    """p90 of a start-up over its median."""
    grace_s: float = math.inf
    """See `ScalingOptions`."""
    timeout_s: float = 60.0
    reports_kv: bool = True
    router: Mapping[str, Any] = field(default_factory=dict)

    def work_s(self, one: Record) -> float:
        """The engine's time that a request takes in a batch of BATCH."""
        cost, new_tokens = self.engine.step, one.input_tokens - one.reused_tokens
        context = one.input_tokens + one.output_tokens / 2
        token_s = (cost.a0 + cost.token_s) / BATCH + cost.a2 + cost.a3 * context
        pairs = new_tokens * (one.reused_tokens + new_tokens / 2)
        prompt_s = cost.prefill_s + cost.a1 * new_tokens + cost.a4 * pairs
        return prompt_s + one.output_tokens * token_s


class Judge:
    """Plays policies on one load; equal plays are equal."""

    def __init__(self, load: Load, plant: Plant) -> None:
        self.load, self._plant = load, plant
        self._planned = planned(load)
        self._static: dict[int, Played] = {}

    def static(self, replicas: int, startup_s: float) -> Played:
        """Play a fixed fleet, once: nothing starts, so the delay is of no matter."""
        if replicas not in self._static:
            name = f"{STATIC}:{replicas}"
            self._static[replicas] = self.play(name, Schedule([]), 0.0, replicas)
        played = self._static[replicas]
        return replace(played, run=replace(played.run, startup_s=startup_s))

    def planner(self, name: str, startup_s: float) -> Played:
        """Play one of PLANNERS with its defaults and the load's SLO."""
        load, engine = self.load, self._plant.engine
        of = Capabilities(
            self._plant.gpus,
            engine.max_num_batched_tokens,
            engine.max_num_seqs,
            engine.num_blocks * engine.block_size,
        )
        site = VirtualSite(of, load.initial_replicas, load.min_replicas, load.max_replicas)
        rules = replace(
            Rules(Slo(load.slo_ttft_s, load.slo_itl_s), min_endpoint=load.min_replicas),
            **PLANNERS[name],
        )
        return self.play(name, VirtualPlanner(site, rules), startup_s, load.initial_replicas)

    def search(self, startup_s: float, effort: int, target_ratio: float | None) -> Search:
        """Make a search for the cheapest schedule; it plays every fixed fleet first."""
        load = self.load
        sizes = range(load.min_replicas, load.max_replicas + 1)
        fleets = {n: self.static(n, startup_s) for n in sizes}

        def play(name: str, orders: Orders, initial: int) -> Played:
            return self.play(name, Schedule(orders), startup_s, initial)

        world = World(load, self._plant.work_s, startup_s, play)
        return Search(world, fleets, effort, target_ratio)

    def play(self, name: str, scaler: Scaler, startup_s: float, initial: int) -> Played:
        """Play what decides how many replicas there are, from `initial` ones on."""
        load, plant = self.load, self._plant
        given = {"prefill_throughput": plant.prefill_tps, "tpot_slo_s": load.slo_itl_s}
        router = Router(FleetState(RouterConfig(**{**given, **plant.router})))
        options = VirtualOptions(
            (plant.engine,) * initial,
            load.block_tokens,
            timeout_s=plant.timeout_s,
            reports_kv=plant.reports_kv,
        )
        p90_s = startup_s * plant.spread if plant.spread > 1.0 else None
        start = StartUp(startup_s, p90_s, load.seed)
        scaling = ScalingOptions(plant.engine, start, plant.gpus, plant.grace_s)
        found = simulate_scaled(self._planned, router, options, scaling, scaler)
        records = [record_of(row) for row in found.run.rows]
        run = measured(Name(name, "{}", startup_s), load, records, fleet_of(found, initial))
        return Played(run, records, found.ready)


def record_of(row: VirtualRow) -> Record:
    """A request of a virtual run; one that failed has no first token."""
    return Record(
        arrival_s=row.arrival_s,
        ttft_s=row.ttft_s if row.outcome == "ok" else None,
        itl_s=row.tpot_s,
        last_token_s=row.end_s,
        input_tokens=row.prompt_tokens,
        reused_tokens=row.cached_tokens + row.external_tokens,
        output_tokens=row.output_tokens,
        engine=int(row.decode.removeprefix("e") or -1),
    )


def fleet_of(found: ScaledRun, initial: int) -> Fleet:
    """What a virtual run says of its fleet; `initial`: instances that nobody ordered."""
    drained: dict[float, set[int]] = {}
    for number, life in enumerate(found.lives):
        if life.drained_s is not None:
            drained.setdefault(life.drained_s, set()).add(number)
    total: Callable[[Callable[[Life], int]], int] = lambda of: sum(map(of, found.lives))  # noqa: E731
    return Fleet(
        gpu_s=3600 * found.gpu_h,
        duration_s=found.run.makespan_s,
        started=len(found.lives) - initial,
        drains=[Drain(at_s, frozenset(some)) for at_s, some in sorted(drained.items())],
        changes=found.changes,
        broken=total(lambda life: life.broken),
        lost_tokens=total(lambda life: life.lost_tokens),
    )
