"""The sensor `dcgm`: the metrics of dcgm-exporter, Prometheus text over HTTP.

Only lines of the series that are used are parsed. A GPU that is split (MIG) has a series for each
part: the greatest value counts. `DCGM_FI_DEV_CLOCKS_EVENT_REASONS`, or its name in older versions,
shows throttling at once. It is not among the exporter's default counters; without it, a rise of
`DCGM_FI_DEV_THERMAL_VIOLATION` shows throttling.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping

from proxy.config.sensors import SensorAt
from proxy.core.thermal.readings import GpuReading
from proxy.fleet.sensors.base import MIB, THERMAL_REASONS, SensorError, Source, number, reading
from proxy.net.peer_documents import in_turns, wanted_lines
from proxy.net.upstream.pool import ConnectOptions

_GPU = re.compile(r'(?:^|[,{ ])gpu="(?P<index>[0-9]{1,4})"')
GPU_TEMP = "DCGM_FI_DEV_GPU_TEMP"
MEMORY_TEMP = "DCGM_FI_DEV_MEMORY_TEMP"
POWER = "DCGM_FI_DEV_POWER_USAGE"
UTILIZATION = "DCGM_FI_DEV_GPU_UTIL"
MEMORY_USED = "DCGM_FI_DEV_FB_USED"
PCIE_TX = "DCGM_FI_PROF_PCIE_TX_BYTES"
VIOLATION = "DCGM_FI_DEV_THERMAL_VIOLATION"
REASONS = ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS")
_WANTED = (GPU_TEMP, MEMORY_TEMP, POWER, UTILIZATION, MEMORY_USED, PCIE_TX, VIOLATION, *REASONS)
_NAMES = tuple(name.encode() for name in _WANTED)
_LINE = re.compile(rf"(?P<name>{'|'.join(_WANTED)})\{{(?P<labels>[^}}]*)\}}[ \t]+(?P<value>\S+)")
Series = dict[int, dict[str, float]]
"""Values of the series by the GPU's index."""


def parse(exposition: bytes) -> Generator[None, None, Series]:
    """The wanted series, read in turns; other lines, and lines that are cut, are ignored."""
    found: Series = {}
    for raw in wanted_lines(exposition, _NAMES):
        if raw is None:
            yield
            continue
        line = _LINE.match(raw.decode("utf-8", "replace"))
        if line is None:
            continue
        gpu, value = _GPU.search(line["labels"]), number(line["value"])
        if gpu is None or value is None:
            continue
        of_gpu = found.setdefault(int(gpu["index"]), {})
        of_gpu[line["name"]] = max(value, of_gpu.get(line["name"], value))
    return found


def is_slowed(values: Mapping[str, float], before: Mapping[str, float]) -> bool:
    """Whether the hardware slows a GPU down for its heat, by two expositions in a row."""
    for name in REASONS:
        if 0 <= (reasons := values.get(name, -1.0)) < 1 << 32:
            return bool(int(reasons) & THERMAL_REASONS)
    was = before.get(VIOLATION)
    return was is not None and values.get(VIOLATION, 0.0) > was


def readings(host: str, series: Series, before: Series, at_s: float) -> list[GpuReading]:
    """Readings of each GPU in an exposition; `before`: the previous exposition."""
    return [
        reading(
            f"{host}:{index}",
            at_s,
            celsius=values.get(GPU_TEMP),
            memory_celsius=values.get(MEMORY_TEMP),
            watts=values.get(POWER),
            utilization_ratio=_scaled(values.get(UTILIZATION), 0.01),
            memory_used_bytes=_scaled(values.get(MEMORY_USED), MIB),
            pcie_tx_bytes_per_s=values.get(PCIE_TX),
            is_slowed=is_slowed(values, before.get(index, {})),
        )
        for index, values in sorted(series.items())
    ]


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


class Dcgm:
    """A dcgm-exporter."""

    def __init__(self, at: SensorAt, options: ConnectOptions, connect_timeout_s: float) -> None:
        self._host, self._path = at.host, at.path
        self._source = Source(at, options, connect_timeout_s)
        self._before: Series = {}

    async def read(self, at_s: float) -> list[GpuReading]:
        """Every GPU of the exporter's host; raises SensorError."""
        body = await self._source.get(self._path)
        series = await in_turns(parse(body))
        if not series:
            raise SensorError("its answer has no GPU in it: is this a dcgm-exporter?")
        before, self._before = self._before, series
        return readings(self._host, series, before, at_s)

    async def close(self) -> None:
        """Close its connections."""
        await self._source.close()
