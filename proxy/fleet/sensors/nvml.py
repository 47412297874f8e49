"""The sensor `nvml`: NVIDIA's library on this machine, by the package nvidia-ml-py (extra `nvml`).

Its calls may hang with the driver, so they run in a thread of their own that no exit waits for, one
call at a time for all instances.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from proxy.config.sensors import SensorAt
from proxy.core.thermal.readings import GpuReading
from proxy.fleet.sensors.base import THERMAL_REASONS, SensorError, answer, reading
from proxy.net.timeouts import MayHang
from proxy.net.upstream.pool import ConnectOptions

CALL_S = 2.0
"""Calls that take longer have failed: the driver hangs."""
MISSING = "the package nvidia-ml-py is not installed: pip install -c constraints.txt '.[nvml]'"


def is_installed() -> bool:
    """Whether the package is there. Reads files."""
    return importlib.util.find_spec("pynvml") is not None


class Library:
    """The library, opened at the first reading, and anew after an error: that may take a second."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._lock = threading.Lock()

    def read_all(self, host: str, at_s: float) -> list[GpuReading]:
        """Every GPU of this machine; raises SensorError. Blocks, for ever if the driver hangs."""
        # Behind a call that hangs there is no use in another one.
        if not self._lock.acquire(timeout=CALL_S):
            raise SensorError("another call has not come back")
        try:
            return self._read_all(host, at_s)
        finally:
            self._lock.release()

    def _read_all(self, host: str, at_s: float) -> list[GpuReading]:
        nvml = self._nvml
        try:
            if nvml is None:
                nvml = importlib.import_module("pynvml")
                nvml.nvmlInit()
                self._nvml = nvml
            count = nvml.nvmlDeviceGetCount()
            return [_read_one(nvml, index, f"{host}:{index}", at_s) for index in range(count)]
        except ImportError as error:
            raise SensorError(MISSING) from error
        except nvml.NVMLError as error:
            if self._nvml is not None:
                self._nvml = None
                with suppress(nvml.NVMLError):
                    nvml.nvmlShutdown()
            raise SensorError(str(error)) from error


LIBRARY = Library()
"""The library of this process."""


def _read_one(nvml: Any, index: int, gpu: str, at_s: float) -> GpuReading:
    """One GPU; what it does not support is left out."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def told(call: Callable[[], Any]) -> Any:
        with suppress(nvml.NVMLError, AttributeError):  # an older package lacks some calls
            return call()
        return None

    milliwatts = told(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    rates = told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    memory = told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    reasons = told(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    if reasons is None:
        reasons = told(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return reading(
        gpu,
        at_s,
        celsius=told(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        memory_celsius=told(lambda: _memory_celsius(nvml, handle)),
        watts=None if milliwatts is None else milliwatts / 1000,
        utilization_ratio=None if rates is None else rates.gpu / 100,
        memory_used_bytes=None if memory is None else memory.used,
        is_slowed=bool((reasons or 0) & THERMAL_REASONS),
    )


def _memory_celsius(nvml: Any, handle: Any) -> int | None:
    """The memory's temperature, which has no call of its own."""
    field = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_MEMORY_TEMP])[0]
    return None if field.nvmlReturn else int(field.value.uiVal)


class Nvml:
    """The GPUs of this machine."""

    def __init__(self, at: SensorAt, options: ConnectOptions, connect_timeout_s: float) -> None:
        del options, connect_timeout_s
        self._host = at.host
        self._calls = MayHang[list[GpuReading]]("nvml")

    async def read(self, at_s: float) -> list[GpuReading]:
        """Every GPU of this machine; raises SensorError."""
        return await answer(self._calls, lambda: LIBRARY.read_all(self._host, at_s), CALL_S)

    async def close(self) -> None:
        """Nothing is held."""
