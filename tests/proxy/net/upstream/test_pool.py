"""Kept connections: which is used again, which is closed, when a request is sent once more."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from proxy.net.cheap_tls import by_the_system
from proxy.net.upstream import pool as pool_module
from proxy.net.upstream.pool import ConnectOptions, Pool
from proxy.protocol.errors import UpstreamFailure
from tests.support.certificates import Certificates
from tests.support.harness import WAIT_S, plain, until
from tests.support.upstream_peer import OK, Peer, ask, serving


async def test_only_a_kept_connection_is_replayed_and_only_in_silence() -> None:
    peer = Peer([OK, b"", OK])
    peer.close = True
    async with serving(peer.serve) as upstream:
        await ask(upstream)
        await until(lambda: upstream.in_use == 0)
        with pytest.raises(UpstreamFailure):
            await ask(upstream)  # a fresh connection: no second try
        assert (await ask(upstream))[0] == 200


async def test_a_connection_that_hangs_up_on_the_next_request_is_replayed() -> None:
    class Fickle(Peer):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            await reader.readuntil(b"\r\n\r\n{}")
            self.requests += 1
            writer.write(OK)
            await reader.readuntil(b"\r\n\r\n{}")
            writer.transport.abort()

    peer = Fickle([])
    async with serving(peer.serve) as upstream:
        assert [(await ask(upstream))[0] for _ in range(4)] == [200] * 4
    assert peer.requests == 4


async def test_bytes_that_nobody_asked_for_end_a_connection() -> None:
    """They would be taken for the answer to the next request."""
    writers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(OK)
        await reader.read()
        writer.close()

    async with serving(serve) as upstream:
        await ask(upstream)
        writers[0].write(plain(b"stolen"))
        await until(lambda: not upstream._pool._open, "closed")
        assert await ask(upstream) == (200, b'{"ok":1}')


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "KEEPALIVE_S", 0.1)
    peer = Peer([OK])
    async with serving(peer.serve) as upstream:
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(ask(upstream))
        assert peer.connections == 5
        await until(lambda: not upstream._pool._open, "all closed")


async def test_the_last_used_is_used_first() -> None:
    peer = Peer([OK])
    async with serving(peer.serve) as upstream:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(ask(upstream))
        last = upstream._pool._idle[-1]
        await ask(upstream)
        assert last.requests == 2


async def test_an_instance_that_never_shakes_hands_is_hung_up_on() -> None:
    hung_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while await reader.read(65536):
                pass
        writer.close()
        hung_up.set_result(None)

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = Pool(f"https://127.0.0.1:{port}", 0.1, ConnectOptions(by_the_system()))
    with pytest.raises(UpstreamFailure, match="no connection in time"):
        await pool.connect()
    async with asyncio.timeout(WAIT_S):
        await hung_up
    assert pool.in_use == 0
    server.close()


async def test_a_connect_that_is_cancelled_at_any_turn_leaves_no_connection(
    tmp_path: Path,
) -> None:
    """Also between the handshake's end and the turn in which the caller would be told."""
    certs = Certificates(tmp_path)
    open_now: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now.add(writer)
        with suppress(OSError):
            await reader.read()
        open_now.discard(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=certs.server("127.0.0.1"))
    port = server.sockets[0].getsockname()[1]
    pool = Pool(f"https://127.0.0.1:{port}", WAIT_S, ConnectOptions(certs.client()))
    made = tried = 0
    try:
        while made < 20:  # a part of the handshake is in a thread, so that turns vary
            task = asyncio.create_task(pool.connect())
            for _ in range(2 * tried):
                await asyncio.sleep(0)
            tried += 1
            task.cancel()
            with suppress(asyncio.CancelledError):
                (await task).abort()
                made += 1
        assert tried > made, "some are cancelled before their end, and some after"
        server.close()
        await until(lambda: not open_now, "each has closed")
    finally:
        server.close()
        for writer in list(open_now):
            writer.transport.abort()
    assert pool.in_use == 0
