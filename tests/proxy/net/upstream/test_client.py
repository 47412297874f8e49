"""Our own HTTP client against servers that do what servers do: every kind of end, and none."""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
import ssl
import struct
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from proxy.core.types import FailureKind, Instance
from proxy.net import tcp
from proxy.net.timeouts import Limit
from proxy.net.upstream import pool as pool_module
from proxy.net.upstream.client import Upstream
from proxy.net.upstream.connection import HEAD_BYTES, SLICE_BYTES
from proxy.net.upstream.response import UpstreamResponse
from proxy.protocol.errors import UpstreamFailure
from tests.support.harness import plain, until

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = plain(b'{"ok":1}')


class Peer:
    """A server and a client of it; counts connections and requests."""

    def __init__(self, answers: list[bytes], *, close: bool = False) -> None:
        self.answers, self.close = answers, close
        self.connections = self.requests = 0
        self.heads: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [x for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")]
                if length:
                    await reader.readexactly(int(length[0].split(b":")[1]))
                self.heads.append(head)
                answer = self.answers[min(self.requests, len(self.answers) - 1)]
                self.requests += 1
                writer.write(answer)
                await writer.drain()
                if self.close:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()  # what was written goes out first
            await writer.wait_closed()


@asynccontextmanager
async def serving(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[Upstream]:
    async with asyncio.TaskGroup() as group:

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.append(group.create_task(handle(reader, writer)))

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await serve(reader, writer)
            except ConnectionError:
                pass
            finally:
                writer.transport.abort()

        tasks: list[asyncio.Task[None]] = []
        async with listening(accept, tls) as upstream:
            yield upstream
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def listening(
    accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None],
    tls: ssl.SSLContext | None,
) -> AsyncIterator[Upstream]:
    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    url = f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}"
    async with server:
        upstream = Upstream(Instance("i", url), 2.0)
        try:
            yield upstream
        finally:
            await upstream.close()


async def ask(upstream: Upstream, method: str = "POST", sent: bytes = b"{}") -> tuple[int, bytes]:
    with Limit(10.0):
        reply = await upstream.send(method, "/v1/x", b"", sent if method == "POST" else None)
        try:
            body = await reply.read(1 << 20)
            if reply.failure is not None:
                raise reply.failure
            return reply.status, body
        finally:
            reply.close()


def chunked(*bodies: bytes, end: bytes = b"0\r\n\r\n", extra: str = "") -> bytes:
    head = f"HTTP/1.1 200 OK\r\n{extra}Transfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(b), b) for b in bodies) + end


@pytest.mark.parametrize(
    ("answer", "close", "status", "body", "is_kept"),
    [
        (OK, False, 200, b'{"ok":1}', True),
        (chunked(b"ab", b"c"), False, 200, b"abc", True),
        (chunked(b"ab", end=b"0\r\nX-T: 1\r\n\r\n"), False, 200, b"ab", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, 204, b"", True),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", False, 304, b"", False),
        (plain(b"", "404 Not Found"), False, 404, b"", True),
        (b"HTTP/1.1 103 Early\r\nA: b\r\n\r\n" * 2 + OK, False, 200, b'{"ok":1}', True),
        (plain(b"x", extra="Connection: close\r\n"), True, 200, b"x", False),
        (plain(b"x", extra="Connection: close\r\n"), False, 200, b"x", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", True, 200, b"x", False),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", True, 200, b"until the end", False),
        (b"HTTP/1.0 200 OK\r\n\r\n", True, 200, b"", False),
        (OK + b"HTTP/1.1 200 OK\r\n", False, 200, b'{"ok":1}', False),
        (chunked(b"ab") + b"\r\n", False, 200, b"ab", False),
    ],
)
async def test_every_kind_of_end(
    answer: bytes, close: bool, status: int, body: bytes, is_kept: bool
) -> None:
    """Read whole, and the connection used again exactly when it may be; in one piece or many."""
    peer = Peer([answer], close=close)
    async with serving(peer.serve) as upstream:
        for _ in range(3):
            assert await ask(upstream) == (status, body)
            await until(lambda: upstream.in_use == 0)
    assert (peer.requests, peer.connections) == (3, 1 if is_kept else 3)


async def test_an_answer_byte_by_byte() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        for byte in b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(b"hello", b"!"):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        await writer.drain()
        await reader.read()
        writer.close()

    async with serving(serve) as upstream:
        assert await ask(upstream) == (200, b"hello!")


async def test_head_has_no_body_and_no_second_use() -> None:
    peer = Peer([b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"])
    async with serving(peer.serve) as upstream:
        assert [await ask(upstream, "HEAD") for _ in range(2)] == [(200, b"")] * 2
    assert peer.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 99 Low\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxy",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nxy",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\rSet-Cookie: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"b" * HEAD_BYTES,
        b"HTTP/1.1 200 OK\r\nA: " + b"b" * HEAD_BYTES + b"\r\n\r\n",
        b"HTTP/1.1 103 Early\r\nA: b\r\n\r\n" * 5000,
        chunked(end=b"zz\r\n"),
    ],
)
async def test_garbage_is_malformed(answer: bytes) -> None:
    peer = Peer([answer])
    async with serving(peer.serve) as upstream:
        with pytest.raises(UpstreamFailure) as caught:
            await ask(upstream)
        await until(lambda: upstream.in_use == 0)
    assert caught.value.kind is FailureKind.MALFORMED
    assert peer.requests == 1, "an answer of any kind is never asked for twice"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nCont",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",
        chunked(b"x", end=b""),
        chunked(b"x", end=b"5\r\nab"),
        chunked(b"x", end=b"0\r\n"),
    ],
)
async def test_a_cut_answer_is_a_reset(answer: bytes) -> None:
    peer = Peer([answer], close=True)
    async with serving(peer.serve) as upstream:
        with pytest.raises(UpstreamFailure) as caught:
            await ask(upstream)
    assert (caught.value.kind, peer.requests) == (FailureKind.RESET, 1)


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


async def test_an_answer_before_the_request_was_taken() -> None:
    """Passed on; the connection, which still has to carry the rest, is not used again."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(plain(b"too large", "413 Too Large"))
        await writer.drain()
        await asyncio.sleep(10)

    async with serving(serve) as upstream:
        with Limit(10.0):
            for _ in range(2):
                reply = await upstream.send("POST", "/v1/x", b"", b"x" * (16 << 20))
                assert (reply.status, await reply.read(100)) == (413, b"too large")
                reply.close()
                await until(lambda: upstream.in_use == 0)
    assert connections == 2


EARLY = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    peer, _ = server.accept()
    left = 300_000
    while left > 0 and (data := peer.recv(65536)):
        left -= len(data)
    peer.sendall(b"HTTP/1.1 401 No\\r\\nContent-Length: 2\\r\\n\\r\\nno")
    peer.close()
"""


async def test_an_answer_that_comes_before_the_request_was_taken_and_closes() -> None:
    """From another process, so that it comes between two slices, while the loop has work to do."""

    def work() -> None:
        end_s = loop.time() + 0.001
        while loop.time() < end_s:
            pass
        if is_busy:
            loop.call_soon(work)

    loop, is_busy = asyncio.get_running_loop(), True
    statuses: list[int | None] = []
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", EARLY, stdout=PIPE)
    assert server.stdout is not None
    port = int(await server.stdout.readline())
    upstream = Upstream(Instance("i", f"http://127.0.0.1:{port}"), 2.0)
    work()
    try:
        for _ in range(20):
            try:
                with Limit(10.0):
                    statuses.append((await ask(upstream, sent=bytes(8 << 20)))[0])
            except UpstreamFailure:
                statuses.append(None)
    finally:
        is_busy = False
        await upstream.close()
        server.kill()
        await server.wait()
    # A reset can still come just between the look and the write.
    assert statuses.count(401) > 15


@pytest.mark.parametrize("more", [-SLICE_BYTES + 1, -1, 0, 1, SLICE_BYTES, 9 * SLICE_BYTES + 7])
@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_long_body_arrives_whole(more: int, is_slow: bool) -> None:
    """It is sent in slices, as the instance takes them, and its connection is used again."""
    body = random.Random(more).randbytes(SLICE_BYTES + more)
    got: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                if is_slow:
                    got.append(await reader.readexactly(len(body) // 2))
                    await asyncio.sleep(0.05)
                got.append(await reader.readexactly(len(body) - sum(map(len, got))))
                writer.write(OK)

    async with serving(serve) as upstream:
        with Limit(10.0):
            for _ in range(2):
                assert await ask(upstream, sent=body) == (200, b'{"ok":1}')
                assert b"".join(got) == body
                got.clear()
        assert len(upstream._pool._open) == 1


async def test_an_answer_that_is_over_pauses_nobodys_connection() -> None:
    """Its client may take it slowly: the connection has been free since, or is another's."""
    long = plain(b"x" * 100_000)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(2)
                writer.write(long)

    async with serving(serve) as upstream:
        with Limit(10.0):
            reply = await upstream.send("POST", "/v1/x", b"", b"{}")
            while await reply.more():
                pass
            reply.pause()
            assert await ask(upstream) == (200, b"x" * 100_000)
            (connection,) = upstream._pool._open
            connection.pause()
            reply.resume()
            assert connection._is_paused
            connection.resume()


async def test_of_a_body_that_is_given_up_nothing_more_is_sent() -> None:
    """Hung up on amid its body: the instance reads an end, not the rest."""
    read: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.wait_for(go_on.wait(), 10)
        read.append(len(await reader.read(-1)))

    go_on = asyncio.Event()
    async with serving(serve) as upstream, asyncio.TaskGroup() as group:
        sent: list[UpstreamResponse] = []

        async def send() -> None:
            body = b"x" * (32 << 20)
            with pytest.raises(UpstreamFailure):
                await upstream.send("POST", "/v1/x", b"", body, sent.append)

        group.create_task(send())
        await until(lambda: sent, "sent")
        assert sent[0].hang_up()
        go_on.set()
        await until(lambda: read, "the end")
        await until(lambda: not upstream._pool._open, "closed")
    assert read[0] < 32 << 20


async def test_given_up_is_closed() -> None:
    """A head or a body that does not come: the limit ends it, and no connection stays."""
    for begun in (b"", b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"):
        peer = Peer([begun])
        async with serving(peer.serve) as upstream:
            with pytest.raises(TimeoutError), Limit(0.1):
                await upstream.send("POST", "/v1/x", b"", b"{}")
            await until(lambda: not upstream._pool._open, "closed")


async def test_nobody_reads_so_nothing_is_read() -> None:
    """Up to a bound, then the instance is held back by its own full socket."""
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
                sent += 65536
        except ConnectionError:
            pass

    async with serving(serve) as upstream:
        reply = await upstream.send("POST", "/v1/x", b"", b"{}")
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.1)
        assert sum(map(len, reply.body)) < 1 << 20
        assert sent < 32 << 20
        reply.close()


async def test_probes_get_bodies_and_reasons() -> None:
    async with serving(Peer([OK, plain(b"", "500 Oops"), b"junk"]).serve) as upstream:
        assert await upstream.get("/health", 2.0) == b'{"ok":1}'
        with pytest.raises(UpstreamFailure, match="status 500"):
            await upstream.get("/health", 2.0)
        with pytest.raises(UpstreamFailure, match="not HTTP"):
            await upstream.get("/health", 2.0)
    with pytest.raises(UpstreamFailure, match="connect"):
        await Upstream(Instance("i", upstream.instance.url), 2.0).get("/health", 2.0)


async def certified(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate of its own for localhost, and a server's context with it."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    make += ["-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=DNS:localhost"]
    await asyncio.to_thread(subprocess.run, make, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    return cert, tls


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
async def test_a_reset_amid_a_long_body_over_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport forgets its socket before it tells that it is lost."""
    cert, tls = await certified(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1_500_000)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with serving(serve, tls) as upstream:
        for _ in range(10):
            with pytest.raises(UpstreamFailure) as caught:
                await ask(upstream, sent=bytes(8 << 20))
            assert caught.value.kind is FailureKind.RESET
    assert not errors
    assert not tcp.has_news(None)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
async def test_tls_to_an_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TLS with a known certificate; refused with an unknown one."""
    cert, tls = await certified(tmp_path)
    peer = Peer([OK])
    async with serving(peer.serve, tls) as upstream:
        with pytest.raises(UpstreamFailure, match="TLS") as caught:
            await ask(upstream)
        assert caught.value.kind is FailureKind.CONNECT
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    async with serving(peer.serve, tls) as upstream:
        assert [await ask(upstream) for _ in range(2)] == [(200, b'{"ok":1}')] * 2
    assert peer.requests == 2
    assert peer.heads[0].startswith(b"POST /v1/x HTTP/1.1\r\nHost: localhost:")
