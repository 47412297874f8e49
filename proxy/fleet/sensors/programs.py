"""The sensors `nvidia-smi` and `amd-smi`: programs of this machine, started for each reading.

A start takes some tenths of a second of CPU time in the driver, so for control once per second
`nvml` or `dcgm` is the better sensor. The command is fixed: an entry cannot name a program.
"""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from proxy.config.sensors import SensorAt
from proxy.core.thermal.readings import GpuReading
from proxy.fleet.sensors.base import MIB, SensorError, answer, number, reading, within
from proxy.net.peer_documents import read_json
from proxy.net.timeouts import MayHang
from proxy.net.upstream.pool import ConnectOptions

PROGRAM_S = 3.0
"""A program that takes longer is killed: a driver that hangs would hold it for ever."""
KILL_S = 0.5
"""Longest time for a killed program to end."""
_NVIDIA_FIELDS = (
    *("index", "temperature.gpu", "temperature.memory", "power.draw", "utilization.gpu"),
    *("memory.used", "clocks_event_reasons.hw_thermal_slowdown"),
    "clocks_event_reasons.sw_thermal_slowdown",
)
NVIDIA_SMI = (
    *("nvidia-smi", f"--query-gpu={','.join(_NVIDIA_FIELDS)}"),
    "--format=csv,noheader,nounits",
)
AMD_SMI = ("amd-smi", "metric", "--usage", "--power", "--temperature", "--mem-usage", "--json")
Parse = Callable[[bytes, str, float], list[GpuReading]]


def parse_nvidia_smi(output: bytes, host: str, at_s: float) -> list[GpuReading]:
    """The rows of nvidia-smi's CSV; what it does not know is `[N/A]`. Raises SensorError."""
    found = []
    for row in csv.reader(output.decode("utf-8", "replace").splitlines(), skipinitialspace=True):
        if len(row) != len(_NVIDIA_FIELDS) or not row[0].isdecimal():
            continue
        degrees, memory, watts, percent, used = map(number, row[1:6])
        gpu = f"{host}:{int(row[0])}"
        found.append(
            reading(
                gpu,
                at_s,
                celsius=degrees,
                memory_celsius=memory,
                watts=watts,
                utilization_ratio=None if percent is None else percent / 100,
                memory_used_bytes=None if used is None else used * MIB,
                is_slowed="Active" in row[6:],
            )
        )
    if not found:
        raise SensorError("its output has no GPU in it")
    return found


def parse_amd_smi(output: bytes, host: str, at_s: float) -> list[GpuReading]:
    """The GPUs of amd-smi's JSON: a list, in ROCm 7 within `gpu_data`. Raises SensorError."""
    try:
        document = read_json(output)
    except ValueError as error:
        raise SensorError("its output is not JSON") from error
    gpus = document.get("gpu_data") if isinstance(document, dict) else document
    rows = [g for g in gpus if isinstance(g, dict)] if isinstance(gpus, list) else []
    found = [_of_amd(gpu, host, at_s) for gpu in rows if isinstance(gpu.get("gpu"), int)]
    if not found:
        raise SensorError("its output has no GPU in it")
    return found


def _of_amd(gpu: dict[str, Any], host: str, at_s: float) -> GpuReading:
    """One GPU; its hottest spot where that is told, else its edge."""
    degrees, memory = _part(gpu, "temperature"), _part(gpu, "mem_usage")
    power, hottest = _part(gpu, "power"), _value(degrees.get("hotspot"))
    percent, used = _value(_part(gpu, "usage").get("gfx_activity")), _value(memory.get("used_vram"))
    return reading(
        f"{host}:{gpu['gpu']}",
        at_s,
        celsius=hottest if hottest is not None else _value(degrees.get("edge")),
        memory_celsius=_value(degrees.get("mem")),
        watts=_value(power.get("socket_power")),
        utilization_ratio=None if percent is None else percent / 100,
        memory_used_bytes=None if used is None else used * MIB,
        # Not slowed: `throttle_status` is of power limits too, which are no heat.
    )


def _part(gpu: dict[str, Any], name: str) -> dict[str, Any]:
    part = gpu.get(name)
    return part if isinstance(part, dict) else {}


def _value(given: object) -> float | None:
    """A figure, bare or as `{"value": 71, "unit": "C"}`; None for `N/A`."""
    bare = given.get("value") if isinstance(given, dict) else given
    return within(bare, -1e12, 1e12)


def output_of(command: Sequence[str]) -> bytes:
    """The output of a program; raises SensorError. To be called in a thread."""
    try:
        # A fork of the event loop's process would copy its page tables; this is a vfork.
        run = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROGRAM_S,
            check=True,
        )
    except FileNotFoundError as error:
        raise SensorError(f"{command[0]} is not installed on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise SensorError(f"no answer in {PROGRAM_S:g} s") from error
    except subprocess.CalledProcessError as error:
        said = (error.stdout + error.stderr).decode("utf-8", "replace").split("\n")[0][:200]
        raise SensorError(f"ends with status {error.returncode}: {said}") from error
    except OSError as error:
        raise SensorError(error.strerror or "it cannot be started") from error
    return run.stdout


class Program:
    """A program of this machine."""

    def __init__(self, at: SensorAt, command: Sequence[str], parse: Parse) -> None:
        self._host, self._command, self._parse = at.host, command, parse
        self._calls = MayHang[bytes](command[0])

    async def read(self, at_s: float) -> list[GpuReading]:
        """The GPUs of this machine; raises SensorError."""
        # A program that is killed ends only when the driver lets go of it.
        output = await answer(self._calls, lambda: output_of(self._command), PROGRAM_S + KILL_S)
        return self._parse(output, self._host, at_s)

    async def close(self) -> None:
        """Nothing is held."""


def nvidia_smi(at: SensorAt, options: ConnectOptions, connect_timeout_s: float) -> Program:
    """NVIDIA's program."""
    del options, connect_timeout_s
    return Program(at, NVIDIA_SMI, parse_nvidia_smi)


def amd_smi(at: SensorAt, options: ConnectOptions, connect_timeout_s: float) -> Program:
    """AMD's program."""
    del options, connect_timeout_s
    return Program(at, AMD_SMI, parse_amd_smi)
