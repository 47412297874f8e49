"""More clients than descriptors: those who are in are served, the others are told, nobody falls."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from pathlib import Path
from typing import Any, cast

import aiohttp
import orjson
import pytest

from proxy.net.server.listener import (
    ADMIN_MOST,
    CLIENTS_RATIO,
    OWN_DESCRIPTORS,
    PLACES,
    admin_cap,
    client_cap,
)
from replayer.simulator.host import SimFleet
from tests.support.harness import WAIT_S, addresses, chat, proxied, until
from tests.support.proxy_process import running

FEW = 256
CLIENTS = 400


class Client:
    """One raw connection with a long stream asked for on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, url: str) -> Client:
        host, port = url.removeprefix("http://").split(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def ask(self) -> bytes:
        """The status of the answer; empty when there was none."""
        body = orjson.dumps(chat("x", max_tokens=4000))
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: p\r\nContent-Type: application/json\r\n"
        try:
            self.writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            status = (await self.reader.readline())[9:12]
            if status != b"200":
                await self.reader.read()
                self.writer.close()
        except ConnectionError:
            return b""
        return status


@pytest.mark.long
async def test_more_clients_than_descriptors() -> None:
    cap = int(CLIENTS_RATIO * (FEW - OWN_DESCRIPTORS))
    async with SimFleet(2, speed=1.0) as fleet:
        instances = ("--instances", ",".join(addresses(fleet)))
        async with running(*instances, shell=f"ulimit -n {FEW}") as process:
            clients, asked = [], []
            for _ in range(CLIENTS):  # each speaks at once: a silent one would be closed for it
                clients.append(await Client.connect(process.url))
                asked.append(asyncio.create_task(clients[-1].ask()))
            answers = Counter(await asyncio.gather(*asked))
            assert answers[b"200"] == cap, answers
            assert answers[b"503"] >= PLACES, answers
            assert set(answers) <= {b"200", b"503", b""}
            for client in clients:
                client.writer.close()
            async with aiohttp.ClientSession(process.url) as http:
                statuses: list[int] = []
                while statuses[-1:] != [200]:
                    async with asyncio.timeout(WAIT_S):
                        body = chat("x", max_tokens=1)
                        async with http.post("/v1/chat/completions", json=body) as response:
                            statuses.append(response.status)
            assert set(statuses) <= {200, 503}
            assert process.is_alive
            assert not process.found("Traceback|down")


async def test_the_longest_silent_makes_room(tmp_path: Path) -> None:
    """Nobody who has spoken does; once all have, a further client is told."""
    async with proxied(tmp_path, 1, max_connections=4) as (proxy, _):

        def spoken() -> int:
            return sum(not connection._is_silent for connection in proxy.listener.connections)

        assert (await proxy.post(chat("x"))).status == 200
        silent = [await Client.connect(proxy.server.url) for _ in range(3)]
        await until(lambda: proxy.metric("open_connections") == 4)
        speaking = []
        for oldest in silent:
            speaking.append(await Client.connect(proxy.server.url))
            speaking[-1].writer.write(b"POST ")
            assert await asyncio.wait_for(oldest.reader.read(), WAIT_S) == b""
            oldest.writer.close()
            await until(lambda: spoken() > len(speaking))
        assert proxy.metric("client_errors_total", reason="silent") == 3
        assert proxy.metric("connections_refused_total") == 0
        more = await Client.connect(proxy.server.url)
        assert b"\r\nX-Request-Id: " in await more.reader.read()
        more.writer.close()
        assert proxy.metric("connections_refused_total") == 1
        assert (await proxy.post(chat("x"))).status == 200
        for client in speaking:
            client.writer.close()
        await proxy.at_rest()


async def test_a_connection_on_which_nothing_comes_is_closed(tmp_path: Path) -> None:
    """Not one that has had an answer and rests."""
    async with proxied(tmp_path, 1, header_timeout=0.1) as (proxy, _):
        assert (await proxy.post(chat("x"))).status == 200
        silent = [await Client.connect(proxy.server.url) for _ in range(3)]
        for client in silent:
            assert await asyncio.wait_for(client.reader.read(), WAIT_S) == b""
            client.writer.close()
        assert proxy.metric("client_errors_total", reason="silent") == 3
        assert proxy.metric("open_connections") == 1, "the one at rest"


async def test_a_place_is_free_again_when_a_client_leaves(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1, max_connections=3) as (proxy, _):
        held = [await Client.connect(proxy.server.url) for _ in range(2)]  # the third is proxy.http
        for client in held:
            client.writer.write(b"POST ")
        await until(lambda: proxy.metric("open_connections") == 3 or not proxy.http.closed)
        assert (await proxy.post(chat("x"))).status == 200
        await until(lambda: proxy.metric("open_connections") == 3)
        more = await Client.connect(proxy.server.url)
        assert await more.ask() == b"503"
        assert proxy.metric("connections_refused_total") == 1
        held[0].writer.close()
        await until(lambda: proxy.metric("open_connections") == 2)
        again = await Client.connect(proxy.server.url)
        assert await again.ask() == b"200"
        for client in (held[1], again):
            client.writer.close()
        await proxy.at_rest()


async def test_the_admin_listener_has_places_of_its_own(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1, max_connections=1, admin_port=0) as (proxy, _):
        taken = await Client.connect(proxy.server.url)
        await until(lambda: proxy.metric("open_connections") == 1)
        async with aiohttp.ClientSession(proxy.server.admin_url) as http:
            async with http.get("/instances") as response:
                assert response.status == 200
        taken.writer.close()


async def test_the_admin_listener_has_few_places_and_the_oldest_idle_gives_way(
    tmp_path: Path,
) -> None:
    """Who only reaches it cannot take the descriptors of all clients, nor keep an operator out."""

    async def live(client: Client) -> bytes:
        client.writer.write(b"GET /live HTTP/1.1\r\nHost: p\r\n\r\n")
        head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), WAIT_S)
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        await client.reader.readexactly(length)
        return head[9:12]

    async with proxied(tmp_path, 1, admin_port=0) as (proxy, _):
        cap = admin_cap()
        assert PLACES <= cap <= ADMIN_MOST
        held = [await Client.connect(proxy.server.admin_url) for _ in range(cap)]
        assert {await live(client) for client in held} == {b"200"}
        more = await Client.connect(proxy.server.admin_url)
        assert await live(more) == b"200"
        assert await asyncio.wait_for(held[0].reader.read(), WAIT_S) == b""
        busy = [*held[1:], more]
        for client in busy:
            client.writer.write(b"GET ")
        admin = proxy.server._runners[1].server
        assert admin is not None
        await until(lambda: not any(cast(Any, c).is_idle for c in admin.connections))
        refused = await Client.connect(proxy.server.admin_url)
        assert b" 503 " in await asyncio.wait_for(refused.reader.read(), WAIT_S)
        assert (await proxy.post(chat("x"))).status == 200
        for client in [*busy, refused, held[0]]:
            client.writer.close()
        await proxy.at_rest()


def test_the_cap_follows_the_descriptors(caplog: pytest.LogCaptureFixture) -> None:
    allowed = client_cap(None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or soft in (hard, 1 << 20)
    assert allowed == int(CLIENTS_RATIO * (soft - OWN_DESCRIPTORS))
    assert client_cap(5) == 5
    assert not caplog.records
    assert client_cap(allowed + 1) == allowed + 1
    assert "instances cannot be reached" in caplog.text
