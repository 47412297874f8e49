"""Caps of engines that have vllm-thermal: a real socket, the plugin's own code behind it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.router import Router
from proxy.core.thermal.fleet_control import FleetControl
from proxy.core.thermal.readings import COOL, HeatLimits, InstanceWork
from proxy.core.types import Instance, RouterConfig
from proxy.fleet.thermal_plugin import CapSet, ThermalPlugins
from proxy.net.timeouts import Clock
from proxy.net.upstream.client import Upstream
from proxy.state import thermal_caps
from proxy.state.thermal_caps import TTL_S, EngineCaps
from tests.support.harness import spend, until
from tests.support.heat import Scripted
from tests.support.thermal_engine import ThermalEngines, serving

TOKEN = "0123456789abcdef"


@dataclass
class Kept:
    """One instance whose caps are kept."""

    router: Router
    policy: Scripted
    engines: ThermalEngines
    caps: EngineCaps | None = None
    token: str = TOKEN

    def auth(self) -> bytes:
        return f"Authorization: Bearer {self.token}\r\n".encode()

    def was_told(self, last: list[Any]) -> bool:
        return self.engines.bodies[-1:] == last

    def limit(self, cap: int | None) -> None:
        self.router.known.limit_heat("gpu-1", COOL if cap is None else HeatLimits(cap=cap))


@asynccontextmanager
async def kept(*, has_plugin: bool = True) -> AsyncIterator[Kept]:
    engines = ThermalEngines(TOKEN)
    async with serving(engines.handle) as url:
        router, policy = Router(FleetState(RouterConfig(prefill_throughput=20_000))), Scripted()
        instance = Instance("gpu-1", url, None, has_plugin)
        router.known.add(instance)
        one = Kept(router, policy, engines)
        control = FleetControl(lambda own: policy)
        control.tick("gpu-1", (), InstanceWork(), 0.0)
        upstream = Upstream(instance, 1.0)
        plugins = ThermalPlugins(lambda name: upstream, one.auth)
        one.caps = EngineCaps(plugins, router.known, control, Clock())
        task = asyncio.create_task(one.caps.run())
        try:
            yield one
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await upstream.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thermal_caps, "LOOK_S", 0.005)


async def test_an_engine_is_told_each_cap_once() -> None:
    async with kept() as one:
        for cap in (2, 5, None):
            one.limit(cap)
            told = [{"cap": cap, "ttl_s": None if cap is None else TTL_S}]
            await until(partial(one.was_told, told), "it is told")
        assert [body["cap"] for body in one.engines.bodies] == [2, 5, None]


async def test_a_cap_is_renewed_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thermal_caps, "RENEW_S", 0.0)
    async with kept() as one:
        one.limit(2)
        await until(lambda: len(one.engines.bodies) >= 3, "it is told again")
        assert {body["cap"] for body in one.engines.bodies} == {2}
        one.limit(None)
        await until(lambda: one.engines.bodies[-1]["cap"] is None, "it has its own again")
        told = len(one.engines.bodies)
        await asyncio.sleep(0.05)
        assert len(one.engines.bodies) == told, "nothing is to be renewed"


async def test_an_engine_that_refuses_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Control hears of both, and so does the log, once each."""
    monkeypatch.setattr(thermal_caps, "FIRST_PAUSE_S", 0.01)
    async with kept() as one:
        one.token = "another token"
        with caplog.at_level(logging.WARNING):
            one.limit(2)
            await until(lambda: one.policy.failures >= 3, "it has refused")
            one.token = TOKEN
            await until(lambda: one.policy.failures == 0, "it has taken it")
        assert [body["cap"] for body in one.engines.bodies] == [2]
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 2
        assert "--thermal-token" in said[0]
        assert said[1] == "instance gpu-1: its engine accepts caps again"


class Odd:
    """Answers of an engine that nobody expects."""

    def __init__(self) -> None:
        self.asked = 0

    async def set_cap(
        self, instance: str, cap: int | None, victim: str | None = None, ttl_s: float | None = None
    ) -> CapSet:
        self.asked += 1
        raise ValueError("odd")


async def test_an_answer_that_nobody_expects_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(thermal_caps, "FIRST_PAUSE_S", 0.01)
    router, policy, odd = (
        Router(FleetState(RouterConfig(prefill_throughput=20_000))),
        Scripted(),
        Odd(),
    )
    router.known.add(Instance("gpu-1", "http://127.0.0.1:1", None, True))
    control = FleetControl(lambda own: policy)
    control.tick("gpu-1", (), InstanceWork(), 0.0)
    router.known.limit_heat("gpu-1", HeatLimits(cap=2))
    task = asyncio.create_task(EngineCaps(odd, router.known, control, Clock()).run())
    await until(lambda: policy.failures >= 2 or task.done())
    assert not task.done()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert len([r for r in caplog.records if r.exc_info]) == 1


async def test_a_cap_that_is_not_wanted_any_more_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else control would wait for it for ever, and leave the heat alone."""
    monkeypatch.setattr(thermal_caps, "FIRST_PAUSE_S", 0.01)
    async with kept() as one:
        one.token = "another token"
        one.limit(2)
        await until(lambda: one.policy.failures >= 2, "it has refused")
        one.limit(None)
        await until(lambda: one.policy.failures == 0, "there is nothing left to be set")
        assert one.engines.bodies == []


async def test_a_process_that_was_replaced_tells_engines_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It counts its own last streams only, and its successor has the rest and the caps."""
    monkeypatch.setattr(thermal_caps, "RENEW_S", 0.0)
    async with kept() as one:
        one.limit(2)
        await until(lambda: one.engines.bodies, "it is told")
        assert one.caps is not None
        one.caps.leave()
        await spend(0.05)  # what was on its way
        told = len(one.engines.bodies)
        one.limit(1)
        await spend(0.05)  # ten looks
        assert len(one.engines.bodies) == told


async def test_an_engine_without_the_plugin_is_not_asked() -> None:
    async with kept(has_plugin=False) as one:
        one.limit(2)
        await asyncio.sleep(0.05)
        assert one.engines.bodies == []
