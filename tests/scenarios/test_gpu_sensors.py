"""GPUs of simulated engines, read by a real proxy: their heat, and exporters that fail.

The heat is the simulator's: not hardware validated.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from replayer.simulator.host import SimEngine, SimFleet
from tests.support.admin import call
from tests.support.harness import ServedProxy, chat, until

SIM: dict[str, Any] = {"speed": 50.0, "tick": 0.01, "thermal": True, "gpus": 2}
OPTIONS: dict[str, Any] = {"sensor_interval": 0.05, "health_interval": 60, "scrape_interval": 60}


def named(engine: SimEngine) -> str:
    return f"a={engine.url};gpus=0-1;dcgm={engine.url}/dcgm/metrics"


async def test_work_is_seen_as_heat(tmp_path: Path) -> None:
    async with SimFleet(1, **SIM) as fleet:
        where = [named(fleet.engines[0])]
        async with ServedProxy(tmp_path / "log", where, **OPTIONS) as proxy:
            await proxy.up()
            gpus = proxy.server.state.gpus
            await until(lambda: len(gpus.of("a")) == 2, "both GPUs")
            cold = gpus.of("a")[0]
            assert cold.celsius == round(32 + 120 * 0.08)
            assert cold.watts == pytest.approx(120, rel=0.01)
            # Longer than a busy machine takes to look.
            bodies = [chat(f"x{at}", max_tokens=30_000) for at in range(24)]
            streams = [asyncio.create_task(proxy.post(body)) for body in bodies]
            await until(lambda: (gpus.of("a")[0].celsius or 0) > 43, "it grows warm")
            warm = gpus.of("a")[0]
            assert (warm.watts or 0) > 135
            assert (warm.utilization_ratio or 0) > 0.5
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            labels = {"upstream": "a", "gpu": "127.0.0.1:1"}
            assert proxy.metric("gpu_memory_used_bytes", **labels) > 16 << 30
            _, (shown,) = await call(proxy, "GET", "/instances")
            assert [gpu["gpu"] for gpu in shown["gpus"]] == ["127.0.0.1:0", "127.0.0.1:1"]


@pytest.mark.parametrize("fault", ["frozen", "dropout", "gone", "hang"])
async def test_an_exporter_that_fails_is_seen_by_its_age(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.fleet.sensors.base.ANSWER_S", 0.2)
    async with SimFleet(1, **SIM) as fleet:
        engine = fleet.engines[0]
        async with ServedProxy(tmp_path / "log", [named(engine)], **OPTIONS) as proxy:
            await proxy.up()
            state = proxy.server.state
            await until(lambda: len(state.gpus.of("a")) == 2, "both GPUs")

            def age_s() -> float:
                return proxy.metric("thermal_sensor_age_seconds", upstream="a")

            # A sensor that repeats itself is only found out while the instance works.
            running = asyncio.create_task(proxy.post(chat("x", stream=False, max_tokens=60_000)))
            await until(lambda: state.in_flight.count == 1, "it works")
            engine.faults.change(sensor=fault)
            await until(lambda: age_s() > 0.5, "the age grows")
            told = state.instances.warnings.get("a", {})
            assert bool(told) is (fault != "frozen"), "a frozen sensor answers"
            engine.faults.change(sensor="ok")
            await until(lambda: age_s() < 0.3, "it is in order again")
            await until(lambda: not state.instances.warnings.get("a"), "no warning is left")
            running.cancel()


async def test_an_exporter_that_vanished_is_said_and_its_last_word_is_kept(tmp_path: Path) -> None:
    async with SimFleet(1, **SIM) as fleet:
        engine = fleet.engines[0]
        async with ServedProxy(tmp_path / "log", [named(engine)], **OPTIONS) as proxy:
            await proxy.up()
            state = proxy.server.state
            await until(lambda: len(state.gpus.of("a")) == 2, "both GPUs")
            await engine.kill()
            await until(lambda: state.instances.warnings.get("a"), "a warning")
            told = list(state.instances.warnings["a"].values())
            assert told[0].startswith(f"sensor dcgm {engine.url}/dcgm/metrics: ")
            assert proxy.metric("gpu_temperature_celsius", upstream="a", gpu="127.0.0.1:0") > 30
