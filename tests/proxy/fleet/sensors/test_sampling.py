"""Sensors of a running proxy: what comes, what is said of those that fail, who is asked no more."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from proxy.config.options import Settings
from proxy.core.accounts.lease import Phase
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
        exporter.tells(plain(exposition().encode()))
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
        exporter.tells(plain(exposition().encode()))
        where = f"a={engine.address};gpus=0+5;dcgm={exporter.address}/metrics"
        async with ServedProxy(tmp_path / "log", [where], **FAST) as proxy:
            state = proxy.server.state
            warnings = state.instances.warnings
            await until(lambda: warnings.get("a"), "a warning")
            at = f"{exporter.address}/metrics"
            text = f"sensor dcgm {at}: it does not report GPU 127.0.0.1:5"
            assert list(warnings["a"].values()) == [text]
            asked = state.gpus.of("a")[0].at_s
            await until(lambda: state.gpus.of("a")[0].at_s > asked + 0.2, "more answers")
            lines = [r.getMessage() for r in caplog.records if "sensor" in r.getMessage()]
            assert lines == [f"instance a: {text}"]
            exporter.tells(plain(b"", "500 Oops"))
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


async def test_a_sensor_of_several_instances_is_asked_once(tmp_path: Path) -> None:
    async with RawEngine() as one, RawEngine() as two, RawEngine() as exporter:
        exporter.tells(plain(exposition().encode()))
        at = f"dcgm={exporter.address}/metrics"
        where = [f"a={one.address};gpus=0;{at}", f"b={two.address};gpus=1;{at}"]
        options = FAST | {"sensor_interval": 3600}
        async with ServedProxy(tmp_path / "log", where, **options) as proxy:
            gpus = proxy.server.state.gpus
            await until(lambda: gpus.of("a") and gpus.of("b"), "both")
            assert [r.gpu for n in "ab" for r in gpus.of(n)] == ["127.0.0.1:0", "127.0.0.1:1"]
            names = [task.get_name() for task in asyncio.all_tasks()]
            assert names.count("sensor dcgm") == 1
            third = {"instance": f"c=127.0.0.1:9;gpus=0-1;{at}"}
            assert (await call(proxy, "POST", "/instances", third))[0] == 201
            await until(lambda: len(gpus.of("c")) == 2, "the last answer is one for it as well")


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


async def test_an_entry_that_comes_again_may_have_another_sensor(tmp_path: Path) -> None:
    """An instance that drains is taken back; a reload names others for one that is there."""
    async with RawEngine() as engine:
        first, second, third = (f"a={engine.address};simulated={c}" for c in (61, 62, 63))
        now: list[Settings] = []
        options = FAST | {"source": lambda: now[0]}
        async with ServedProxy(tmp_path / "log", [first], **options) as proxy:
            readings = proxy.server.state.gpus

            def degrees() -> list[float | None]:
                return [reading.celsius for reading in readings.of("a")]

            await until(lambda: degrees() == [61.0], "of the first one")
            ledger = proxy.server.state.router.known.ledger
            lease = ledger.open(ledger.charge("a", Phase.DECODE, 1))  # so that it goes on draining
            assert (await call(proxy, "DELETE", "/instances/a?drain=true"))[0] == 202
            assert (await call(proxy, "POST", "/instances", {"instance": second}))[0] == 200
            await until(lambda: degrees() == [62.0], "of the second one")
            lease.close()
            now.append(Settings(**vars(proxy.settings) | {"instances": [third]}))
            assert await proxy.server.reloader.reload("test") == "applied"
            await until(lambda: degrees() == [63.0], "of the third one")


async def test_sensors_of_one_host_tell_a_part_each(tmp_path: Path) -> None:
    async with RawEngine() as engine, RawEngine() as bmc:
        bmc.tells(plain(b'{"TemperatureCelsius": {"Reading": 55.5}}'))
        at = f"http-json={bmc.address}/%d?token=s3cret#/TemperatureCelsius/Reading&gpu=%d"
        parts = ";".join(at % (index, index) for index in (0, 1))
        where = f"a={engine.address};gpus=0-1;{parts}"
        async with ServedProxy(tmp_path / "log", [where], **FAST) as proxy:
            state = proxy.server.state
            await until(lambda: len(state.gpus.of("a")) == 2, "both GPUs")
            assert not state.instances.warnings.get("a")
            bmc.tells(plain(b"", "401 Unauthorized"))
            await until(lambda: len(state.instances.warnings.get("a", {})) == 2, "two warnings")
            assert "s3cret" not in str(state.instances.warnings)


@pytest.mark.parametrize(
    "body",
    [
        b'DCGM_FI_DEV_GPU_TEMP{gpu="0"} NaN\n',
        b'DCGM_FI_DEV_GPU_TEMP{gpu="0"} 1e400\nDCGM_FI_DEV_CLOCKS_EVENT_REASONS{gpu="0"} -1e9\n',
        b'DCGM_FI_DEV_GPU_TEMP{gpu="9999"} 70\n' * 30_000,
        b"\xff\xfe" * 1000,
    ],
    ids=["NaN", "infinite", "2 MiB", "no text"],
)
async def test_an_odd_exporter_harms_nobody(tmp_path: Path, body: bytes) -> None:
    async with RawEngine() as engine, RawEngine() as exporter:
        exporter.tells(plain(body))
        where = f"a={engine.address};gpus=0;dcgm={exporter.address}/metrics"
        async with ServedProxy(tmp_path / "log", [where], **FAST) as proxy:
            state = proxy.server.state
            await until(lambda: state.instances.warnings.get("a") or state.gpus.of("a"), "asked")
            assert all(reading.celsius is None for reading in state.gpus.of("a"))
            exporter.tells(plain(exposition().encode()))
            await until(lambda: [r.celsius for r in state.gpus.of("a")] == [71.0], "in order")
