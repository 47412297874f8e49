"""The cap inside an engine, set by the proxy: a real socket, the plugin's own code behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from proxy.core.types import FailureKind, Instance
from proxy.fleet import thermal_plugin
from proxy.fleet.thermal_plugin import CapSet, ThermalPlugins
from proxy.net.upstream.client import Upstream
from proxy.protocol.errors import UpstreamFailure
from tests.support.harness import ServedProxy
from tests.support.thermal_engine import ThermalEngines, serving

TOKEN = "0123456789abcdef"
AUTH = f"Authorization: Bearer {TOKEN}\r\n".encode()


@asynccontextmanager
async def plugins_at(url: str, auth: bytes = AUTH) -> AsyncIterator[ThermalPlugins]:
    upstream = Upstream(Instance("gpu-1", url), 1.0)

    def named(name: str) -> Upstream:
        if name != "gpu-1":
            raise UpstreamFailure(FailureKind.CONNECT, "the instance was removed")
        return upstream

    try:
        yield ThermalPlugins(named, lambda: auth)
    finally:
        await upstream.close()


async def test_a_cap_is_set_and_taken_back():
    engines = ThermalEngines(TOKEN)
    async with serving(engines.handle) as url, plugins_at(url) as plugins:
        assert await plugins.set_cap("gpu-1", 2) == CapSet(limit=2, running=8)
        assert await plugins.set_cap("gpu-1", 99) == CapSet(limit=16, running=8)
        assert await plugins.set_cap("gpu-1", 0, "largest_kv", 60.0) == CapSet(limit=1, running=8)
        assert await plugins.set_cap("gpu-1", None) == CapSet(limit=16, running=8)
    assert engines.bodies == [
        {"cap": 2, "ttl_s": None},
        {"cap": 99, "ttl_s": None},
        {"cap": 1, "ttl_s": 60.0, "victim": "largest_kv"},
        {"cap": None, "ttl_s": None},
    ]
    assert engines.controls[0].wish.victim == "largest_kv"


async def test_a_cap_is_shared_among_data_parallel_engines():
    engines = ThermalEngines(TOKEN, ranks=3, running=4)
    async with serving(engines.handle) as url, plugins_at(url) as plugins:
        assert await plugins.set_cap("gpu-1", 10) == CapSet(limit=9, running=12)
        assert await plugins.set_cap("gpu-1", 2) == CapSet(limit=3, running=12)
        assert await plugins.set_cap("gpu-1", None) == CapSet(limit=48, running=12)


async def test_the_proxy_has_it_with_the_token_of_its_options(tmp_path: Path):
    engines = ThermalEngines(TOKEN)
    async with serving(engines.handle) as url:
        instances = [f"gpu-1={url};thermal=plugin"]
        plan = tmp_path / "thermal.toml"
        plan.write_text("target_celsius = 80\n")
        options = {"thermal": plan, "thermal_token": TOKEN}
        async with ServedProxy(tmp_path / "log", instances, **options) as proxy:
            state = proxy.server.state
            assert await state.thermal_plugins.set_cap("gpu-1", 2) == CapSet(limit=2, running=8)
            (member,) = proxy.router.known.fleet.members()
            assert member.instance.has_thermal_plugin


async def test_a_wrong_token_is_named():
    engines = ThermalEngines(TOKEN)
    async with serving(engines.handle) as url, plugins_at(url, b"") as plugins:
        found = await plugins.set_cap("gpu-1", 2)
    assert found == CapSet(
        error="gpu-1: GET /plugins/thermal answers 401: "
        "is --thermal-token the engine's VLLM_THERMAL_TOKEN?"
    )
    assert engines.bodies == []


async def test_what_the_engine_refuses_is_told():
    engines = ThermalEngines(TOKEN)
    async with serving(engines.handle) as url, plugins_at(url) as plugins:
        found = await plugins.set_cap("gpu-1", 2, victim="oldest")
    assert found.error is not None
    assert found.error.startswith(
        "gpu-1: PUT /plugins/thermal answers 400: victim is 'oldest': it must be one of newest, "
    )
    assert engines.controls[0].cap() == 16


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (404, b'{"detail":"Not Found"}', "answers 404: does its VLLM_PLUGINS name thermal?"),
        (501, b"{}", "answers 501: was it started with the scheduler class of vllm-thermal?"),
        (503, b"\x1b[31mred\n", "answers 503: \\u001b[31mred\\u000a"),
        (500, b"", "answers 500: without a word"),
        (200, b"[]", "answers 200, but not as vllm-thermal does"),
        (200, b'{"limit":2,"running":1}', "answers 200, but not as vllm-thermal does"),
        (200, b'[{"limit":2,"running":true}]', "answers 200, but not as vllm-thermal does"),
        (200, b"<html>", "answers 200, but not as vllm-thermal does"),
        (200, b"\xff", "answers 200, but not as vllm-thermal does"),
    ],
)
async def test_an_answer_that_is_not_the_plugins(status, body, error):
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    async with serving(answer) as url, plugins_at(url) as plugins:
        found = await plugins.set_cap("gpu-1", None)
    assert found == CapSet(error=f"gpu-1: PUT /plugins/thermal {error}")


async def test_an_engine_that_does_not_answer_is_waited_for_until_the_limit(monkeypatch):
    asked = asyncio.Event()

    async def stuck(request: web.Request) -> web.Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(thermal_plugin, "PLUGIN_S", 0.05)
    async with serving(stuck) as url, plugins_at(url) as plugins:
        found = await plugins.set_cap("gpu-1", 2)
    assert asked.is_set()
    assert found == CapSet(error="gpu-1: no answer of /plugins/thermal in 0.05 s")


async def test_an_instance_that_is_not_there():
    async with serving(ThermalEngines(TOKEN).handle) as url:
        pass
    async with plugins_at(url) as plugins:
        found = await plugins.set_cap("gpu-1", 2)
        assert found.error is not None
        assert found.error.startswith("gpu-1: /plugins/thermal: connect: ")
        gone = await plugins.set_cap("gpu-9", 2)
    assert gone == CapSet(error="gpu-9: /plugins/thermal: connect: the instance was removed")
