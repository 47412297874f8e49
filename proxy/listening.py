"""A listening port whose TLS context can be exchanged while it is in use."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import cast

from aiohttp import web


class Site(web.TCPSite):
    """As aiohttp's, and `exchange`."""

    def answerer(self) -> Callable[[], asyncio.Protocol]:
        """What makes a new connection's protocol; asked once."""
        return cast(Callable[[], asyncio.Protocol], self._runner.server)

    async def start(self) -> None:
        """Listen."""
        await super(web.TCPSite, self).start()
        self._answerer = self.answerer()
        self._server = await asyncio.get_running_loop().create_server(
            self._answerer,
            self._host,
            self._port,
            ssl=self._ssl_context,
            backlog=self._backlog,
        )

    async def exchange(self, secure: ssl.SSLContext) -> None:
        """Accept with another context from now on: on the same sockets, so nobody is refused.

        A host may be several sockets; each but the first becomes a site of its own.
        """
        old, loop = self._server, asyncio.get_running_loop()
        assert old is not None
        sockets: list[socket.socket] = getattr(old, "sockets", [])
        shared = [socket.socket(fileno=os.dup(s.fileno())) for s in sockets]
        servers = [
            await loop.create_server(self._answerer, sock=s, ssl=secure, backlog=self._backlog)
            for s in shared
        ]
        self._take(servers[0], secure)
        for server in servers[1:]:
            beside = Site(self._runner, self._host, self._port, backlog=self._backlog)
            await super(web.TCPSite, beside).start()
            beside._answerer = self._answerer
            beside._take(server, secure)
        old.close()

    def _take(self, server: asyncio.AbstractServer, secure: ssl.SSLContext) -> None:
        self._server, self._ssl_context = server, secure
