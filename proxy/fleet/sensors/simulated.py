"""The sensor `simulated`: degrees by the clock, of no GPU, to rehearse alerts and control."""

from __future__ import annotations

from proxy.config.sensors import SensorAt, Swing
from proxy.core.thermal.readings import GpuReading
from proxy.net.upstream.pool import ConnectOptions


def celsius(swing: Swing, at_s: float) -> float:
    """The degrees at a time: a triangle from the lowest to the highest and back."""
    phase = at_s % swing.period_s / swing.period_s
    return swing.low + (swing.high - swing.low) * (1 - abs(2 * phase - 1))


class Simulated:
    """Degrees that stay, or rise and fall."""

    def __init__(self, at: SensorAt, options: ConnectOptions, connect_timeout_s: float) -> None:
        del options, connect_timeout_s
        self._at = at

    async def read(self, at_s: float) -> list[GpuReading]:
        """One GPU, of index 0."""
        assert self._at.swing is not None
        return [GpuReading(f"{self._at.host}:0", at_s, celsius(self._at.swing, at_s))]

    async def close(self) -> None:
        """Nothing is held."""
