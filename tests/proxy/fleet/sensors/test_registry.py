"""Every kind of sensor can be named, is made, and says in one line what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.config.sensors import FORMS, SensorAt, Swing
from proxy.config.values import InstanceSpec
from proxy.core.thermal.readings import GpuReading
from proxy.fleet.sensors import nvml, registry
from proxy.fleet.sensors.base import SensorError
from proxy.fleet.sensors.registry import SENSORS
from proxy.fleet.sensors.simulated import celsius
from proxy.net.upstream.pool import ConnectOptions
from tests.support.harness import RawEngine, plain

WHERE = {"file": "/no/such/file"}


def test_each_kind_has_a_form_and_a_sensor() -> None:
    assert SENSORS.keys() == FORMS.keys()


@pytest.mark.parametrize("kind", sorted(SENSORS.keys() - {"simulated"}))
async def test_a_sensor_that_cannot_be_read_says_so_in_one_line(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    async with RawEngine() as engine:
        engine.tells(plain(b"<html>"))
        over_network = kind in {"dcgm", "http-json"}
        where = f"{engine.address}/x" if over_network else WHERE.get(kind, "local")
        sensor = SENSORS[kind](SensorAt.parse(kind, where, "h"), ConnectOptions(), 1.0)
        with pytest.raises(SensorError, match=r"\A.+\Z"):
            await sensor.read(5.0)
        await sensor.close()


async def test_a_status_and_a_closed_port_are_named() -> None:
    async with RawEngine() as engine:
        engine.tells(plain(b"", "503 Service Unavailable"))
        at = SensorAt.parse("dcgm", f"{engine.address}/metrics", "h")
        sensor = SENSORS["dcgm"](at, ConnectOptions(), 1.0)
        with pytest.raises(SensorError, match="GET /metrics answers 503"):
            await sensor.read(0.0)
        await sensor.close()
    sensor = SENSORS["dcgm"](at, ConnectOptions(), 1.0)
    with pytest.raises(SensorError, match="refused"):
        await sensor.read(0.0)
    await sensor.close()


async def test_simulated_degrees_follow_the_clock() -> None:
    swing = Swing(60.0, 90.0, 20)
    assert [celsius(swing, at_s) for at_s in (0, 5, 10, 15, 20)] == [60, 75, 90, 75, 60]
    steady = SENSORS["simulated"](SensorAt.parse("simulated", "75", "h"), ConnectOptions(), 1.0)
    assert await steady.read(7.0) == [GpuReading("h:0", 7.0, 75.0)]


def test_a_missing_package_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "is_installed", lambda: False)
    assert registry.missing([InstanceSpec.parse("a=h:1;dcgm=9400")]) is None
    told = registry.missing([InstanceSpec.parse("h:1"), InstanceSpec.parse("a=h:2;nvml=local")])
    assert told is not None
    assert told.startswith("instances: a: ;nvml=: the package nvidia-ml-py is not installed")
