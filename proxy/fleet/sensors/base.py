"""The common part of sensors: the call, its errors, and the plausible numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeVar

from proxy.config.sensors import SensorAt
from proxy.core.thermal.readings import GpuReading
from proxy.net.timeouts import MayHang
from proxy.net.upstream.client import LIST_BYTES, get_from
from proxy.net.upstream.pool import ConnectOptions, Pool
from proxy.protocol.errors import DEFECTS, UpstreamFailure

T = TypeVar("T")
ANSWER_S = 2.0
"""A sensor that answers later has failed: control takes a reading of 3 s for stale."""
COLDEST_C, HOTTEST_C = -40.0, 200.0
MOST_W = 10_000.0
MOST_BYTES = float(1 << 50)
"""A value beyond these is not a reading: DCGM reports 9223372036854775794 for a missing value."""
MIB = 1 << 20
THERMAL_REASONS = 0x20 | 0x40
"""Bits of NVIDIA's reasons for a lower clock that mean heat: by software, by the hardware."""


class SensorError(OSError):
    """A sensor gave no readings; the text says why, in one line."""


class Sensor(Protocol):
    """One sensor of one instance."""

    async def read(self, at_s: float) -> list[GpuReading]:
        """Every GPU that it tells now, at `at_s`; raises SensorError, within its own time limit."""
        ...

    async def close(self) -> None:
        """Give back what it holds."""
        ...


class MakesSensor(Protocol):
    """Context for making a sensor; `connect_timeout_s` limits one attempt to connect."""

    def __call__(
        self, at: SensorAt, options: ConnectOptions, connect_timeout_s: float
    ) -> Sensor: ...


async def answer(calls: MayHang[T], call: Callable[[], T], limit_s: float) -> T:
    """The result of a call that may hang; raises SensorError."""
    try:
        return await calls.run(call, limit_s)
    except SensorError:
        raise
    except (OSError, *DEFECTS) as error:
        raise SensorError(str(error)) from error


class Source:
    """One address; the instances' key is never sent there."""

    def __init__(self, at: SensorAt, options: ConnectOptions, connect_timeout_s: float) -> None:
        self._pool = Pool(at.url or "", connect_timeout_s, options)

    async def get(self, path: str) -> bytes:
        """The body of a 200 answer; raises SensorError."""
        try:
            return await get_from(self._pool, path, ANSWER_S, limit=LIST_BYTES)
        except UpstreamFailure as failure:
            # without the query, which may have a token in it
            raise SensorError(str(failure).replace(path, path.partition("?")[0])) from None

    async def close(self) -> None:
        """Close its connections."""
        await self._pool.close()


def within(value: object, least: float, most: float) -> float | None:
    """A number within its bounds; None for anything else, as a sensor may say anything."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    number = float(value)
    return number if math.isfinite(number) and least <= number <= most else None


def number(text: str) -> float | None:
    """The number that a text is; None for `[N/A]` and the like."""
    try:
        return float(text)
    except ValueError:
        return None


def reading(  # noqa: PLR0913 - one argument for each figure of a GPU
    gpu: str,
    at_s: float,
    *,
    celsius: object = None,
    memory_celsius: object = None,
    watts: object = None,
    utilization_ratio: object = None,
    memory_used_bytes: object = None,
    pcie_tx_bytes_per_s: object = None,
    is_slowed: bool = False,
) -> GpuReading:
    """A reading of what a sensor said, without what cannot be."""
    used = within(memory_used_bytes, 0.0, MOST_BYTES)
    return GpuReading(
        gpu,
        at_s,
        within(celsius, COLDEST_C, HOTTEST_C),
        # 0 is what GPUs without a sensor in their memory report
        within(memory_celsius, COLDEST_C, HOTTEST_C) or None,
        within(watts, 0.0, MOST_W),
        within(utilization_ratio, 0.0, 1.0),
        None if used is None else int(used),
        is_slowed,
        within(pcie_tx_bytes_per_s, 0.0, MOST_BYTES),
    )
