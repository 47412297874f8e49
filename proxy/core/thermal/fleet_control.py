"""Thermal control of a fleet: one controller per instance, and operators' orders.

Pure: a driver calls `tick` for each instance once a second, hands the limits to the router and
evicts what they ask for. Above the operator's order stands an emergency only; below it everything
that control would do by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from proxy.core.thermal.orders import (
    WATTS_PER_SEQ,
    BatchOrder,
    StandingOrder,
    hottest_celsius,
)
from proxy.core.thermal.policy import MISTAKES, OperatorPolicy
from proxy.core.thermal.readings import COOL, GpuReading, HeatLimits, InstanceWork
from proxy.core.thermal.victims import Relief, Victim, select_victims

EMERGENCY, MANUAL, NORMAL, STALE = "EMERGENCY", "MANUAL", "NORMAL", "STALE"
THERMAL_STATES = (NORMAL, "THROTTLE", "RECOVER", EMERGENCY, STALE, "DEGRADED", MANUAL)


class InstanceControl(Protocol):
    """The decider of one instance by its readings."""

    @property
    def state(self) -> str:
        """NORMAL, THROTTLE, RECOVER, EMERGENCY, STALE, DEGRADED or MANUAL."""

    @property
    def headroom_celsius(self) -> float | None:
        """Degrees below the target, by what the readings say and where they lead; None: unknown."""

    @property
    def watts_per_seq(self) -> float:
        """Watts of one more running sequence, as far as it was learned."""

    def tick(self, readings: Sequence[GpuReading], work: InstanceWork, now_s: float) -> HeatLimits:
        """The limits from now on."""

    def aim(self, target_celsius: float, until_s: float) -> None:
        """Hold an operator's temperature until then."""

    def clear_override(self) -> None:
        """Hold the own temperature again."""

    def watts_of(self, kv_tokens: Sequence[int]) -> float:
        """Watts of sequences that hold so many tokens."""

    def actuator_worked(self) -> None:
        """The limits were written to the engine."""

    def actuator_failed(self, now_s: float) -> None:
        """The limits could not be written."""


@dataclass(frozen=True, slots=True)
class HeatStatus:
    """One instance's status in `/instances`, the metrics and the admin API."""

    state: str
    limits: HeatLimits
    headroom_celsius: float | None
    watts_per_seq: float
    order: StandingOrder | None
    oscillations: int


class _Swing:
    """Direction changes of an instance's cap: lowered after raised, or the reverse."""

    __slots__ = ("_cap", "_is_up", "turns")

    def __init__(self) -> None:
        self._cap = math.inf
        self._is_up: bool | None = None
        self.turns = 0

    def note(self, cap: int | None) -> None:
        now = math.inf if cap is None else cap
        if now != self._cap:
            is_up = now > self._cap
            self.turns += self._is_up is not None and is_up is not self._is_up
            self._cap, self._is_up = now, is_up


class FleetControl:
    """Controllers and orders by instance.

    `make`: a controller, with an operator's own policy or without; None: only orders are obeyed.
    `make_policy`: such a policy, of which each instance has its own. `policy`: who leaves first
    where control itself wants requests to leave. `version`: number of the last change by an
    operator.
    """

    def __init__(
        self,
        make: Callable[[OperatorPolicy | None], InstanceControl] | None = None,
        make_policy: Callable[[], OperatorPolicy] | None = None,
        policy: str = "max_relief",
    ) -> None:
        self._make, self._make_policy, self._policy = make, make_policy, policy
        self._policies: dict[str, OperatorPolicy] = {}
        self._controls: dict[str, InstanceControl] = {}
        self._orders: dict[str, StandingOrder] = {}
        self._limits: dict[str, HeatLimits] = {}
        self._swings: dict[str, _Swing] = {}
        self._computed: dict[str, tuple[int, float]] = {}
        self.version = 0

    def give(
        self, running: dict[str, int], order: BatchOrder, decision_id: str, now_s: float
    ) -> dict[str, HeatLimits]:
        """Obey an order on these instances; the limits that hold at once.

        `running`: the requests in flight on each.
        """
        self.version += 1
        found: dict[str, HeatLimits] = {}
        for name, count in running.items():
            self._let_go(name)
            standing = StandingOrder(order, count, decision_id, now_s)
            self._orders[name] = standing
            control = self._controls.get(name)
            if control is not None and order.target_celsius is not None:
                control.aim(order.target_celsius, standing.until_s)
            before = replace(self._limits.get(name, COOL), evict=0)
            found[name] = self._note(name, self._ordered(name, before, standing, 0))
        return found

    def order_rows(self) -> list[list[object]]:
        """Standing orders for the process that takes over: `[instance, *StandingOrder.row]`."""
        return [[name, *standing.row()] for name, standing in self._orders.items()]

    def adopt_orders(self, rows: Iterable[Sequence[object]], version: int, now_s: float) -> None:
        """Go on with a predecessor's orders, from its `version` on; what is none is left out."""
        self.version = max(self.version, version)
        for name, *row in rows:
            try:
                standing = StandingOrder.of_row(row, now_s)
            except (TypeError, ValueError):
                continue
            if now_s < standing.until_s:
                self._orders[str(name)] = standing
                self._note(str(name), self._ordered(str(name), COOL, standing, 0))

    def clear(self, names: Iterable[str]) -> list[str]:
        """End the orders on these instances from the next tick on; those that had one."""
        self.version += 1
        return [name for name in names if self._let_go(name)]

    def _let_go(self, name: str) -> bool:
        """End an instance's order, if it has one."""
        control = self._controls.get(name)
        if control is not None:
            control.clear_override()
        return self._orders.pop(name, None) is not None

    def keep(self, names: Iterable[str]) -> None:
        """Forget every instance but these."""
        known = set(names)
        for name in [name for name in self._limits if name not in known]:
            self._controls.pop(name, None)
            self._policies.pop(name, None)
            self._orders.pop(name, None)
            self._limits.pop(name, None)
            self._swings.pop(name, None)
            self._computed.pop(name, None)

    def prefill_tps(self, name: str, computed_tokens: int, now_s: float) -> float:
        """Prompt tokens per second since the last call, of all that were computed so far."""
        before, at_s = self._computed.get(name, (computed_tokens, now_s))
        self._computed[name] = (computed_tokens, now_s)
        # Another process of the instance counts from 0 again.
        return max(0, computed_tokens - before) / (now_s - at_s) if now_s > at_s else 0.0

    def tick(
        self, name: str, readings: Sequence[GpuReading] | None, work: InstanceWork, now_s: float
    ) -> HeatLimits:
        """The limits of an instance from now on; `readings`: None where it has no sensor."""
        control = None if readings is None else self._control(name)
        seen: Sequence[GpuReading] = () if readings is None else readings
        limits = COOL if control is None else control.tick(seen, work, now_s)
        standing = self._orders.get(name)
        if standing is not None and now_s >= standing.until_s:
            self._let_go(name)
            standing = None
        if standing is not None:
            celsius = hottest_celsius(seen, now_s)
            standing.look(celsius)
            evict = 0 if control is not None else standing.step(celsius, work.running, now_s)
            limits = self._ordered(name, limits, standing, evict)
        return self._note(name, limits)

    def _control(self, name: str) -> InstanceControl | None:
        """The controller of an instance that has a sensor."""
        control = self._controls.get(name)
        if control is None and self._make is not None:
            policy = self._own_policy()
            if policy is not None:
                self._policies[name] = policy
            control = self._controls[name] = self._make(policy)
            standing = self._orders.get(name)
            if standing is not None and standing.order.target_celsius is not None:
                control.aim(standing.order.target_celsius, standing.until_s)
        return control

    def _own_policy(self) -> OperatorPolicy | None:
        """An operator's own policy; None without one, or where it cannot be made."""
        if self._make_policy is None:
            return None
        try:
            return self._make_policy()
        except MISTAKES:
            return None

    def _note(self, name: str, limits: HeatLimits) -> HeatLimits:
        self._limits[name] = limits
        if name not in self._swings:
            self._swings[name] = _Swing()
        self._swings[name].note(limits.cap)
        return limits

    def _ordered(
        self, name: str, limits: HeatLimits, standing: StandingOrder, evict: int
    ) -> HeatLimits:
        """Limits with an operator's order.

        A cap that the operator named stands above control's, but in an emergency, in which the
        stricter of both holds. What an order comes to by itself never loosens a limit.
        """
        is_named = standing.order.max_num_seqs is not None
        if is_named and self._state(name) != EMERGENCY:
            return replace(limits, cap=standing.cap, evict=evict, is_drained=False)
        caps = [cap for cap in (limits.cap, standing.cap) if cap is not None]
        cap = min(caps) if caps else None
        return replace(limits, cap=cap, evict=max(limits.evict, evict))

    def _state(self, name: str) -> str:
        control = self._controls.get(name)
        return NORMAL if control is None else str(control.state)

    def state(self, name: str) -> str:
        """The state of an instance; MANUAL while an operator's order holds."""
        state = self._state(name)
        return MANUAL if name in self._orders and state != EMERGENCY else state

    def actuated(self, name: str, now_s: float, *, has_failed: bool) -> None:
        """An instance's engine was told its cap, or could not be."""
        control = self._controls.get(name)
        if control is not None and has_failed:
            control.actuator_failed(now_s)
        elif control is not None:
            control.actuator_worked()

    def victims(
        self,
        name: str,
        running: Sequence[Victim],
        count: int,
        now_s: float,
        policy: str | None = None,
        *,
        may_abort: bool = False,
    ) -> list[Victim]:
        """The requests to evict first. `policy`: an operator's word; None: control's own choice.

        An operator's own policy is asked where there is one, of those that can be moved.
        """
        own = self._policies.get(name) if policy is None else None
        if own is not None:
            movable = [victim for victim in running if victim.may_move(now_s)]
            try:
                asked = {one.request_id for one in own.select_victims(list(movable), count)}
            except MISTAKES:
                asked = set()
            chosen = [victim for victim in movable if victim.request_id in asked]
            if chosen:
                return chosen[: max(0, count)]
        relief = Relief(watts_per_sequence=self.status(name).watts_per_seq)
        word = self._policy if policy is None else policy
        return select_victims(word, running, count, now_s, relief, may_abort=may_abort)

    def watts_of(self, name: str, victims: Sequence[Victim]) -> float:
        """Watts of these requests."""
        control = self._controls.get(name)
        if control is None:
            return WATTS_PER_SEQ * len(victims)
        return control.watts_of([victim.kv_tokens for victim in victims])

    def status(self, name: str) -> HeatStatus:
        """All that is known of an instance's heat."""
        control = self._controls.get(name)
        return HeatStatus(
            state=self.state(name),
            limits=self._limits.get(name, COOL),
            headroom_celsius=None if control is None else control.headroom_celsius,
            watts_per_seq=WATTS_PER_SEQ if control is None else control.watts_per_seq,
            order=self._orders.get(name),
            oscillations=self._swings[name].turns if name in self._swings else 0,
        )
