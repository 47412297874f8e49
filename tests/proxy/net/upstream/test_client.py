"""Our own HTTP client against servers that do what servers do: every kind of end, and none."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import struct
import subprocess
from array import array
from pathlib import Path

import orjson
import pytest

from proxy.core.types import FailureKind, Instance
from proxy.net import tcp
from proxy.net.timeouts import Limit
from proxy.net.upstream.client import MOST_IDS, Upstream, read_token_ids
from proxy.protocol.errors import UpstreamFailure
from tests.support.harness import plain, until
from tests.support.upstream_peer import OK, Peer, ask, serving


async def test_given_up_is_closed() -> None:
    """A head or a body that does not come: the limit ends it, and no connection stays."""
    for begun in (b"", b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"):
        peer = Peer([begun])
        async with serving(peer.serve) as upstream:
            with pytest.raises(TimeoutError), Limit(0.1):
                await upstream.send("POST", "/v1/x", b"", b"{}")
            await until(lambda: not upstream._pool._open, "closed")


async def test_probes_get_bodies_and_reasons() -> None:
    async with serving(Peer([OK, plain(b"", "500 Oops"), b"junk"]).serve) as upstream:
        assert await upstream.get("/health", 2.0) == b'{"ok":1}'
        with pytest.raises(UpstreamFailure, match="GET /health answers 500"):
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


@pytest.mark.long
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
        assert caught.value.kind is FailureKind.UNREACHABLE
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    async with serving(peer.serve, tls) as upstream:
        assert [await ask(upstream) for _ in range(2)] == [(200, b'{"ok":1}')] * 2
    assert peer.requests == 2
    assert peer.heads[0].startswith(b"POST /v1/x HTTP/1.1\r\nHost: localhost:")


def test_token_ids_of_a_text() -> None:
    assert read_token_ids(b'{"count":2,"tokens":[1,70000]}') == array("I", [1, 70000]).tobytes()


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"7", b"{}", b'{"tokens":null}', b'{"tokens":["a"]}', b'{"tokens":[-1]}'],
)
def test_an_answer_without_token_ids_is_a_failure(body: bytes) -> None:
    with pytest.raises(UpstreamFailure, match="/tokenize gives no token ids"):
        read_token_ids(body)


def test_token_ids_are_bounded() -> None:
    ids = list(range(MOST_IDS))
    assert len(read_token_ids(orjson.dumps({"tokens": ids}))) == 4 * MOST_IDS
    with pytest.raises(UpstreamFailure, match="too many token ids"):
        read_token_ids(orjson.dumps({"tokens": [*ids, 1, 2]}))


async def test_an_engine_that_told_no_ids_is_left_alone() -> None:
    """A request waits for the answer, so each turn would."""
    peer = Peer([OK])
    async with serving(peer.serve) as upstream:
        for _ in range(3):
            with pytest.raises(UpstreamFailure, match="/tokenize"):
                await upstream.token_ids("m", "text", 5.0)
    assert peer.requests == 1
