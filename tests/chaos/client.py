"""A raw HTTP/1.1 client that knows how an answer ended, and sends what no library would."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson

from tests.chaos.faultproxy import reset

ANSWER_S = 30.0
"""Nothing takes this long: an answer that is not there by then never comes."""
_LINE_BYTES = 1 << 22


@dataclass
class Got:
    """An answer. `is_clean`: it ended as HTTP says, not with the connection."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    is_clean: bool = False
    first_s: float | None = None
    """The loop's time of its first byte."""
    interim: list[int] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object; fails where there is none."""
        found = self.json["error"]
        assert isinstance(found, dict)
        return found

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def events(self) -> list[bytes]:
        """The stream's events, comments left out."""
        found = [e.strip(b"\n") for e in self.body.replace(b"\r\n", b"\n").split(b"\n\n")]
        return [e for e in found if e and not e.startswith(b":")]

    @property
    def is_done(self) -> bool:
        return b"data: [DONE]" in self.events

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Error events inside the stream."""
        events = (e for e in self.events if b'"error"' in e and e.startswith(b"data: {"))
        return [orjson.loads(e[6:])["error"] for e in events]

    @property
    def text(self) -> str:
        """What the model said."""
        if not self.is_stream:
            return str(self.json["choices"][0]["message"]["content"])
        told = (e for e in self.events if e.startswith(b"data: {"))
        choices = [c for e in told for c in orjson.loads(e[6:]).get("choices", ())]
        return "".join(c.get("delta", {}).get("content") or "" for c in choices)


class Connection:
    """One connection to the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def get(self, *, is_head: bool = False) -> Got:
        """The next answer; raises ConnectionError when there is none."""
        async with asyncio.timeout(ANSWER_S):
            return await self._get(is_head=is_head)

    async def _get(self, *, is_head: bool) -> Got:
        interim: list[int] = []
        while True:
            try:
                head = await self.reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError as error:
                raise ConnectionResetError(f"no answer, only {error.partial!r}") from error
            got = _head(head)
            got.first_s = time.monotonic()
            if got.status >= 200:
                break
            interim.append(got.status)
        got.interim = interim
        if is_head or got.status in (204, 304):
            got.is_clean = True
            return got
        body = bytearray()
        try:
            await self._body(got, body)
            got.is_clean = True
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        got.body = bytes(body)
        return got

    async def _body(self, got: Got, body: bytearray) -> None:
        if "chunked" in got.headers.get("transfer-encoding", ""):
            while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
                await self._exactly(body, size)
                await self.reader.readexactly(2)
            while await self.reader.readuntil(b"\r\n") != b"\r\n":
                got.headers["trailer-seen"] = "yes"
        elif (length := got.headers.get("content-length")) is not None:
            await self._exactly(body, int(length))
        else:
            while piece := await self.reader.read(65536):
                body += piece

    async def _exactly(self, body: bytearray, size: int) -> None:
        while size > 0:
            piece = await self.reader.read(min(size, 65536))
            if not piece:
                raise asyncio.IncompleteReadError(b"", size)
            body += piece
            size -= len(piece)

    def close(self, how: str = "FIN") -> None:
        if how == "RST":
            reset(self.writer)
        else:
            self.writer.close()


async def connect(url: str, *, receive_bytes: int | None = None) -> Connection:
    """A connection, of an https URL with TLS and whatever certificate.

    `receive_bytes` sets the kernel's buffer, for a client that reads little.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    sock = socket.socket()
    sock.setblocking(False)
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
    secure: dict[str, Any] = {}
    if parts.scheme == "https":
        secure = {"ssl": _trusts_all(), "server_hostname": parts.hostname}
    reader, writer = await asyncio.open_connection(sock=sock, limit=_LINE_BYTES, **secure)
    return Connection(reader, writer)


def _trusts_all() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def request(
    body: bytes | None,
    headers: Mapping[str, str],
    path: str = "/v1/chat/completions",
    method: str = "POST",
) -> bytes:
    """A request's bytes. A header that is given replaces ours."""
    ours = {"Host": "proxy", "Content-Type": "application/json"}
    if body is not None:
        ours["Content-Length"] = str(len(body))
    lines = "".join(f"{name}: {value}\r\n" for name, value in (ours | dict(headers)).items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + (body or b"")


async def exchange(url: str, data: bytes, before: Callable[[], None] = lambda: None) -> Got:
    """Send these bytes on a connection of their own; the answer."""
    connection = await connect(url)
    try:
        before()
        connection.send(data)
        return await connection.get(is_head=data.startswith(b"HEAD "))
    finally:
        connection.close()


def _head(head: bytes) -> Got:
    lines = head.decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines[1:] if ":" in line)
    return Got(int(lines[0].split()[1]), {k.lower(): v.strip() for k, v in pairs})
