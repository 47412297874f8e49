"""One reading of one GPU, and what thermal control allows an instance: the vocabulary of control.

Sensors (`proxy/fleet/sensors`), the virtual plant (`replayer/virtual`) and the simulator make
readings; the controller makes limits of them; gate, router and placement obey the limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuReading:
    """A sensor's reading of one GPU at `at_s` on the monotonic clock; None if not reported.

    `gpu`: its name, `host:index`. `celsius`: of the chip, `memory_celsius`: of its memory.
    `utilization_ratio`: 0 to 1. `is_slowed`: the hardware slows itself down for its temperature.
    `pcie_tx_bytes_per_s`: what it sends to its host.
    """

    gpu: str
    at_s: float
    celsius: float | None = None
    memory_celsius: float | None = None
    watts: float | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    is_slowed: bool = False
    pcie_tx_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class InstanceWork:
    """An instance's work while its GPUs are read, by the proxy's own ledger.

    `running`: requests in flight, `kv_tokens`: what they hold, `prefill_tps`: prompt tokens that
    it computed per second since the last reading, `waiting`: requests that wait for a place.
    """

    running: int = 0
    kv_tokens: int = 0
    prefill_tps: float = 0.0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class HeatLimits:
    """Limits of a hot instance, in the order of their cost for users.

    `weight`: its share of placements, 0 to 1, as after a restart. `helps`: it may prefill for
    others. `prefill_factor`: what its own prefill is priced at, 1 where it is cool. `cap`: requests
    in flight, None for no cap. `evict`: how many running requests should leave it now.
    `is_drained`: it takes no request at all.
    """

    weight: float = 1.0
    helps: bool = True
    prefill_factor: float = 1.0
    cap: int | None = None
    evict: int = 0
    is_drained: bool = False

    def admits(self, in_flight: int) -> bool:
        """Whether one more request may begin beside so many in flight."""
        return not self.is_drained and in_flight < (math.inf if self.cap is None else self.cap)


COOL = HeatLimits()
"""No limit at all: thermal control is off, or the instance is cool."""
