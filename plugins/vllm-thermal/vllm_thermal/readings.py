"""Temperatures of this engine's GPUs, read once a second in a thread of their own.

From NVML, or from a file that a sidecar writes (a BMC, a DCGM job, another vendor's tool): a step
of the engine never waits for either.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

PERIOD_S = 1.0
FILE_BYTES = 64 << 10
SOURCE = "VLLM_THERMAL_READINGS"
SOURCE_FORM = "nvml, or file:/path with a line `GPU CELSIUS` for each GPU"
GPUS = "VLLM_THERMAL_GPUS"
COLDEST_C, HOTTEST_C = -40.0, 200.0
"""What is outside of this is no temperature of a chip."""
log = logging.getLogger("vllm.thermal")
Read = Callable[[], Mapping[int, float]]


class ReadingError(Exception):
    """No temperature could be read; its text is one line."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Degrees of each GPU, read at `at_s`."""

    at_s: float
    celsius: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))


class Readings:
    """The latest sample, renewed by a thread. Made where the first one could be read."""

    def __init__(self, read: Read, clock: Callable[[], float], period_s: float = PERIOD_S) -> None:
        self._read = read
        self._clock = clock
        self._period_s = period_s
        self.latest = Sample(clock(), read())
        self.failures = 0
        self._failed = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thermal-readings", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; a reading that hangs is left to end by itself."""
        self._ended.set()
        self._thread.join(timeout=PERIOD_S)

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            at_s = self._clock()
            try:
                self.latest = Sample(at_s, self._read())
            except ReadingError as error:
                self.failures += 1
                if not self._failed:
                    log.warning("no temperature: %s", error)
                self._failed = True
            else:
                self._failed = False


def checked(celsius: Mapping[int, float]) -> Mapping[int, float]:
    """The same; raises ReadingError for none at all and for what is no temperature."""
    if not celsius:
        raise ReadingError("no GPU is named")
    for gpu, value in celsius.items():
        if not COLDEST_C <= value <= HOTTEST_C:
            raise ReadingError(
                f"GPU {gpu} has {value:g} C, which is outside of {COLDEST_C:g} to {HOTTEST_C:g}"
            )
    return MappingProxyType(dict(celsius))


def of_text(text: str) -> Mapping[int, float]:
    """Read lines `GPU CELSIUS`; empty ones and those that begin with # are skipped."""
    found: dict[int, float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            gpu, celsius = line.split()
            found[int(gpu)] = float(celsius)
        except ValueError:
            raise ReadingError(f"line {number} is not `GPU CELSIUS`: {line!r:.64}") from None
    return checked(found)


class FileReader:
    """Reads a file; one that nobody has written since the last time is no new reading."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written_ns = -1

    def __call__(self) -> Mapping[int, float]:
        """Temperatures; raises ReadingError."""
        try:
            with self._path.open("rb") as file:
                written_ns = os.fstat(file.fileno()).st_mtime_ns
                text = file.read(FILE_BYTES).decode()
        except (OSError, ValueError) as error:
            raise ReadingError(f"{self._path}: {error}") from error
        if written_ns == self._written_ns:
            raise ReadingError(f"{self._path}: not written since the last reading")
        found = of_text(text)
        self._written_ns = written_ns
        return found


class NvmlReader:
    """Reads the core temperature of GPUs by index or UUID."""

    def __init__(self, gpus: Sequence[str]) -> None:
        try:
            import pynvml
        except ImportError:
            raise ReadingError(
                "NVML needs nvidia-ml-py: pip install 'vllm-thermal[nvml]'"
            ) from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handles = [self._handle(gpu) for gpu in gpus]
        except pynvml.NVMLError as error:
            raise ReadingError(f"NVML, GPUs {','.join(gpus)}: {error}") from error

    def __call__(self) -> Mapping[int, float]:
        """Temperatures by the GPU's place among those of this engine; raises ReadingError."""
        nvml = self._nvml
        try:
            return checked(
                {
                    at: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
                    for at, handle in enumerate(self._handles)
                }
            )
        except nvml.NVMLError as error:
            raise ReadingError(f"NVML: {error}") from error

    def _handle(self, gpu: str) -> object:
        if gpu.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(gpu))
        return self._nvml.nvmlDeviceGetHandleByUUID(gpu)


def gpus_of(environment: Mapping[str, str], world_size: int, local_rank: int) -> list[str]:
    """The GPUs of an engine of `world_size`: as given, or its part of those that it may see.

    `local_rank`: of the engine among the data-parallel ones of this host, which follow each other.
    """
    if given := [gpu.strip() for gpu in environment.get(GPUS, "").split(",") if gpu.strip()]:
        return given
    text = environment.get("CUDA_VISIBLE_DEVICES")
    first, last = local_rank * world_size, (local_rank + 1) * world_size
    if not text:
        return [str(at) for at in range(first, last)]
    visible = [gpu.strip() for gpu in text.split(",")]
    return visible[first:last] if len(visible) >= last else visible[:world_size]


def reader(environment: Mapping[str, str], world_size: int, local_rank: int) -> Read:
    """What the environment says to read from; raises ReadingError."""
    source = environment.get(SOURCE, "nvml")
    if source == "nvml":
        return NvmlReader(gpus_of(environment, world_size, local_rank))
    kind, _, path = source.partition(":")
    if kind == "file" and path:
        return FileReader(Path(path))
    raise ReadingError(f"{SOURCE} is {source!r:.64}: it must be {SOURCE_FORM}")
