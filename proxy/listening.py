"""A listening port whose TLS context can be exchanged while it is in use."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, cast

from aiohttp import web

HANDSHAKE_S = 10.0
"""A client that has not shaken hands by then holds a connection for nothing."""
GOODBYE_S = 2.0
"""How long a client may take to say goodbye in TLS before its connection is closed without."""


class Site(web.TCPSite):
    """As aiohttp's, and `exchange`, and on sockets that were handed down."""

    inherited: Sequence[socket.socket] = ()
    """Listen on these, if there are any, instead of binding."""

    def answerer(self) -> Callable[[], asyncio.Protocol]:
        """What makes a new connection's protocol; asked once."""
        return cast(Callable[[], asyncio.Protocol], self._runner.server)

    async def start(self) -> None:
        """Listen."""
        await super(web.TCPSite, self).start()
        self._answerer = self.answerer()
        if self.inherited:
            await self._listen_on(self.inherited, self._ssl_context)
            return
        self._server = await self._listen(self._ssl_context, host=self._host, port=self._port)

    async def _listen(self, secure: ssl.SSLContext | None, **where: Any) -> asyncio.AbstractServer:
        loop: Any = asyncio.get_running_loop()  # its overloads know no keywords by name
        limits = {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": GOODBYE_S}
        given = where | (limits if secure is not None else {})
        server: asyncio.AbstractServer = await loop.create_server(
            self._answerer, ssl=secure, backlog=self._backlog, **given
        )
        return server

    async def exchange(self, secure: ssl.SSLContext) -> None:
        """Accept with another context from now on: on the same sockets, so nobody is refused."""
        old = self._server
        assert old is not None
        shared = [socket.socket(fileno=os.dup(s.fileno())) for s in self.sockets]
        await self._listen_on(shared, secure)
        old.close()

    @property
    def sockets(self) -> list[socket.socket]:
        """Those that it listens on."""
        return getattr(self._server, "sockets", [])

    async def _listen_on(
        self, sockets: Sequence[socket.socket], secure: ssl.SSLContext | None
    ) -> None:
        """A host may be several sockets; each but the first becomes a site of its own."""
        servers = [await self._listen(secure, sock=s) for s in sockets]
        self._take(servers[0], secure)
        for server in servers[1:]:
            beside = Site(self._runner, self._host, self._port, backlog=self._backlog)
            await super(web.TCPSite, beside).start()
            beside._answerer = self._answerer
            beside._take(server, secure)

    def _take(self, server: asyncio.AbstractServer, secure: ssl.SSLContext | None) -> None:
        self._server, self._ssl_context = server, secure


def no_listener(listener: str, host: str, port: int, error: OSError) -> str:
    """Which of them, and why; asyncio's own words name an address that may be another one's."""
    prefix = "admin_" if listener == "admin" else ""
    number = error.errno or 0
    why = os.strerror(number) if number > 0 else error.strerror or str(error)
    return f"cannot listen on {host}:{port} ({prefix}host, {prefix}port): {why}"
