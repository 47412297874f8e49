"""GpuReadings: the last reading of every GPU, by instance; and their gauges.

A reading's time is that of the last sign of life. A sensor that reports the same figures to the
last digit while the instance works has not measured again. The power of a working GPU is never
twice the same. Then the old time stays. Its age shows a frozen sensor, or an exporter that collects
less often than it is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.core.thermal.headroom import MOST_GPUS
from proxy.core.thermal.readings import GpuReading
from proxy.telemetry.metrics import PREFIX

SHOWN_S = 60.0
"""An older reading is no longer exported: the series ends, and the age goes on."""
_GAUGES: tuple[tuple[str, str, Callable[[GpuReading], float | None]], ...] = (
    (
        "gpu_utilization_ratio",
        "Share of time in which the GPU worked",
        lambda r: r.utilization_ratio,
    ),
    ("gpu_memory_used_bytes", "Memory in use on the GPU", lambda r: r.memory_used_bytes),
    ("gpu_temperature_celsius", "Temperature of the GPU", lambda r: r.celsius),
    (
        "gpu_memory_temperature_celsius",
        "Temperature of the GPU's memory",
        lambda r: r.memory_celsius,
    ),
    ("gpu_power_watts", "Power draw of the GPU", lambda r: r.watts),
    ("gpu_slowed", "1 while the GPU throttles for heat", lambda r: r.is_slowed),
    (
        "gpu_pcie_tx_bytes_per_second",
        "Bytes per second sent over PCIe",
        lambda r: r.pcie_tx_bytes_per_s,
    ),
)


@dataclass(slots=True)
class _Watched:
    """One instance's GPUs. `since_s`: when its sensors were first asked. `named`: by its entry."""

    since_s: float
    named: frozenset[str]
    last: dict[str, GpuReading] = field(default_factory=dict)

    def has_room(self, now_s: float) -> bool:
        """Whether one more GPU is taken: a sensor may tell others each time."""
        if len(self.last) >= MOST_GPUS:
            oldest = min(self.last.values(), key=lambda reading: reading.at_s)
            if now_s - oldest.at_s < SHOWN_S:
                return False
            del self.last[oldest.gpu]
        return True


class GpuReadings:
    """The last readings; of each instance that has a sensor, as long as it is there."""

    def __init__(self) -> None:
        self._by_instance: dict[str, _Watched] = {}
        self.needed_every_s = math.inf
        """Longest interval that control needs; `--sensor-interval` may be shorter."""

    def of(self, instance: str) -> Sequence[GpuReading]:
        """The last reading of each of an instance's GPUs, however old; none without a sensor."""
        watched = self._by_instance.get(instance)
        return () if watched is None else tuple(watched.last.values())

    def expected(self, instance: str) -> Sequence[GpuReading]:
        """`of`, and one without a figure for each named GPU that was never read, since when."""
        watched = self._by_instance.get(instance)
        if watched is None:
            return ()
        missing = sorted(watched.named - watched.last.keys())
        return (*watched.last.values(), *(GpuReading(gpu, watched.since_s) for gpu in missing))

    def age_s(self, instance: str, now_s: float) -> float | None:
        """Age of the oldest reading; for a GPU never read, time since the first attempt.

        None without a sensor.
        """
        watched = self._by_instance.get(instance)
        if watched is None:
            return None
        times = [reading.at_s for reading in watched.last.values()]
        is_whole = bool(times) and watched.named <= watched.last.keys()
        return max(0.0, now_s - min(times if is_whole else [*times, watched.since_s]))

    def instances(self) -> list[str]:
        """The names of the instances that have a sensor."""
        return list(self._by_instance)

    def watch(self, instance: str, named: Iterable[str], now_s: float) -> None:
        """Begin with an instance; `named`: the GPUs that its entry names."""
        self._by_instance[instance] = _Watched(now_s, frozenset(named))

    def forget(self, instance: str) -> None:
        """The instance has left, or has no sensor any more."""
        self._by_instance.pop(instance, None)

    def observe(self, instance: str, found: Iterable[GpuReading], *, is_idle: bool) -> None:
        """Take in what a sensor says now; `is_idle`: the instance has no request."""
        watched = self._by_instance.get(instance)
        if watched is None:
            return
        is_full = False
        for reading in found:
            if watched.named and reading.gpu not in watched.named:
                continue
            before = watched.last.get(reading.gpu)
            if before is None:
                is_full = is_full or not watched.has_room(reading.at_s)
                if is_full:
                    continue
            is_frozen = not is_idle and before is not None and _is_same(before, reading)
            if before is None or not is_frozen:
                watched.last[reading.gpu] = reading


def _is_same(before: GpuReading, now: GpuReading) -> bool:
    """Whether a sensor that tells power has said the same again."""
    return now.watts is not None and replace(now, at_s=before.at_s) == before


class GpuCollector(Collector):
    """The gauges of the readings, at scrape time."""

    def __init__(self, readings: GpuReadings, now_s: Callable[[], float]) -> None:
        self._readings, self._now_s = readings, now_s

    def collect(self) -> Iterator[Metric]:
        """All families."""
        now_s = self._now_s()
        rows = [
            (name, reading)
            for name in self._readings.instances()
            for reading in self._readings.of(name)
            if now_s - reading.at_s < SHOWN_S
        ]
        for metric, text, read in _GAUGES:
            family = GaugeMetricFamily(f"{PREFIX}_{metric}", text, labels=("upstream", "gpu"))
            for name, reading in rows:
                if (value := read(reading)) is not None:
                    family.add_metric([name, reading.gpu], value)
            yield family
        text = "Age of the oldest GPU reading of the instance"
        ages = GaugeMetricFamily(f"{PREFIX}_thermal_sensor_age_seconds", text, labels=("upstream",))
        for name in self._readings.instances():
            if (age_s := self._readings.age_s(name, now_s)) is not None:
                ages.add_metric([name], age_s)
        yield ages
