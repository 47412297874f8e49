"""Thermal control of a fleet: one controller per instance, and what operators ordered.

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
from proxy.core.thermal.readings import COOL, GpuReading, HeatLimits, InstanceWork

EMERGENCY, MANUAL, NORMAL, STALE = "EMERGENCY", "MANUAL", "NORMAL", "STALE"
THERMAL_STATES = (NORMAL, "THROTTLE", "RECOVER", EMERGENCY, STALE, "DEGRADED", MANUAL)


class InstanceControl(Protocol):
    """What decides on one instance by its readings."""

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


@dataclass(frozen=True, slots=True)
class HeatStatus:
    """What `/instances`, the metrics and the admin API say of one instance."""

    state: str
    limits: HeatLimits
    headroom_celsius: float | None
    watts_per_seq: float
    order: StandingOrder | None
    oscillations: int


class _Swing:
    """How often an instance's cap has turned: lowered after it was raised, or the reverse."""

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
    """Controllers and orders by instance. `make`: a controller; None: only orders are obeyed.

    `version`: number of the last change by an operator.
    """

    def __init__(self, make: Callable[[], InstanceControl] | None = None) -> None:
        self._make = make
        self._controls: dict[str, InstanceControl] = {}
        self._orders: dict[str, StandingOrder] = {}
        self._limits: dict[str, HeatLimits] = {}
        self._swings: dict[str, _Swing] = {}
        self.version = 0

    @property
    def has_sensors(self) -> bool:
        """Whether temperatures are controlled at all."""
        return self._make is not None

    def give(
        self, running: dict[str, int], order: BatchOrder, decision_id: str, now_s: float
    ) -> dict[str, HeatLimits]:
        """Obey an order on these instances; the limits that hold at once.

        `running`: the requests in flight on each.
        """
        self.version += 1
        found: dict[str, HeatLimits] = {}
        for name, count in running.items():
            standing = StandingOrder(order, count, decision_id, now_s)
            self._orders[name] = standing
            before = self._limits.get(name, COOL)
            found[name] = self._note(name, self._ordered(name, before, standing, 0))
        return found

    def clear(self, names: Iterable[str]) -> list[str]:
        """End the orders on these instances from the next tick on; those that had one."""
        self.version += 1
        return [name for name in names if self._orders.pop(name, None) is not None]

    def keep(self, names: Iterable[str]) -> None:
        """Forget every instance but these."""
        known = set(names)
        for name in [name for name in self._limits if name not in known]:
            for table in (self._controls, self._orders, self._limits, self._swings):
                table.pop(name, None)

    def tick(
        self, name: str, readings: Sequence[GpuReading], work: InstanceWork, now_s: float
    ) -> HeatLimits:
        """The limits of an instance from now on."""
        limits = COOL
        if self._make is not None:
            control = self._controls.get(name)
            if control is None:
                control = self._controls[name] = self._make()
            limits = control.tick(readings, work, now_s)
        standing = self._orders.get(name)
        if standing is not None and now_s >= standing.until_s:
            del self._orders[name]
            standing = None
        if standing is not None:
            evict = standing.step(hottest_celsius(readings, now_s), work.running, now_s)
            limits = self._ordered(name, limits, standing, evict)
        return self._note(name, limits)

    def _note(self, name: str, limits: HeatLimits) -> HeatLimits:
        self._limits[name] = limits
        if name not in self._swings:
            self._swings[name] = _Swing()
        self._swings[name].note(limits.cap)
        return limits

    def _ordered(
        self, name: str, limits: HeatLimits, standing: StandingOrder, evict: int
    ) -> HeatLimits:
        """Limits with an operator's order: in an emergency the stricter of both holds."""
        if self._state(name) == EMERGENCY:
            caps = [cap for cap in (limits.cap, standing.cap) if cap is not None]
            cap = min(caps) if caps else None
            return replace(limits, cap=cap, evict=max(limits.evict, evict))
        return replace(limits, cap=standing.cap, evict=evict, is_drained=False)

    def _state(self, name: str) -> str:
        control = self._controls.get(name)
        return NORMAL if control is None else str(control.state)

    def state(self, name: str) -> str:
        """The state of an instance; MANUAL while an operator's order holds."""
        state = self._state(name)
        return MANUAL if name in self._orders and state != EMERGENCY else state

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
