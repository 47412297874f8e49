"""More clients than descriptors: those who are in are served, the others are told, nobody falls."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from pathlib import Path

import aiohttp
import orjson
import pytest

from proxy.net.server.listener import CLIENTS_RATIO, OWN_DESCRIPTORS, PLACES, client_cap
from replayer.simulator.host import SimFleet
from tests.proxy.test_cli import running
from tests.support.harness import WAIT_S, addresses, chat, proxied, until

FEW = 256
CLIENTS = 400
UNDER_LIMIT = ("bash", "-c", f'ulimit -n {FEW}; exec "$@"', "-")


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


async def test_more_clients_than_descriptors() -> None:
    cap = int(CLIENTS_RATIO * (FEW - OWN_DESCRIPTORS))
    async with SimFleet(2, speed=1.0) as fleet:
        instances = ("--instances", ",".join(addresses(fleet)))
        async with running(*instances, before=UNDER_LIMIT) as process:
            clients = [await Client.connect(process.url) for _ in range(CLIENTS)]
            answers = Counter(await asyncio.gather(*(client.ask() for client in clients)))
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
            assert process.child.returncode is None
            assert not [line for line in process.lines if "Traceback" in line or "down" in line]


async def test_a_place_is_free_again_when_a_client_leaves(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1, max_connections=3) as (proxy, _):
        held = [await Client.connect(proxy.server.url) for _ in range(2)]  # the third is proxy.http
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


async def test_the_admin_listener_is_not_capped(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1, max_connections=1, admin_port=0) as (proxy, _):
        taken = await Client.connect(proxy.server.url)
        await until(lambda: proxy.metric("open_connections") == 1)
        async with aiohttp.ClientSession(proxy.server.admin_url) as http:
            async with http.get("/instances") as response:
                assert response.status == 200
        taken.writer.close()


def test_the_cap_follows_the_descriptors(caplog: pytest.LogCaptureFixture) -> None:
    allowed = client_cap(None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or soft in (hard, 1 << 20)
    assert allowed == int(CLIENTS_RATIO * (soft - OWN_DESCRIPTORS))
    assert client_cap(5) == 5
    assert not caplog.records
    assert client_cap(allowed + 1) == allowed + 1
    assert "instances cannot be reached" in caplog.text
