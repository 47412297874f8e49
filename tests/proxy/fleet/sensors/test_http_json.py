"""JSON documents with pointers: a BMC's, a script's, one in a file."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.config.sensors import MOST_INDEX, OWN_FIELDS, JsonFields, SensorAt
from proxy.core.thermal.readings import GpuReading
from proxy.fleet.sensors import http_json
from proxy.fleet.sensors.base import SensorError
from proxy.fleet.sensors.http_json import File, found, parse
from proxy.net.upstream.pool import ConnectOptions

REDFISH = orjson.dumps(
    {
        "@odata.id": "/redfish/v1/Chassis/HGX_GPU_SXM_1/ThermalSubsystem/ThermalMetrics",
        "TemperatureReadingsCelsius": [
            {"DeviceName": "HGX_GPU_SXM_1_TEMP_0", "Reading": 64.3},
            {"DeviceName": "HGX_GPU_SXM_2_TEMP_0", "Reading": 71.0},
        ],
        "PowerWatts": {"Reading": 433.5},
    }
)


def test_a_star_is_one_gpu_for_each_member() -> None:
    fields = JsonFields.parse(
        "/TemperatureReadingsCelsius/*/Reading&watts=/PowerWatts/Reading&gpu=4"
    )
    assert parse(REDFISH, fields, "bmc", 2.0) == [
        GpuReading("bmc:4", 2.0, 64.3, watts=433.5),
        GpuReading("bmc:5", 2.0, 71.0),
    ]


def test_what_one_gpu_lacks_is_not_anothers() -> None:
    gpus = [
        {"celsius": 71, "watts": 512.5, "utilization_ratio": 0.9, "memory_used_bytes": 5},
        {"celsius": 93, "memory_celsius": 99, "is_slowed": True, "watts": "much"},
    ]
    assert parse(orjson.dumps({"gpus": gpus}), OWN_FIELDS, "h", 0.0) == [
        GpuReading("h:0", 0.0, 71.0, None, 512.5, 0.9, 5),
        GpuReading("h:1", 0.0, 93.0, 99.0, is_slowed=True),
    ]


def test_percent_is_a_ratio() -> None:
    fields = JsonFields.parse("celsius=/t&utilization_percent=/u")
    assert parse(b'{"t": 50, "u": 80}', fields, "h", 0.0)[0].utilization_ratio == 0.8


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab*0"), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=40)
@given(DOCUMENTS, st.lists(st.sampled_from(["a", "b", "*", "0", "7"]), min_size=1, max_size=4))
def test_any_document_is_walked(document: Any, pointer: list[str]) -> None:
    values = list(found(document, pointer))
    assert len(values) == 1 or "*" in pointer
    if any(value is not None for value in values):
        parse(orjson.dumps(document), JsonFields((("celsius", tuple(pointer)),)), "h", 0.0)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "it is not JSON"),
        (b"{}", "none of its pointers leads to a value"),
        (b'{"gpus":[' + b"0," * 500_000 + b"0]}", "it has too many values"),
        (b'{"gpus":[' + b"{}," * 300_000 + b"0]}", "it has too many values"),
    ],
)
def test_faults_are_said(body: bytes, why: str) -> None:
    with pytest.raises(SensorError, match=why):
        parse(body, OWN_FIELDS, "h", 0.0)


@pytest.mark.long
def test_of_a_long_list_only_as_many_members_are_read_as_gpus_can_be() -> None:
    document = {"gpus": [{"t": [70, 71]}] * 4_000}
    pointer = ("gpus", "*", "t", "*")
    assert len(list(found(document, pointer))) <= 2 * (MOST_INDEX + 1)
    read = parse(orjson.dumps(document), JsonFields((("celsius", pointer),)), "h", 0.0)
    assert len(read) == MOST_INDEX + 1


async def test_a_files_readings_are_as_old_as_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    sensor = File(SensorAt.parse("file", f"{path}#/t", "h"), ConnectOptions(), 1.0)
    with pytest.raises(SensorError, match="No such file"):
        await sensor.read(1000.0)
    path.write_text('{"t": 66}')
    now = path.stat().st_mtime
    os.utime(path, (now - 500, now - 500))
    (reading,) = await sensor.read(1000.0)
    assert (reading.gpu, reading.celsius) == ("h:0", 66.0)
    assert 400 < reading.at_s <= 500.0


async def test_a_file_that_hangs_is_told_and_asked_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that nobody writes, as a network file system that is gone."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    monkeypatch.setattr(http_json, "ANSWER_S", 0.05)
    sensor = File(SensorAt.parse("file", f"{path}#/t", "h"), ConnectOptions(), 1.0)
    with pytest.raises(SensorError, match=r"no answer in 0\.05 s"):
        await sensor.read(1000.0)
    with pytest.raises(SensorError, match="earlier calls have not come back"):
        await sensor.read(1001.0)
    hanging = [thread for thread in threading.enumerate() if thread.name == "file"]
    assert [thread.daemon for thread in hanging] == [True], "no exit waits for it"
    path.write_text('{"t": 66}')
    for thread in hanging:
        thread.join()
    os.unlink(path)
    path.write_text('{"t": 66}')
    assert [reading.celsius for reading in await sensor.read(1002.0)] == [66.0]
