"""A relay before an engine that keeps what it is asked, and can hold a request back on its way."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import orjson

READ_BYTES = 1 << 16


class Tap:
    """Listens on a port of its own, in front of `port`.

    The end of a request with `hold` in it waits for `go`; `held` says that it has come. So a test
    can do something between two legs, or while one is under way.
    """

    def __init__(self, port: int, hold: bytes | None = None) -> None:
        self._port = port
        self._hold = hold
        self.held = asyncio.Event()
        self.go = asyncio.Event()
        self._asked: list[bytearray] = []
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        """What the proxy is told instead of the engine's own."""
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Break every connection that is open."""
        for writer in self._open:
            writer.transport.abort()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The JSON bodies that went to the engine, as it reads them."""
        return [body for asked in self._asked for body in _bodies(bytes(asked))]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = bytearray()
        self._asked.append(asked)
        try:
            there, to = await asyncio.open_connection("127.0.0.1", self._port)
        except ConnectionError:
            writer.transport.abort()
            return
        self._open |= {writer, to}
        try:
            await asyncio.gather(
                self._pass(reader, to, asked, self._hold),
                self._pass(there, writer, bytearray(), None),
            )
        except ConnectionError:
            pass
        finally:
            self._open -= {writer, to}
            writer.transport.abort()
            to.transport.abort()

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        seen: bytearray,
        hold: bytes | None,
    ) -> None:
        while data := await reader.read(READ_BYTES):
            seen += data
            if hold is not None and hold in seen[-len(data) - len(hold) :]:
                self.held.set()
                await self.go.wait()
            writer.write(data)
            await writer.drain()
        writer.write_eof()  # of one direction: the other may go on


def _bodies(asked: bytes) -> list[dict[str, Any]]:
    found = []
    while b"\r\n\r\n" in asked:
        head, asked = asked.split(b"\r\n\r\n", 1)
        lengths = [h for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:")]
        length = int(lengths[0].split(b":")[1]) if lengths else 0
        assert b"transfer-encoding" not in head.lower()
        if length:
            found.append(orjson.loads(asked[:length]))
        asked = asked[length:]
    return found
