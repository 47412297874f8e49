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
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from proxy.core.routing.router import Router
from proxy.core.thermal.fleet_control import EMERGENCY, FleetControl
from proxy.core.thermal.orders import BatchOrder
from proxy.core.thermal.readings import GpuReading, HeatLimits, InstanceWork
from proxy.core.thermal.victims import MoveBudget, Victim, is_worth_moving, most_evictions
from proxy.net.timeouts import Clock
from proxy.protocol.errors import DEFECTS
from proxy.state.in_flight import InFlight, Served
from proxy.telemetry.log import Throttle
from proxy.telemetry.metrics import Metrics

TICK_S = 1.0
MINUTE_S, MOST_LEFT = 60.0, 4096
BYTES_PER_TOKEN = 131_072
"""Of KV, where the bandwidth of moves is kept: of an 8B model with 8 KV heads in 16 bits."""
FLEET_BYTES_PER_S = 20e9
"""The founding document's bound on what evictions move, over the whole fleet."""
NO_BANDWIDTH = "the bandwidth of moves is used up"
CONTROL = "control"
"""The policy's name in metrics where control itself wants requests to leave."""
_log = logging.getLogger(__name__)


class Readings(Protocol):
    """Where the last readings of the instances' GPUs are."""

    def of(self, instance: str) -> Sequence[GpuReading]:
        """Of one instance; none without a sensor."""

    def age_s(self, instance: str, now_s: float) -> float | None:
        """Their age, None without a sensor."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One victim of an eviction. `skip_reason`: why it stays; None: it leaves.

    `target`: where it goes; None where it is ended, or stays. `est_move_s`: what its KV would take
    to the nearest other instance; None where there is none.
    """

    instance: str
    request_id: str
    kv_tokens: int
    est_move_s: float | None
    target: str | None
    skip_reason: str | None


@dataclass(frozen=True, slots=True)
class InstanceResult:
    """What an order came to on one instance."""

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


@dataclass(frozen=True, slots=True)
class _Planned:
    """A row of a plan, and whose it is."""

    row: PlanRow
    victim: Victim
    served: Served


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
        self._router, self.in_flight = router, in_flight
        self._clock, self._metrics = clock, metrics
        self.may_abort = False
        """Requests that cannot be moved may be ended: in an emergency, or by `force_evict`."""
        self.waiting: Callable[[], int] = lambda: 0
        """How many requests wait for a place."""
        self.budget = MoveBudget(FLEET_BYTES_PER_S)
        self._progress: dict[Served, _Progress] = {}
        self._states: dict[str, str] = {}
        self._left: dict[str, deque[float]] = {}
        self._throttle = Throttle()

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def tick(self) -> None:
        """Look at every instance once, and limit it."""
        now_s, router = self._clock.now_s(), self._router
        names = [member.instance.name for member in router.fleet.members()]
        self.control.keep(names)
        self._states = {name: self._states.get(name, "") for name in names}
        self._left = {name: left for name, left in self._left.items() if name in self._states}
        self._note_progress(now_s)
        for name in names:
            try:
                self._tick(name, now_s)
            except (*DEFECTS, RuntimeError):  # what is odd about one instance ends no other's
                if self._throttle.turn(name, now_s) is not None:
                    _log.exception("instance %s: its heat is not controlled", name)

    def _tick(self, name: str, now_s: float) -> None:
        has_sensor = self.gpus.age_s(name, now_s) is not None
        readings = self.gpus.of(name) if has_sensor else None
        limits = self.control.tick(name, readings, self._work(name, now_s), now_s)
        self._obey(name, limits)
        if limits.evict:
            order = self.control.status(name).order
            policy = None if order is None else order.order.policy
            is_forced = self.control.state(name) == EMERGENCY
            count = limits.evict
            if not is_forced and policy is None:
                count = min(count, self._rest(name, now_s))
            plan = self._plan(name, count, policy, now_s, is_forced=is_forced)
            self._carry_out(plan, policy or CONTROL, now_s)

    def _rest(self, name: str, now_s: float) -> int:
        """How many more may leave an instance within this minute."""
        left = self._left.setdefault(name, deque(maxlen=MOST_LEFT))
        while left and now_s - left[0] >= MINUTE_S:
            left.popleft()
        return most_evictions(self._running(name), len(left))

    def _running(self, name: str) -> int:
        return self._router.ledger.load(name).running_requests

    def _work(self, name: str, now_s: float) -> InstanceWork:
        load = self._router.ledger.load(name)
        computed = self._router.latency.of(name).computed_tokens
        return InstanceWork(
            running=load.running_requests,
            kv_tokens=load.ongoing_tokens,
            prefill_tps=self.control.prefill_tps(name, computed, now_s),
            waiting=self.waiting(),
        )

    def _obey(self, name: str, limits: HeatLimits) -> None:
        """Hand limits to the router; count what changed, and log a change of state."""
        before = self._router.heat.of(name)
        self._router.limit_heat(name, limits)
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
        for name in names:
            plan = self._plan(name, order.force_evict, order.policy, now_s, is_forced=True)
            if not dry_run:
                self._carry_out(plan, order.policy, now_s)
            leaving = [one for one in plan if one.row.skip_reason is None]
            left = [one.row.request_id for one in leaving]
            decision.plan.extend(one.row for one in plan)
            decision.results.append(
                InstanceResult(
                    instance=name,
                    previous_running=running[name],
                    new_running=running[name] - len(left),
                    evicted_request_ids=left,
                    estimated_watts_saved=control.watts_of(name, [one.victim for one in leaving]),
                    new_max_num_seqs=(
                        order.cap(running[name]) if dry_run else self._router.heat.of(name).cap
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

    def _victim(self, served: Served, now_s: float) -> Victim:
        """What speaks for and against the eviction of a request."""
        route, events = served.route, served.output_events
        assert route is not None
        began_s = route.reserved_s if route.first_token_s is None else route.first_token_s
        progress, most = self._progress.get(served), served.most_output_tokens
        is_known = progress is not None and progress.events == events
        expected = int(self._router.latency.output_tokens)
        return Victim(
            request_id=served.request_id,
            kv_tokens=route.prompt_tokens + events,
            last_token_s=progress.grew_s if progress is not None and is_known else now_s,
            priority=served.priority,
            remaining_tokens=max(1, (expected if most is None else min(most, expected)) - events),
            # The request rate of a session is not kept: what it gets per second stands for it.
            qps=events / max(1e-3, now_s - began_s),
            is_movable=served.why_fixed is None,
            moves=0 if progress is None else progress.moves,
            moved_s=-math.inf if progress is None else progress.moved_s,
        )

    def _plan(
        self, name: str, count: int, policy: str | None, now_s: float, *, is_forced: bool
    ) -> list[_Planned]:
        """Who should leave an instance, in their order, and why some cannot."""
        if not count:
            return []
        served_by: dict[int, Served] = {}
        running = []
        for served in self.in_flight.on(name):
            victim = self._victim(served, now_s)
            served_by[id(victim)] = served
            running.append(victim)
        chosen = self.control.victims(name, running, count, now_s, policy, may_abort=is_forced)
        plan = []
        for victim in chosen:
            served = served_by[id(victim)]
            move_s = self._move_s(name, victim.kv_tokens)
            reason = self._why_not(name, served, victim, move_s, now_s, is_forced=is_forced)
            row = PlanRow(name, victim.request_id, victim.kv_tokens, move_s, None, reason)
            plan.append(_Planned(row, victim, served))
        return plan

    def _why_not(
        self,
        name: str,
        served: Served,
        victim: Victim,
        move_s: float | None,
        now_s: float,
        *,
        is_forced: bool,
    ) -> str | None:
        """Why a request stays; None where it leaves."""
        reason = served.why_fixed
        if reason is not None:
            return None if is_forced and self.may_abort else reason
        if is_forced or move_s is None:
            return None
        busy = self._router.busy(name, "*", now_s)
        if not is_worth_moving(0.0 if busy is None else busy.free_in_s, move_s):
            return "the wait for its place is shorter than the move"
        return None

    def _move_s(self, name: str, tokens: int) -> float | None:
        """Seconds to move a request's KV to the nearest other instance."""
        others = [m.instance.name for m in self._router.fleet.up() if m.instance.name != name]
        transfer_s = self._router.latency.transfer_s
        return min((transfer_s(name, other, tokens) for other in others), default=None)

    def _carry_out(self, plan: list[_Planned], policy: str, now_s: float) -> None:
        """Let go whom the plan lets go; where there is no bandwidth for a move, say so in it."""
        outcomes: Counter[str] = Counter()
        for at, one in enumerate(plan):
            row, served = one.row, one.served
            if row.skip_reason is not None:
                outcomes["skipped"] += 1
            elif not one.victim.is_movable:
                outcomes["aborted"] += 1
                _log.warning(
                    "instance %s: request %s is ended for its heat", row.instance, row.request_id
                )
                served.end_hot()
            elif not self._may_move(row, now_s):
                outcomes["skipped"] += 1
                plan[at] = replace(one, row=replace(row, skip_reason=NO_BANDWIDTH))
            else:
                outcomes["moved"] += 1
                progress = self._progress.setdefault(served, _Progress(served.output_events, now_s))
                progress.moves, progress.moved_s = progress.moves + 1, now_s
                served.leave_hot()
                self._left.setdefault(row.instance, deque(maxlen=MOST_LEFT)).append(now_s)
        for outcome, count in outcomes.items():
            self._metrics.thermal_evictions.labels(policy, outcome).inc(count)

    def _may_move(self, row: PlanRow, now_s: float) -> bool:
        """Whether there is bandwidth for a move; then it is taken."""
        tps = self._router.latency.transfer_tps(row.instance)
        link = None if tps is None else tps * BYTES_PER_TOKEN
        moved = row.kv_tokens * BYTES_PER_TOKEN
        return self.budget.take(row.instance, moved, now_s, link) <= 0.0


def _actions(before: HeatLimits, now: HeatLimits) -> list[str]:
    """What changes on an instance, in words."""
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
