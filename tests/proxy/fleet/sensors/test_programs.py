"""The programs' output, by its documented form; not recorded from hardware."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.config.sensors import SensorAt
from proxy.core.thermal.readings import GpuReading
from proxy.fleet.sensors import programs
from proxy.fleet.sensors.base import SensorError
from proxy.fleet.sensors.programs import (
    amd_smi,
    nvidia_smi,
    parse_amd_smi,
    parse_nvidia_smi,
)
from proxy.net.upstream.pool import ConnectOptions

NVIDIA = b"""0, 71, 78, 512.35, 93, 73210, Not Active, Not Active
1, 88, N/A, [N/A], [N/A], 73208, Active, Not Active
2, 45, [Not Supported], 70.02, 0, 4, Not Active, Active
"""


def _unit(value: float, unit: str) -> dict[str, object]:
    return {"value": value, "unit": unit}


AMD = [
    {
        "gpu": 0,
        "usage": {"gfx_activity": _unit(97, "%"), "umc_activity": _unit(40, "%")},
        "power": {"socket_power": _unit(743, "W"), "throttle_status": "THROTTLED"},
        "temperature": {"edge": "N/A", "hotspot": _unit(61, "C"), "mem": _unit(68, "C")},
        "mem_usage": {"total_vram": _unit(196592, "MB"), "used_vram": _unit(180000, "MB")},
    },
    {
        "gpu": 1,
        "usage": "N/A",
        "power": {"socket_power": "N/A", "throttle_status": "UNTHROTTLED"},
        "temperature": {"edge": _unit(48, "C"), "hotspot": "N/A", "mem": "N/A"},
        "mem_usage": {"used_vram": 283},
    },
]


def test_nvidia_smi() -> None:
    assert parse_nvidia_smi(NVIDIA, "h", 1.0) == [
        GpuReading("h:0", 1.0, 71.0, 78.0, 512.35, 0.93, 73210 << 20),
        GpuReading("h:1", 1.0, 88.0, None, None, None, 73208 << 20, is_slowed=True),
        GpuReading("h:2", 1.0, 45.0, None, 70.02, 0.0, 4 << 20, is_slowed=True),
    ]


@pytest.mark.parametrize("document", [AMD, {"gpu_data": AMD}])
def test_amd_smi_of_rocm_6_and_7(document: object) -> None:
    assert parse_amd_smi(orjson.dumps(document), "h", 1.0) == [
        GpuReading("h:0", 1.0, 61.0, 68.0, 743.0, 0.97, 180000 << 20),
        GpuReading("h:1", 1.0, 48.0, None, None, None, 283 << 20),
    ]


@settings(max_examples=40)
@given(st.binary(max_size=100) | st.just(b"[]") | st.just(b'{"gpu_data": [{"gpu": "0"}]}'))
def test_what_has_no_gpu_in_it_is_a_fault(output: bytes) -> None:
    for parse in (parse_nvidia_smi, parse_amd_smi):
        with pytest.raises(SensorError, match=r"no GPU in it|not JSON"):
            parse(output, "h", 0.0)


def _installed(folder: Path, name: str, script: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


async def test_programs_are_started_and_say_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(programs, "PROGRAM_S", 5.0)
    nvidia = nvidia_smi(SensorAt.parse("nvidia-smi", "local", "h"), ConnectOptions(), 1.0)
    amd = amd_smi(SensorAt.parse("amd-smi", "local", "h"), ConnectOptions(), 1.0)
    for sensor in (nvidia, amd):
        with pytest.raises(SensorError, match="is not installed on this machine"):
            await sensor.read(0.0)
    (tmp_path / "rows").write_bytes(NVIDIA)
    _installed(
        tmp_path, "nvidia-smi", f'case "$1" in --query-gpu=index,*) cat {tmp_path}/rows;; esac'
    )
    _installed(tmp_path, "amd-smi", "echo 'ERROR: no driver' >&2; exit 3")
    assert [r.celsius for r in await nvidia.read(0.0)] == [71.0, 88.0, 45.0]
    with pytest.raises(SensorError, match="ends with status 3: ERROR: no driver"):
        await amd.read(0.0)
    monkeypatch.setattr(programs, "PROGRAM_S", 0.05)
    _installed(tmp_path, "nvidia-smi", "exec sleep 60")
    with pytest.raises(SensorError, match=r"no answer in 0\.05 s"):
        await nvidia.read(0.0)
