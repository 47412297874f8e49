"""Hot GPUs of simulated engines, held by a real proxy: `--thermal` from its file to its streams.

The heat is the simulator's: not hardware validated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from replayer.simulator.host import SimFleet
from tests.support.admin import call
from tests.support.harness import ServedProxy, chat, until

SIM: dict[str, Any] = {"speed": 50.0, "tick": 0.01, "thermal": True}
QUICK = """
target_celsius = 60
critical_celsius = 75
max_running = 32
safe_cap = 8
law = 'p'
k_p = 4.0
ewma_s = 0.0
lead_s = 0.0
hold_s = 0.1
dwell_s = 0.1
cooldown_s = 0.1
"""
"""Times as short as the simulator's, whose heat comes fifty times as fast as in its own seconds."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty control ticks a second, for the same reason."""
    monkeypatch.setattr("proxy.state.thermal.TICK_S", 0.05)


@asynccontextmanager
async def held(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[ServedProxy, SimFleet]]:
    """A proxy that holds the temperature of two engines, `a` and `b`."""
    (tmp_path / "thermal.toml").write_text(QUICK)
    more: dict[str, Any] = {
        "thermal": tmp_path / "thermal.toml",
        "sensor_interval": 0.05,
        "health_interval": 60,
    }
    async with SimFleet(2, **SIM) as fleet:
        where = [
            f"{name}={engine.url};gpus=0;dcgm={engine.url}/dcgm/metrics"
            for name, engine in zip("ab", fleet.engines, strict=True)
        ]
        async with ServedProxy(tmp_path / "log", where, **(more | options)) as proxy:
            await proxy.up()
            gpus = proxy.server.state.gpus
            await until(lambda: gpus.of("a") and gpus.of("b"), "both are read")
            yield proxy, fleet


async def heated(proxy: ServedProxy, fleet: SimFleet) -> str:
    """Let the cooling of the instance with most of twelve streams fail; returns its name."""
    ledger, at = proxy.router.known.ledger, {"a": 0, "b": 1}

    def busy() -> list[str]:
        return [name for name in at if ledger.load(name).decode_requests > 5]

    await until(busy, "many run on one of them")
    (hot, *_) = busy()
    fleet.engines[at[hot]].faults.change(heat_celsius=60)
    return hot


async def stream(proxy: ServedProxy, at: int) -> bytes:
    """What the client of a long stream got, to its end or to its cut."""
    body = b""
    with suppress(aiohttp.ClientPayloadError):
        asked = chat(f"x{at}", max_tokens=60_000)
        async with proxy.http.post("/v1/chat/completions", json=asked) as answer:
            async for piece in answer.content.iter_any():
                body += piece
    return body


async def test_a_hot_instance_gets_less_until_it_is_cool_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with held(tmp_path) as (proxy, fleet):
        heat, control = proxy.router.known.heat, proxy.server.state.thermal.control
        streams = [asyncio.create_task(stream(proxy, at)) for at in range(8)]
        await until(lambda: proxy.router.known.ledger.live == 8, "all run")
        fleet.engines[0].faults.change(heat_celsius=28)  # the air warms up
        await until(lambda: control.state("a") == "THROTTLE", "it is too hot")
        await until(lambda: heat.of("a").cap is not None, "it is capped")
        assert not heat.of("a").helps
        assert heat.of("a").prefill_factor > 1.0
        assert heat.of("b").cap is None
        assert proxy.metric("thermal_state", upstream="a", state="THROTTLE") == 1
        assert proxy.metric("thermal_actions_total", action="cap_lowered", reason="throttle") >= 1
        assert proxy.metric("thermal_headroom_celsius", upstream="a") <= 3.0
        _, shown = await call(proxy, "GET", "/instances")
        assert [one["heat"]["state"] for one in shown] == ["THROTTLE", "NORMAL"]
        assert proxy.metric("thermal_evictions_total", policy="control", outcome="aborted") == 0
        for one in streams:
            one.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        fleet.engines[0].faults.change(heat_celsius=0)
        await until(lambda: heat.is_cool, "it is cool again")
        assert control.state("a") == "NORMAL"
        said = [r.getMessage() for r in caplog.records if ": heat " in r.getMessage()]
        assert any("instance a: heat THROTTLE, was NORMAL" in line for line in said)
        assert not any("instance b" in line for line in said)
        await proxy.at_rest()


async def test_in_an_emergency_streams_may_be_ended_in_words(tmp_path: Path) -> None:
    async with held(tmp_path, thermal_may_abort=True) as (proxy, fleet):
        control = proxy.server.state.thermal.control
        streams = [asyncio.create_task(stream(proxy, at)) for at in range(12)]
        hot = await heated(proxy, fleet)
        await until(lambda: control.state(hot) == "EMERGENCY", "it is critical")

        def ended() -> float:
            return proxy.metric("thermal_evictions_total", policy="control", outcome="aborted")

        await until(lambda: ended() >= 1, "somebody has to go")
        done, _ = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        (first, *_) = done
        assert b'"code":"too_hot"' in await first
        for one in streams:
            one.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await proxy.at_rest()


async def test_without_leave_nobody_is_ended(tmp_path: Path) -> None:
    async with held(tmp_path) as (proxy, fleet):
        control = proxy.server.state.thermal.control
        streams = [asyncio.create_task(stream(proxy, at)) for at in range(12)]
        hot = await heated(proxy, fleet)

        def waited_for() -> float:
            return proxy.metric("thermal_evictions_total", policy="control", outcome="skipped")

        await until(lambda: waited_for() >= 1, "somebody should go")
        assert control.state(hot) == "EMERGENCY"
        assert not any(one.done() for one in streams)
        assert proxy.router.known.heat.of(hot).cap is not None
        for one in streams:
            one.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def test_streams_that_may_move_go_on_where_it_is_cool(tmp_path: Path) -> None:
    """In an emergency: nobody is ended, and every client gets the whole of its stream."""
    async with held(tmp_path, migration_limit=3) as (proxy, fleet):
        alone = (await proxy.post(chat("x", max_tokens=6000, temperature=0))).text
        asked = [chat("x", max_tokens=6000, temperature=0) for _ in range(12)]
        streams = [asyncio.create_task(proxy.post(one)) for one in asked]
        await heated(proxy, fleet)
        answers = await asyncio.gather(*streams)
        assert {answer.text for answer in answers} == {alone}
        moved = proxy.metric("migrations_total", reason="heat", outcome="moved")
        assert moved == proxy.metric("migration_seconds_count", evicted="true") >= 1
        assert proxy.metric("thermal_evictions_total", policy="control", outcome="moved") >= 1
        assert proxy.metric("thermal_evictions_total", policy="control", outcome="aborted") == 0
        await proxy.at_rest()
