"""Thermal control on real instances: the control tick, operators' orders, evictions.

Once a second the readings of each instance's GPUs and the ledger's counts become limits, which the
router obeys from the next decision on. An operator's order is obeyed in one synchronous turn: the
cap is in force before anyone is chosen to leave, and nothing can be admitted in between.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from proxy.core.routing.evictions import Eviction, Evictions, Running, Wanted
from proxy.core.routing.router import Router
from proxy.core.thermal.fleet_control import FleetControl
from proxy.core.thermal.orders import BatchOrder
from proxy.core.thermal.readings import GpuReading, HeatLimits, InstanceWork
from proxy.core.thermal.victims import Victim
from proxy.net.timeouts import Clock
from proxy.protocol.errors import DEFECTS
from proxy.state.in_flight import InFlight, Served
from proxy.telemetry.log import Throttle
from proxy.telemetry.metrics import Metrics

TICK_S = 1.0
CONTROL = "control"
"""The policy's name in metrics where control itself wants requests to leave."""
_log = logging.getLogger(__name__)


class Readings(Protocol):
    """The last readings of the instances' GPUs."""

    def of(self, instance: str) -> Sequence[GpuReading]:
        """Readings of one instance; none without a sensor."""

    def expected(self, instance: str) -> Sequence[GpuReading]:
        """Readings of one instance, with an empty one for each GPU never read."""

    def age_s(self, instance: str, now_s: float) -> float | None:
        """Their age, None without a sensor."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One victim of an eviction. `skip_reason`: why it stays; None: it leaves.

    `target`: where it is expected to go on, which is decided when it leaves; `est_move_s`: what its
    KV would take to there. Both are None where it is ended, or cannot go on anywhere.
    """

    instance: str
    request_id: str
    kv_tokens: int
    est_move_s: float | None
    target: str | None
    skip_reason: str | None


@dataclass(frozen=True, slots=True)
class InstanceResult:
    """The result of an order on one instance."""

    instance: str
    previous_running: int
    new_running: int
    evicted_request_ids: list[str]
    estimated_watts_saved: float
    new_max_num_seqs: int | None
    state: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to an order."""

    decision_id: str
    version: int
    results: list[InstanceResult]
    plan: list[PlanRow] = field(default_factory=list)


@dataclass(slots=True)
class _Progress:
    """Output of a request at the last tick, and when it last grew; how often it was moved."""

    events: int
    grew_s: float
    moves: int = 0
    moved_s: float = -math.inf


class ThermalControl:
    """Runs a `FleetControl` on the instances of a router.

    `gpus`: the last readings of the instances' GPUs.
    """

    def __init__(
        self,
        control: FleetControl,
        router: Router,
        in_flight: InFlight,
        clock: Clock,
        metrics: Metrics,
        gpus: Readings,
    ) -> None:
        self.control, self.gpus = control, gpus
        self._known, self.in_flight = router.known, in_flight
        self._clock, self._metrics = clock, metrics
        self.evictions = Evictions(router, control)
        self.waiting: Callable[[], int] = lambda: 0
        """Number of requests that wait for a place."""
        self._progress: dict[Served, _Progress] = {}
        self._states: dict[str, str] = {}
        self._throttle = Throttle()

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def tick(self) -> None:
        """Look at every instance once, and limit it."""
        now_s, known = self._clock.now_s(), self._known
        names = [member.instance.name for member in known.fleet.members()]
        self.control.keep(names)
        self._states = {name: self._states.get(name, "") for name in names}
        self.evictions.keep(names)
        self._note_progress(now_s)
        for name in names:
            try:
                self._tick(name, now_s)
            except (*DEFECTS, RuntimeError):  # what is odd about one instance ends no other's
                if self._throttle.turn(name, now_s) is not None:
                    _log.exception("instance %s: thermal control does not work", name)

    def _tick(self, name: str, now_s: float) -> None:
        has_sensor = self.gpus.age_s(name, now_s) is not None
        readings = self.gpus.expected(name) if has_sensor else None
        limits = self.control.tick(name, readings, self._work(name, now_s), now_s)
        self._obey(name, limits)
        wanted = self.evictions.wanted(name, limits, now_s)
        if wanted.most:
            running, served = self._all_on(name, now_s)
            plan = self.evictions.plan(name, running, wanted, now_s)
            self._carry_out(plan, served, wanted.policy or CONTROL, now_s)

    def _running(self, name: str) -> int:
        return self._known.ledger.load(name).running_requests

    def _work(self, name: str, now_s: float) -> InstanceWork:
        load = self._known.ledger.load(name)
        computed = self._known.latency.of(name).computed_tokens
        return InstanceWork(
            running=load.running_requests,
            kv_tokens=load.ongoing_tokens,
            prefill_tps=self.control.prefill_tps(name, computed, now_s),
            waiting=self.waiting(),
        )

    def _obey(self, name: str, limits: HeatLimits) -> None:
        """Hand limits to the decisions; count what changed, and log a change of state."""
        before = self._known.heat.of(name)
        self._known.limit_heat(name, limits)
        state = self.control.state(name)
        for action in _actions(before, limits):
            self._metrics.thermal_actions.labels(action, state.lower()).inc()
        known = self._states.get(name) or "NORMAL"
        self._states[name] = state
        if state != known:
            status = self.control.status(name)
            headroom = status.headroom_celsius
            _log.warning(
                "instance %s: heat %s, was %s: headroom %s C, %d running, cap %s",
                *(name, state, known, "unknown" if headroom is None else f"{headroom:.1f}"),
                *(self._running(name), "none" if limits.cap is None else limits.cap),
            )

    def _note_progress(self, now_s: float) -> None:
        """Note which requests have brought output since the last tick."""
        known, self._progress = self._progress, {}
        for served in self.in_flight.scopes.values():
            if served is None or served.route is None:
                continue
            events, progress = served.output_events, known.get(served)
            if progress is None:
                progress = _Progress(events, now_s)
            elif progress.events != events:
                progress.events, progress.grew_s = events, now_s
            self._progress[served] = progress

    def order(self, names: Sequence[str], order: BatchOrder, *, dry_run: bool) -> Decision:
        """Obey an operator's order on these instances, or only say what it would do."""
        now_s, control = self._clock.now_s(), self.control
        running = {name: self._running(name) for name in names}
        decision_id = secrets.token_hex(6)
        if not dry_run:
            for name, limits in control.give(running, order, decision_id, now_s).items():
                self._obey(name, limits)
        decision = Decision(decision_id, control.version, [])
        wanted = Wanted(order.force_evict, order.policy, is_forced=True)
        for name in names:
            plan: list[Eviction] = []
            if wanted.most:
                streams, served = self._all_on(name, now_s)
                plan = self.evictions.plan(name, streams, wanted, now_s)
                if not dry_run:
                    self._carry_out(plan, served, order.policy, now_s)
            leaving = [row.victim for row in plan if row.why_not is None]
            left = [victim.request_id for victim in leaving]
            decision.plan.extend(_shown(row) for row in plan)
            decision.results.append(
                InstanceResult(
                    instance=name,
                    previous_running=running[name],
                    new_running=running[name] - len(left),
                    evicted_request_ids=left,
                    estimated_watts_saved=control.watts_of(name, leaving),
                    new_max_num_seqs=(
                        order.cap(running[name]) if dry_run else self._known.heat.of(name).cap
                    ),
                    state=control.state(name),
                )
            )
        return decision

    def clear(self, names: Sequence[str]) -> list[str]:
        """End the orders on these instances; those that had one."""
        cleared = self.control.clear(names)
        self.tick()
        return cleared

    def _victim(self, served: Served, why_fixed: str | None, now_s: float) -> Victim:
        """Arguments for and against the eviction of a request."""
        route, events = served.route, served.output_events
        assert route is not None
        began_s = route.reserved_s if route.first_token_s is None else route.first_token_s
        progress, most = self._progress.get(served), served.most_output_tokens
        is_known = progress is not None and progress.events == events
        expected = int(self._known.latency.output_tokens)
        return Victim(
            request_id=served.request_id,
            kv_tokens=route.prompt_tokens + events,
            last_token_s=progress.grew_s if progress is not None and is_known else now_s,
            priority=served.priority,
            remaining_tokens=max(1, (expected if most is None else min(most, expected)) - events),
            # The request rate of a session is not kept: what it gets per second stands for it.
            qps=events / max(1e-3, now_s - began_s),
            is_movable=why_fixed is None,
            moves=0 if progress is None else progress.moves,
            moved_s=-math.inf if progress is None else progress.moved_s,
        )

    def _all_on(self, name: str, now_s: float) -> tuple[list[Running], dict[int, Served]]:
        """All requests on an instance, and whose each victim is, by its `id`."""
        running, served_by = [], {}
        for served in self.in_flight.on(name):
            why = served.why_fixed
            victim = self._victim(served, why, now_s)
            served_by[id(victim)] = served
            running.append(Running(victim, served.facts, why))
        return running, served_by

    def _carry_out(
        self, plan: Sequence[Eviction], served_by: dict[int, Served], policy: str, now_s: float
    ) -> None:
        """Evict the plan's requests; note in it a lack of bandwidth for a migration."""
        outcomes: Counter[str] = Counter()
        for row in plan:
            served = served_by[id(row.victim)]
            if not self.evictions.take(row, now_s):
                outcomes["skipped"] += 1
            elif row.is_end:
                outcomes["aborted"] += 1
                _log.warning(
                    "instance %s: request %s ended (thermal)",
                    *(row.instance, row.victim.request_id),
                )
                served.end_hot()
            else:
                outcomes["moved"] += 1
                progress = self._progress.setdefault(served, _Progress(served.output_events, now_s))
                progress.moves, progress.moved_s = progress.moves + 1, now_s
                served.leave_hot()
        for outcome, count in outcomes.items():
            self._metrics.thermal_evictions.labels(policy, outcome).inc(count)


def _shown(row: Eviction) -> PlanRow:
    victim = row.victim
    return PlanRow(
        row.instance, victim.request_id, victim.kv_tokens, row.move_s, row.target, row.why_not
    )


def _actions(before: HeatLimits, now: HeatLimits) -> list[str]:
    """The change on an instance, in words."""
    caps = [float("inf") if limits.cap is None else limits.cap for limits in (before, now)]
    changes = (
        ("weight", before.weight != now.weight),
        ("helps", before.helps != now.helps),
        ("price", before.prefill_factor != now.prefill_factor),
        ("cap_lowered", caps[1] < caps[0]),
        ("cap_raised", caps[1] > caps[0]),
        ("evict", now.evict > 0),
        ("drain", before.is_drained != now.is_drained),
    )
    return [action for action, is_changed in changes if is_changed]
