"""Sensors of a running proxy: what comes, what is said of those that fail, who is asked no more."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.proxy.fleet.sensors.test_dcgm import exposition
from tests.support.admin import call
from tests.support.harness import RawEngine, ServedProxy, plain, until

FAST = {"sensor_interval": 0.05, "health_interval": 60}


async def shown(proxy: ServedProxy) -> list[dict[str, object]]:
    status, answer = await call(proxy, "GET", "/instances")
    assert status == 200
    return list(answer[0]["gpus"])


async def test_readings_come_and_are_shown(tmp_path: Path) -> None:
    async with RawEngine() as engine, RawEngine() as exporter:
        exporter.other = plain(exposition().encode())
        where = f"a={engine.address};gpus=0;dcgm={exporter.address}/metrics"
        async with ServedProxy(tmp_path / "log", [where], **FAST) as proxy:
            readings = proxy.server.state.gpus
            await until(lambda: readings.of("a"), "a reading")
            (gpu,) = await shown(proxy)
            assert gpu["gpu"] == "127.0.0.1:0"
            assert gpu["celsius"] == 71.0
            assert proxy.metric("gpu_power_watts", upstream="a", gpu="127.0.0.1:0") == 512.347
            used = proxy.metric("gpu_memory_used_bytes", upstream="a", gpu="127.0.0.1:0")
            assert used == 73210 << 20


async def test_a_failing_sensor_is_said_once_and_grows_old(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with RawEngine() as engine, RawEngine() as exporter:
        exporter.other = plain(exposition().encode())
        where = f"a={engine.address};gpus=0+5;dcgm={exporter.address}/metrics"
        async with ServedProxy(tmp_path / "log", [where], **FAST) as proxy:
            state = proxy.server.state
            warnings = state.instances.warnings
            await until(lambda: warnings.get("a"), "a warning")
            text = "sensor dcgm of 127.0.0.1: it does not tell of GPU 127.0.0.1:5"
            assert list(warnings["a"].values()) == [text]
            asked = state.gpus.of("a")[0].at_s
            await until(lambda: state.gpus.of("a")[0].at_s > asked + 0.2, "more answers")
            lines = [r.getMessage() for r in caplog.records if "sensor" in r.getMessage()]
            assert lines == [f"instance a: {text}"]
            exporter.other = plain(b"", "500 Oops")
            last_s = state.gpus.of("a")[0].at_s
            now_s = state.clock.now_s
            await until(lambda: (state.gpus.age_s("a", now_s()) or 0) > 0.3, "it grows old")
            assert state.gpus.of("a")[0].at_s <= last_s + 0.3


async def test_who_leaves_or_loses_its_sensor_is_asked_no_more(tmp_path: Path) -> None:
    async with RawEngine() as engine:
        where = f"a={engine.address};simulated=75"
        async with ServedProxy(tmp_path / "log", [where], **FAST) as proxy:
            readings = proxy.server.state.gpus
            await until(lambda: readings.of("a"), "a reading")
            other = "b=127.0.0.1:9;simulated=60"
            assert (await call(proxy, "POST", "/instances", {"instance": other}))[0] == 201
            await until(lambda: readings.of("b"), "a reading of the one that came")
            assert (await call(proxy, "DELETE", "/instances/b"))[0] == 200
            await until(lambda: readings.instances() == ["a"], "it left")
            assert readings.of("b") == ()


async def test_control_may_need_them_more_often(tmp_path: Path) -> None:
    async with RawEngine() as engine:
        where = f"a={engine.address};simulated=60-90/1"
        options = FAST | {"sensor_interval": 3600}
        async with ServedProxy(tmp_path / "log", [where], **options) as proxy:
            readings = proxy.server.state.gpus
            readings.needed_every_s = 0.05
            await until(lambda: readings.of("a"), "a reading")
            first_s = readings.of("a")[0].at_s
            await until(lambda: readings.of("a")[0].at_s > first_s, "another one")
