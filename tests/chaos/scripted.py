"""An engine that answers by script over the raw socket: what no simulator would ever say."""

from __future__ import annotations

import asyncio
from typing import Self

from tests.support.harness import ANSWER, Script, plain, says, until

MODEL, CALM_MODEL = "sim-8b", "calm-8b"
GOOD = says(ANSWER)
ENGINE_SECRET = "canary-engine-error-7c1d"
"""Stands in error texts of engines: its client may read it, no log."""


class Scripted:
    """Answers its n-th POST with the n-th script, the last one repeated; GETs from `gets`.

    It is its own bootstrap server (`/query`). `busy` counts requests that are being answered.
    """

    def __init__(
        self, *scripts: Script, model: str = MODEL, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._host = host
        self.scripts = list(scripts) or [GOOD]
        self.bodies: list[bytes] = []
        self.heads: list[bytes] = []
        self.busy = 0
        self.open: set[asyncio.StreamWriter] = set()
        self.gets: dict[str, bytes | Script] = {
            "/health": plain(b""),
            "/v1/models": plain(b'{"data":[{"id":"%s"}]}' % model.encode()),
            "/metrics": plain(b""),
            "/query": plain(b'{"0":{"engine_id":"engine-0","worker_addr":{}}}'),
        }
        self._server: asyncio.Server
        self.port = port

    async def __aenter__(self) -> Self:
        where = (self._host, self.port)
        self._server = await asyncio.start_server(self._serve, *where, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for writer in list(self.open):
            writer.transport.abort()
        await until(lambda: not self.open, "every connection has ended")

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open.discard(writer)
            writer.close()

    async def _answer(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if head.startswith(b"GET"):
            script = self.gets.get(head.split()[1].decode(), plain(b"{}", "404 Not Found"))
        else:
            body = await reader.readexactly(_length(head))
            self.heads.append(head)
            self.bodies.append(body)
            script = self.scripts[min(len(self.bodies), len(self.scripts)) - 1]
            self.busy += 1
        try:
            if isinstance(script, bytes):
                script = says(script)
            await script(reader, writer)
        finally:
            if not head.startswith(b"GET"):
                self.busy -= 1


def _length(head: bytes) -> int:
    lines = (line for line in head.lower().splitlines() if line.startswith(b"content-length"))
    return next((int(line.split(b":")[1]) for line in lines), 0)
