"""One GPU of which everything is known, so that each of its gauges is exported."""

from proxy.core.thermal.readings import GpuReading
from proxy.fleet.sensors.readings import GpuCollector, GpuReadings

FULL = GpuReading("h:0", 0.0, 80.0, 90.0, 500.5, 0.9, 70 << 30, pcie_tx_bytes_per_s=1e9)


def gpu_collector() -> GpuCollector:
    """The gauges of one instance with that GPU."""
    readings = GpuReadings()
    readings.watch("a", (), 0.0)
    readings.observe("a", [FULL], is_idle=True)
    return GpuCollector(readings, lambda: 0.0)
