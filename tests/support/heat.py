"""A policy of an operator's own for the heat of instances, which says what a test wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.core.thermal.fleet_control import FleetControl
from proxy.core.thermal.readings import COOL, GpuReading, HeatLimits, InstanceWork


@dataclass
class Scripted:
    """Always says the same, and notes what it was told."""

    limits: HeatLimits = COOL
    state: str = "NORMAL"
    headroom_celsius: float | None = 5.0
    watts_per_seq: float = 3.2
    seen: list[InstanceWork] = field(default_factory=list)
    aimed: tuple[float, float] | None = None
    failures: int = 0

    def tick(self, readings: Sequence[GpuReading], work: InstanceWork, now_s: float) -> HeatLimits:
        del readings, now_s
        self.seen.append(work)
        return self.limits

    def aim(self, target_celsius: float, until_s: float) -> None:
        self.aimed = (target_celsius, until_s)

    def clear_override(self) -> None:
        self.aimed = None

    def actuator_worked(self) -> None:
        self.failures = 0

    def actuator_failed(self, now_s: float) -> None:
        del now_s
        self.failures += 1

    def watts_of(self, kv_tokens: Sequence[int]) -> float:
        return self.watts_per_seq * len(kv_tokens)


def known_heat(*names: str) -> FleetControl:
    """Control that has looked at these instances once."""
    control = FleetControl(lambda policy: Scripted())
    for name in names:
        control.tick(name, (), InstanceWork(), 0.0)
    return control
