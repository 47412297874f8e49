"""Faults of GPUs and their sensors, under thermal control. The heat is the simulator's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.client import Got
from tests.chaos.rig import SLOW_PROBES, Floor, Rig
from tests.support.harness import until

SIM: dict[str, Any] = {"speed": 50.0, "tick": 0.0, "thermal": True}
LIMITS = """
target_celsius = 60
critical_celsius = 75
max_running = 32
safe_cap = 8
law = 'p'
k_p = 4.0
ewma_s = 0.0
lead_s = 0.0
stale_s = 0.5
safe_after_s = 0.0
hold_s = 0.1
dwell_s = 0.1
cooldown_s = 0.1
"""
"""Times as short as those of the simulated heat, which comes fifty times as fast."""
TOKENS = 6000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty control ticks a second, and sensors that are given up as soon."""
    monkeypatch.setattr("proxy.state.thermal.TICK_S", 0.05)
    monkeypatch.setattr("proxy.fleet.sensors.base.ANSWER_S", 0.2)


def thermal(folder: Path, **more: Any) -> dict[str, Any]:
    """The proxy's options."""
    (folder / "thermal.toml").write_text(LIMITS)
    given = {"thermal": folder / "thermal.toml", "sensor_interval": 0.05}
    return given | SLOW_PROBES | more


def state_of(r: Rig, name: str) -> str:
    return str(r.state.thermal.control.state(name))


def garble(data: bytes) -> bytes:
    """An exporter's answer, as long as it was, of metrics that nobody knows."""
    return data.replace(b"DCGM_", b"GARB_")


@pytest.mark.parametrize("how", ["hang", "gone", "frozen", "dropout", "nonsense"])
async def test_f126_a_sensor_that_fails(rig: Floor, tmp_path: Path, how: str) -> None:
    async with rig(sims=1, sim=SIM, **thermal(tmp_path)) as r:
        await until(lambda: r.state.gpus.of("i0"), "it is read")
        running = asyncio.create_task(r.ask(max_tokens=TOKENS))
        await until(lambda: r.router.known.ledger.load("i0").decode_requests, "it works")
        if how == "nonsense":
            r.links[0].down.change = garble
        else:
            r.engines[0].faults.change(sensor=how)
        await until(lambda: state_of(r, "i0") == "STALE", "it is not believed any more")
        await until(lambda: r.router.known.heat.of("i0").cap == 8, "it is at its safe cap")
        assert (await r.ask()).status == 200
        if how == "nonsense":
            r.links[0].down.change = None
        else:
            r.engines[0].faults.change(sensor="ok")
        await until(lambda: state_of(r, "i0") == "NORMAL", "readings come again")
        assert (await running).is_clean


async def heated(r: Rig, count: int) -> tuple[int, list[asyncio.Task[Got]]]:
    """Streams, and the number of an instance of theirs, whose cooling has failed by now."""
    streams = [asyncio.create_task(r.ask(max_tokens=TOKENS, temperature=0)) for _ in range(count)]

    def busy() -> list[int]:
        loads = [r.router.known.ledger.load(f"i{at}").decode_requests for at in range(2)]
        return [at for at, load in enumerate(loads) if load >= count / 2]

    await until(busy, "many run on one of them")
    (hot, *_) = busy()
    r.engines[hot].faults.change(heat_celsius=60)
    return hot, streams


def evicted(r: Rig, outcome: str) -> float:
    return float(r.proxy.metric("thermal_evictions_total", policy="control", outcome=outcome))


async def test_f127_critical_in_mid_stream(rig: Floor, tmp_path: Path) -> None:
    async with rig(sims=2, sim=SIM, **thermal(tmp_path, migration_limit=3)) as r:
        alone = await r.ask(max_tokens=TOKENS, temperature=0)
        _, streams = await heated(r, 10)
        answers = await asyncio.gather(*streams)
        assert all(got.is_clean and got.is_done and not got.errors for got in answers)
        assert {got.text for got in answers} == {alone.text}
        assert evicted(r, "moved") >= 1
        assert evicted(r, "aborted") == 0


async def test_f128_the_hot_engine_dies(rig: Floor, tmp_path: Path) -> None:
    async with rig(sims=2, sim=SIM, **thermal(tmp_path, migration_limit=3)) as r:
        alone = await r.ask(max_tokens=TOKENS, temperature=0)
        hot, streams = await heated(r, 10)
        await until(lambda: evicted(r, "moved"), "the first one is asked to leave")
        await r.kill(hot)
        answers = await asyncio.gather(*streams)
        assert all(got.is_clean and got.is_done and not got.errors for got in answers)
        assert {got.text for got in answers} == {alone.text}


async def test_f129_critical_everywhere(rig: Floor, tmp_path: Path) -> None:
    async with rig(sims=2, sim=SIM, **thermal(tmp_path, migration_limit=1)) as r:
        _, streams = await heated(r, 8)
        for engine in r.engines:
            engine.faults.change(heat_celsius=60)
        await until(
            lambda: all(state_of(r, f"i{at}") == "EMERGENCY" for at in range(2)), "all are hot"
        )
        late = [asyncio.create_task(r.ask(max_tokens=20)) for _ in range(20)]
        answers = await asyncio.gather(*streams)
        assert all(got.is_clean and got.is_done and not got.errors for got in answers)
        for engine in r.engines:
            engine.faults.change(heat_celsius=0)
        for got in await asyncio.gather(*late):
            assert got.status in (200, 503)
            assert got.status == 200 or "retry-after" in got.headers
