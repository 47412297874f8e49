"""The end of a drain, as one who waits for it sees it: left, drained, gone."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.measuring.processes import Child
from proxy.fleet import membership
from tests.support.admin import call
from tests.support.harness import (
    DONE,
    STREAM_HEAD,
    RawEngine,
    ServedProxy,
    chat,
    chunk,
    event,
    proxied,
    until,
)
from tests.test_docs import marked

STREAMS = 50


class Held:
    """An engine whose streams say one word, and end when they are let go."""

    def __init__(self) -> None:
        self.ended = 0
        self._leave = asyncio.Semaphore(0)
        self.engine = RawEngine(self._script)

    async def _script(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event("word")))
        await self._leave.acquire()
        self.ended += 1
        writer.write(DONE)

    def let_go(self, count: int) -> None:
        for _ in range(count):
            self._leave.release()


async def told(proxy: ServedProxy, query: str = "") -> tuple[int, dict[str, Any]]:
    return await call(proxy, "GET", f"/instances/a{query}")


async def asked_anew(proxy: ServedProxy) -> Any:
    """Wait for the end on a connection of one's own."""
    async with aiohttp.ClientSession(proxy.server.url) as http:
        async with http.get("/instances/a?wait=300") as response:
            return await response.json()


async def streaming(proxy: ServedProxy, count: int) -> list[asyncio.Task[Any]]:
    running = [asyncio.create_task(proxy.post(chat(f"s{i}"))) for i in range(count)]
    load = proxy.router.known.ledger.load
    await until(lambda: load("a").decode_requests == count, "all have begun")
    return running


async def test_the_last_end_of_fifty_streams_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    async with (
        held.engine,
        ServedProxy(tmp_path / "log", [f"a={held.engine.address}"]) as proxy,
    ):
        await proxy.up()
        assert await told(proxy) == (200, (await told(proxy))[1] | {"status": "serving"})
        running = await streaming(proxy, STREAMS)
        assert (await call(proxy, "DELETE", "/instances/a?drain=true"))[0] == 202
        _, seen = await told(proxy)
        left = seen["left"]
        assert (seen["status"], seen["is_draining"], seen["wait_ended"]) == ("draining", True, None)
        assert (left["requests"], left["fixed_streams"]) == (STREAMS, STREAMS)
        assert (left["pinned_kv_tokens"], left["unreleased_kv_tokens"]) == (0, 0)
        assert left["connections"] >= STREAMS
        order: list[str] = []

        async def wait() -> None:
            status, answer = await told(proxy, "?wait=300")
            order.append(f"{status} {answer['status']} after {held.ended}")

        waiting = [asyncio.create_task(wait()) for _ in range(3)]
        held.let_go(STREAMS - 1)
        await until(lambda: held.ended == STREAMS - 1, "all but one ended")
        await until(lambda: proxy.router.known.ledger.live == 1, "and no lease for those who wait")
        assert (await told(proxy, "?wait=0"))[1]["left"]["requests"] == 1
        assert proxy.server.state.in_flight.count == 1
        assert not order
        held.let_go(1)
        await asyncio.gather(*waiting)
        assert order == [f"200 drained after {STREAMS}"] * 3
        assert all(answer.status == 200 for answer in await asyncio.gather(*running))
        assert (await told(proxy))[1].keys() == {"name", "status", "age_s"}
        assert (await call(proxy, "DELETE", "/instances/a?drain=true"))[0] == 404
        monkeypatch.setattr(membership, "DRAINED_S", 0.0)
        assert (await told(proxy, "?wait=300"))[0] == 404


async def test_streams_that_go_on_elsewhere_are_not_waited_for(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2, sim={"speed": 2.0}, migration_limit=1) as (proxy, _):
        name = proxy.router.known.fleet.members()[0].instance.name
        bodies = [chat(f"s{i}", max_tokens=240) for i in range(STREAMS)]
        running = [asyncio.create_task(proxy.post(body)) for body in bodies]
        load, flying = proxy.router.known.ledger.load, proxy.server.state.in_flight
        moving = lambda: [s for s in flying.movable if s.instance == name]  # noqa: E731
        await until(lambda: len(moving()) > STREAMS // 4, "its share streams")
        path = f"/instances/{name}"
        assert (await call(proxy, "DELETE", f"{path}?drain=true&mode=migrate"))[0] == 202
        status, answer = await call(proxy, "GET", f"{path}?wait=300")
        assert (status, answer["status"]) == (200, "drained")
        with pytest.raises(KeyError):
            load(name)
        for one in await asyncio.gather(*running):
            assert one.body.endswith(b"data: [DONE]\n\n")
            assert b'"error"' not in one.body
        rows = [row for r in await proxy.records(STREAMS) for row in r["migrations"] or ()]
        assert {(row["cause"], row["from_instance"]) for row in rows} == {("drain", name)}
        assert "moved" in {row["ended"] for row in rows}
        await proxy.at_rest()


async def test_what_ends_a_wait(tmp_path: Path) -> None:
    """Its time, the client, an operator who takes the instance back, and the proxy's own end."""
    held = Held()
    async with held.engine:
        a = f"a={held.engine.address}"
        async with ServedProxy(tmp_path / "log", [a]) as proxy:
            await proxy.up()
            running = await streaming(proxy, 1)
            assert (await told(proxy, "?wait=300"))[1]["status"] == "serving"
            await call(proxy, "DELETE", "/instances/a?drain=true")
            answer = (await told(proxy, "?wait=1"))[1]
            assert (answer["status"], answer["wait_ended"]) == ("draining", "timeout")
            known = len(proxy.listener.connections)
            gone = asyncio.create_task(asked_anew(proxy))
            await until(lambda: len(proxy.listener.connections) == known + 1, "it waits")
            gone.cancel()
            await until(lambda: len(proxy.listener.connections) == known, "it has left")
            waiting = asyncio.create_task(told(proxy, "?wait=300"))
            assert (await call(proxy, "POST", "/instances", {"instance": a}))[0] == 200
            assert (await waiting)[1]["status"] == "serving"
            await call(proxy, "DELETE", "/instances/a?drain=true")
            stopped = asyncio.create_task(asked_anew(proxy))
            await until(lambda: len(proxy.listener.connections) > known, "it waits")
            ending = asyncio.create_task(proxy.server.drain())
            answer = await stopped
            assert (answer["status"], answer["wait_ended"]) == ("draining", "shutdown")
            held.let_go(1)
            await asyncio.gather(ending, *running)


@pytest.mark.parametrize("wait", ["", "-1", "1.5", "x", "301", "9" * 5000])
async def test_a_wait_is_bounded(tmp_path: Path, wait: str) -> None:
    async with ServedProxy(tmp_path / "log", ["a=127.0.0.1:9"]) as proxy:
        status, answer = await told(proxy, f"?wait={wait}")
        assert status == 400
        assert "0 to 300" in answer["error"]["message"]
        assert (await call(proxy, "GET", "/instances/b?wait=300"))[0] == 404


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_the_pre_stop_hook_of_the_documentation(tmp_path: Path) -> None:
    """It ends after the last stream, and at once where nothing is known of the instance."""
    held, script = Held(), marked("docs/reference/admin-api.md", "pre-stop")
    async with held.engine, ServedProxy(tmp_path / "log", [f"a={held.engine.address}"]) as proxy:
        await proxy.up()

        async def hook(name: str) -> tuple[int, int]:
            env = {"PATH": os.environ["PATH"], "PROXY": proxy.server.url, "NAME": name}
            with Child(["sh", "-euc", script], env=env) as run:
                return await run.ended(), held.ended

        running = await streaming(proxy, 2)
        stopping = asyncio.create_task(hook("a"))
        await until(lambda: proxy.router.known.fleet.get("a").is_draining, "it drains")
        assert await hook("unknown") == (0, 0)
        held.let_go(2)
        assert await stopping == (0, 2)
        await asyncio.gather(*running)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_the_pre_stop_hook_of_an_engine_that_was_discovered(tmp_path: Path) -> None:
    """It waits while the proxy names the pod, whoever drains it; and not for one not named."""
    held, script = Held(), marked("docs/deploy/kubernetes.md", "pre-stop")
    async with held.engine, ServedProxy(tmp_path / "log", [f"a={held.engine.address}"]) as proxy:
        await proxy.up()

        async def hook(name: str) -> tuple[int, int]:
            env = {"PATH": os.environ["PATH"], "PROXY": proxy.server.url, "HOSTNAME": name}
            with Child(["sh", "-euc", script], env=env) as run:
                return await run.ended(), held.ended

        running = await streaming(proxy, 2)
        stopping = asyncio.create_task(hook("a"))
        assert await hook("unknown") == (0, 0)
        assert (await call(proxy, "DELETE", "/instances/a?drain=true"))[0] == 202
        assert not stopping.done()
        held.let_go(2)
        assert await stopping == (0, 2)
        await asyncio.gather(*running)
