"""TLS on both sides, with certificates of an own CA, exchanged under running streams."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import trustme

from proxy.config.sources import ConfigError
from proxy.net import secured
from proxy.net.server import handshakes
from proxy.net.tls_records import SMALL_RECORDS
from proxy.protocol.framing import Chunked
from proxy.protocol.request_framing import Refusal
from replayer.simulator.host import SimFleet
from tests.support.certificates import Certificates
from tests.support.harness import (
    DONE,
    STREAM_HEAD,
    WAIT_S,
    RawEngine,
    ServedProxy,
    chat,
    chunk,
    event,
    says,
    stands_still,
    until,
    words,
)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("ca"))


@asynccontextmanager
async def tunnel(to: int, context: ssl.SSLContext) -> AsyncIterator[int]:
    """TLS in front of a plain port."""
    writers: set[asyncio.StreamWriter] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner = await asyncio.open_connection("127.0.0.1", to)
        writers.update((writer, inner))
        async with asyncio.TaskGroup() as group:
            group.create_task(pump(reader, inner))
            group.create_task(pump(inner_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


@asynccontextmanager
async def over_tls(
    tmp_path: Path, certs: Certificates, instances: list[str], **options: Any
) -> AsyncIterator[tuple[ServedProxy, aiohttp.ClientSession]]:
    cert, key = certs.leaf("proxy", "127.0.0.1")
    given = {"tls_cert": cert, "tls_key": key, "instance_ca": certs.ca} | options
    async with ServedProxy(tmp_path / "log", instances, **given) as proxy:
        assert proxy.server.url.startswith("https://")
        await proxy.up()
        connector = aiohttp.TCPConnector(ssl=certs.client(), limit=0)
        async with aiohttp.ClientSession(proxy.server.url, connector=connector) as http:
            yield proxy, http


async def test_a_whole_offload_over_tls(tmp_path: Path, certs: Certificates) -> None:
    async with SimFleet(2, speed=50.0, tick=0.0) as fleet:
        first, second = (e.url.rpartition(":")[2] for e in fleet.engines)
        names = certs.server("127.0.0.1")
        async with tunnel(int(first), names) as a, tunnel(int(second), names) as b:
            ends = zip((a, b), fleet.engines, strict=True)
            instances = [f"https://127.0.0.1:{p};bootstrap={e.bootstrap_url}" for p, e in ends]
            options = {"offload_policy": "always", "heavy_threshold": 500, "warm_threshold": 100}
            async with over_tls(tmp_path, certs, instances, **options) as (proxy, http):
                for stream in (True, False):
                    body = chat(words(1000, f"{stream}"), stream=stream)
                    async with http.post("/v1/chat/completions", json=body) as response:
                        assert response.status == 200
                        assert response.headers["X-Cache-Proxy-Route"] == "HEAVY_P2P"
                        await response.read()
                await proxy.at_rest()
                assert [r["outcome"] for r in await proxy.records(2)] == ["ok", "ok"]


REFUSED = {
    "an unknown CA": "unable to get local issuer certificate",
    "expired": "certificate has expired",
    "another address": "IP address mismatch",
    "another name": "Hostname mismatch",
    "self-signed": "self-signed certificate",
}
"""What is wrong with an instance's certificate, and what /health and the log say of it."""


@pytest.mark.parametrize("wrong", REFUSED)
async def test_why_a_certificate_is_refused(
    tmp_path: Path, certs: Certificates, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    host = "localhost" if wrong == "another name" else "127.0.0.1"
    context = certs.server("other.example" if wrong.startswith("another") else host)
    if wrong == "expired":
        context = certs.server(host, not_after=datetime(2020, 1, 1, tzinfo=UTC))
    elif wrong == "an unknown CA":
        context = Certificates(tmp_path / "unknown").server(host)
    elif wrong == "self-signed":
        context = self_signed(tmp_path)
    said = f"unreachable: TLS: its certificate is not trusted: {REFUSED[wrong]}"
    async with RawEngine() as engine, tunnel(engine.port, context) as port:
        instances = [f"a=https://{host}:{port}"]
        given = {"instance_ca": certs.ca}
        async with ServedProxy(tmp_path / "log", instances, **given) as proxy:
            health = proxy.router.known.fleet.members()[0].health
            await until(lambda: health.last_error, "a probe has failed")
            async with proxy.http.get("/health") as response:
                (shown,) = (await response.json())["instances"].values()
            assert shown["last_error"].endswith(said)
            answer = await proxy.post(chat("x"))
            assert host not in answer.body.decode()
        lines = [m for m in caplog.messages if said in m]
        assert lines
        assert all(len(line.splitlines()) == 1 for line in lines)


def self_signed(home: Path) -> ssl.SSLContext:
    """A server with a certificate that nobody else has signed."""
    ca, key = trustme.CA(), home / "self.key"
    ca.private_key_pem.write_to_path(str(key))
    cert = home / "self.pem"
    ca.cert_pem.write_to_path(str(cert))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    return context


@pytest.mark.long
async def test_a_slow_client_pauses_its_instance_and_loses_no_byte(
    tmp_path: Path, certs: Certificates
) -> None:
    pieces = [chunk(event(f"{i}-" + "x" * 50_000)) for i in range(800)]
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(STREAM_HEAD)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            sent += 1
        writer.write(DONE)
        await writer.drain()

    async with RawEngine(flood) as engine, tunnel(engine.port, certs.server("127.0.0.1")) as port:
        async with over_tls(tmp_path, certs, [f"https://127.0.0.1:{port}"]) as (proxy, _):
            at = int(proxy.server.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", at, ssl=certs.client(), limit=4096
            )
            try:
                body = orjson.dumps(chat("x"))
                head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                await reader.readuntil(b"\r\n\r\n")
                await stands_still(lambda: sent)
                assert 0 < sent < len(pieces), "the engine waits for the client"
                (protocol,) = proxy.listener.connections
                assert protocol.transport.get_write_buffer_size() < 1 << 20
                wire = await reader.read(-1)
                assert Chunked().feed(wire) == Chunked().feed(b"".join(pieces) + DONE)
            finally:
                writer.transport.abort()
            await proxy.at_rest()


async def test_a_client_that_leaves_closes_its_instance(
    tmp_path: Path, certs: Certificates
) -> None:
    async with SimFleet(1, speed=1.0) as fleet:
        to = int(fleet.engines[0].url.rpartition(":")[2])
        async with tunnel(to, certs.server("127.0.0.1")) as port:
            async with over_tls(tmp_path, certs, [f"https://127.0.0.1:{port}"]) as (proxy, http):
                body = chat("x", max_tokens=5000)
                async with http.post("/v1/chat/completions", json=body) as response:
                    await response.content.readany()
                    response.close()
                await until(lambda: proxy.connections() == 0, "upstream closed")
                await proxy.at_rest()


def judged(health: Any) -> bool:
    return health.was_seen or health.last_error is not None


async def test_an_instance_is_verified_and_shown_our_certificate(
    tmp_path: Path, certs: Certificates
) -> None:
    stranger = Certificates(tmp_path / "stranger")
    cert, key = certs.leaf("ours", "proxy")
    cases: list[tuple[ssl.SSLContext, dict[str, Any], bool]] = [
        (certs.server("127.0.0.1"), {}, True),
        (certs.server("localhost"), {}, False),
        (stranger.server("127.0.0.1"), {}, False),
        (certs.server("127.0.0.1"), {"instance_ca": None}, False),
        (certs.server("127.0.0.1", wants=certs.ca), {}, False),
        (
            certs.server("127.0.0.1", wants=certs.ca),
            {"instance_cert": cert, "instance_key": key},
            True,
        ),
    ]
    for context, options, is_good in cases:
        async with RawEngine(says(b"")) as engine, tunnel(engine.port, context) as port:
            given = {"instance_ca": certs.ca} | options
            instance = f"https://127.0.0.1:{port}"
            async with ServedProxy(tmp_path / "log", [instance], **given) as proxy:
                (member,) = proxy.router.known.fleet.members()
                health = member.health
                await until(partial(judged, health), "probed")
                assert health.was_seen == is_good, health.last_error


async def test_by_name_the_name_is_verified(tmp_path: Path, certs: Certificates) -> None:
    async with RawEngine(says(b"")) as engine:
        async with tunnel(engine.port, certs.server("localhost")) as port:
            instance = f"https://localhost:{port}"
            async with ServedProxy(tmp_path / "log", [instance], instance_ca=certs.ca) as proxy:
                await proxy.up()


async def refused(connecting: Any) -> bool:
    try:
        async with connecting as response:
            await response.read()
    except (aiohttp.ClientError, OSError):
        return True
    return False


async def test_clients_may_have_to_show_a_certificate(tmp_path: Path, certs: Certificates) -> None:
    async with RawEngine(says(b"")) as engine:
        options = {"tls_client_ca": certs.ca}
        async with over_tls(tmp_path, certs, [engine.address], **options) as (proxy, http):
            assert await refused(http.get("/live"))
            known = certs.client(certs.leaf("client", "someone"))
            stranger = Certificates(tmp_path / "stranger")
            unknown = certs.client(stranger.leaf("client", "someone"))
            for context, is_refused in ((known, False), (unknown, True)):
                connector = aiohttp.TCPConnector(ssl=context)
                async with aiohttp.ClientSession(proxy.server.url, connector=connector) as mine:
                    assert await refused(mine.get("/live")) == is_refused
            known.maximum_version = ssl.TLSVersion.TLSv1_2
            connector = aiohttp.TCPConnector(ssl=known)
            async with aiohttp.ClientSession(proxy.server.url, connector=connector) as mine:
                assert await refused(mine.get("/live")), "its session would be kept with its chain"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_what_is_spoken(
    tmp_path: Path,
    certs: Certificates,
    version: ssl.TLSVersion,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with RawEngine(says(b"")) as engine:
        async with over_tls(tmp_path, certs, [engine.address]) as (proxy, _):
            context = certs.client()
            context.minimum_version = context.maximum_version = version
            at = int(proxy.server.url.rpartition(":")[2])
            _, writer = await asyncio.open_connection("127.0.0.1", at, ssl=context)
            assert writer.get_extra_info("ssl_object").version() == version.name.replace("_", ".")
            writer.close()
            reader, plain = await asyncio.open_connection("127.0.0.1", at)
            plain.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert not (await reader.read()).startswith(b"HTTP/1.1 200")
            plain.close()
            await asyncio.sleep(0)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


async def test_who_does_not_shake_hands_is_closed(
    tmp_path: Path, certs: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 0.1)
    async with RawEngine(says(b"")) as engine:
        async with over_tls(tmp_path, certs, [engine.address]) as (proxy, _):
            at = int(proxy.server.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", at)
            async with asyncio.timeout(WAIT_S):
                assert await reader.read() == b""
            writer.close()
            await until(lambda: proxy.metric("tls_handshakes_failed_total", reason="late") == 1)


async def test_handshakes_that_stand_have_a_room(
    tmp_path: Path, certs: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a memory limit of 256 MiB 3,000 of them took all of it."""
    monkeypatch.setattr(handshakes, "COST_BYTES", 100 << 20)
    async with RawEngine(says(b"")) as engine:
        async with over_tls(tmp_path, certs, [engine.address]) as (proxy, http):
            at = int(proxy.server.url.rpartition(":")[2])
            silent = [await asyncio.open_connection("127.0.0.1", at) for _ in range(4)]
            failed = partial(proxy.metric, "tls_handshakes_failed_total", reason="displaced")
            await until(lambda: failed() == 2, "two have room")
            async with asyncio.timeout(WAIT_S):
                for reader, _ in silent[:2]:
                    assert await reader.read() == b""
            async with http.get("/live") as response:
                assert response.status == 200
            assert failed() == 3
            for _, writer in silent:
                writer.close()


async def test_who_shakes_hands_and_then_says_nothing_is_closed_without_a_goodbye(
    tmp_path: Path, certs: Certificates
) -> None:
    """Its descriptor is free at once, although this client never answers a close_notify."""
    async with RawEngine(says(b"")) as engine:
        async with over_tls(tmp_path, certs, [engine.address], header_timeout=0.3) as (proxy, _):
            at = int(proxy.server.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", at)
            sent, received = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = certs.client().wrap_bio(received, sent, server_hostname="127.0.0.1")
            async with asyncio.timeout(WAIT_S):
                while True:
                    try:
                        tls.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        writer.write(sent.read())
                        received.write(await reader.read(65536))
                writer.write(sent.read())
                with suppress(ConnectionResetError):
                    while await reader.read(65536):
                        pass
            writer.close()
            assert proxy.metric("client_errors_total", reason="silent") == 1


async def test_certificates_change_under_a_stream(tmp_path: Path, certs: Certificates) -> None:
    async with SimFleet(1, speed=5.0) as fleet:
        async with over_tls(tmp_path, certs, [fleet.engines[0].url]) as (proxy, http):
            body = chat("x", max_tokens=60)
            at = int(proxy.server.url.rpartition(":")[2])
            async with http.post("/v1/chat/completions", json=body) as response:
                await response.content.readany()
                other = Certificates(tmp_path / "other")
                cert, key = other.leaf("proxy", "127.0.0.1")
                settings = proxy.server.state.options.settings
                assert settings.tls_cert
                assert settings.tls_key
                settings.tls_cert.write_bytes(b"no certificate")
                assert await proxy.server.reloader.reload("test") == "refused"
                settings.tls_cert.write_bytes(cert.read_bytes())
                assert await proxy.server.reloader.reload("test") == "refused", "not its key"
                settings.tls_key.write_bytes(key.read_bytes())
                assert await proxy.server.reloader.reload("test") == "applied"
                for ca, is_good in ((other, True), (certs, False)):
                    try:
                        _, writer = await asyncio.open_connection("127.0.0.1", at, ssl=ca.client())
                        writer.close()
                        assert is_good
                    except ssl.SSLError:
                        assert not is_good
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
            async with http.get("/live") as response:
                assert response.status == 200, "a kept connection goes on"


@pytest.mark.parametrize("name", ["tls_cert", "tls_client_ca", "instance_ca", "instance_cert"])
@pytest.mark.parametrize("content", [None, b"no PEM", b"-----BEGIN CERTIFICATE-----\nx\n"])
async def test_files_that_are_none_stop_the_start_with_a_line(
    tmp_path: Path, certs: Certificates, name: str, content: bytes | None
) -> None:
    path = tmp_path / "x.pem"
    if content is not None:
        path.write_bytes(content)
    cert, key = certs.leaf("proxy", "127.0.0.1")
    options = {"tls_cert": cert, "tls_key": key} | {name: path}
    with pytest.raises(ConfigError, match=name) as caught:
        async with ServedProxy(tmp_path / "log", ["http://127.0.0.1:9"], **options):
            pass
    assert "\n" not in str(caught.value)


async def test_a_client_of_tiny_records_is_ended_and_counted(
    tmp_path: Path, certs: Certificates
) -> None:
    async with RawEngine(says(b"")) as engine:
        async with over_tls(tmp_path, certs, [engine.address]) as (proxy, http):
            at = int(proxy.server.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", at, ssl=certs.client())
            tls = writer.get_extra_info("ssl_object")
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
            writer.write(head)
            assert tls.version() == "TLSv1.3"
            with suppress(OSError):
                for _ in range(SMALL_RECORDS // 4):
                    for _ in range(8):
                        writer.write(b" ")
                    await writer.drain()
                await reader.read()
            writer.transport.abort()
            await until(
                lambda: proxy.metric("client_errors_total", reason=Refusal.RECORDS) == 1, "ended"
            )
            async with http.get("/live") as response:
                assert response.status == 200


async def test_an_instance_of_empty_records_is_refused(tmp_path: Path, certs: Certificates) -> None:
    context = certs.server("127.0.0.1")
    context.num_tickets = 1000
    async with RawEngine(says(b"")) as engine, tunnel(engine.port, context) as port:
        instance = f"https://127.0.0.1:{port}"
        async with ServedProxy(tmp_path / "log", [instance], instance_ca=certs.ca) as proxy:
            (member,) = proxy.router.known.fleet.members()
            await until(partial(judged, member.health), "probed")
            assert "too many TLS records" in str(member.health.last_error)


async def test_a_handshake_of_a_long_chain_is_not_read(tmp_path: Path, certs: Certificates) -> None:
    async with RawEngine(says(b"")) as engine:
        async with over_tls(tmp_path, certs, [engine.address], tls_client_ca=certs.ca) as served:
            proxy, _ = served
            cert, key = certs.leaf("chained", "someone")
            one = cert.read_bytes()
            short, long = tmp_path / "short.pem", tmp_path / "long.pem"
            short.write_bytes(one * 3)
            long.write_bytes(one * (2 * secured.HANDSHAKE_BYTES * 4 // 3 // len(one)))
            for path, is_refused in ((short, False), (long, True)):
                connector = aiohttp.TCPConnector(ssl=certs.client((path, key)))
                async with aiohttp.ClientSession(proxy.server.url, connector=connector) as mine:
                    assert await refused(mine.get("/live")) == is_refused
            await until(lambda: proxy.metric("tls_handshakes_failed_total", reason="failed") > 0)


async def test_of_a_burst_of_silent_clients_the_oldest_make_room(
    tmp_path: Path, certs: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async with RawEngine(says(b"")) as engine:
        async with over_tls(tmp_path, certs, [engine.address], max_connections=2) as (proxy, http):
            at = int(proxy.server.url.rpartition(":")[2])
            opening = (asyncio.open_connection("127.0.0.1", at) for _ in range(60))
            opened = await asyncio.gather(*opening)
            await until(
                lambda: proxy.metric("tls_handshakes_failed_total", reason="displaced") >= 40,
                "room",
            )
            async with http.get("/live") as response:
                assert response.status == 200
            for _, writer in opened:
                writer.transport.abort()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []
