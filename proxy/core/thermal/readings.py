"""The values of thermal control: readings of a GPU, work and limits of an instance.

Sensors (`proxy/fleet/sensors`), the virtual plant (`replayer/virtual`) and the simulator make
readings; the controller makes limits of them; gate, router and placement obey the limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuReading:
    """A sensor's reading of one GPU; None if not reported."""

    gpu: str
    """Its name, `host:index`."""
    at_s: float
    """Time on the monotonic clock."""
    celsius: float | None = None
    """Of the chip."""
    memory_celsius: float | None = None
    """Of its memory."""
    watts: float | None = None
    utilization_ratio: float | None = None
    """0 to 1."""
    memory_used_bytes: int | None = None
    is_slowed: bool = False
    """The GPU throttles for heat."""
    pcie_tx_bytes_per_s: float | None = None
    """Bytes per second to its host."""


@dataclass(frozen=True, slots=True)
class InstanceWork:
    """An instance's work while its GPUs are read, by the proxy's own ledger."""

    running: int = 0
    """Requests in flight."""
    kv_tokens: int = 0
    """KV tokens that they hold."""
    prefill_tps: float = 0.0
    """Prompt tokens computed per second since the last reading."""
    waiting: int = 0
    """Requests that wait for a place."""


@dataclass(frozen=True, slots=True)
class HeatLimits:
    """Limits of a hot instance, in the order of their cost for users."""

    weight: float = 1.0
    """Its share of placements, 0 to 1, as after a restart."""
    helps: bool = True
    """It may prefill for others."""
    prefill_factor: float = 1.0
    """Price factor of its own prefills, 1 on a cool instance."""
    cap: int | None = None
    """Most requests in flight, None for no cap."""
    evict: int = 0
    """Number of running requests to evict now."""
    is_drained: bool = False
    """It takes no requests at all."""

    def admits(self, in_flight: int) -> bool:
        """Whether one more request may begin beside so many in flight."""
        return not self.is_drained and in_flight < (math.inf if self.cap is None else self.cap)


COOL = HeatLimits()
"""No limit at all: thermal control is off, or the instance is cool."""
