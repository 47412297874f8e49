"""Listening ports, whose TLS context can be exchanged, and a limit on client connections.

A request needs one descriptor for its client and one or two for instances. If clients could take
all descriptors, no instance could be reached for the clients that are already connected. A client
above the limit takes the place of the one that has been silent for longest since it connected.
Where all have spoken, it gets a 503 from one of a few reserved places and is closed. If no place is
free, it is closed without an answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, cast

import orjson
from aiohttp import web

from proxy.net.server.aiohttp_adapter import AiohttpServer, AiohttpSite
from proxy.net.server.handshakes import MOST_BYTES, Handshakes, SecuredConnection
from proxy.net.server.responses import REQUEST_ID, new_id
from proxy.net.tls import HandshakeEnd
from proxy.protocol.errors import overloaded

HANDSHAKES = 64
"""Most TLS handshakes under way on a listener without a limit on its connections."""


class Site(AiohttpSite):
    """aiohttp's site, with `exchange` for its TLS context, and on inherited sockets."""

    inherited: Sequence[socket.socket] = ()
    """Sockets to listen on instead of binding, if there are any."""
    on_handshake_failed: Callable[[HandshakeEnd], None] = staticmethod(lambda end: None)
    """Called for each TLS handshake that a client does not finish."""
    handshake_bytes: int = MOST_BYTES
    """Most memory of the handshakes under way."""

    def answerer(self) -> Callable[[], asyncio.Protocol]:
        """The protocol factory of new connections; called once."""
        return cast(Callable[[], asyncio.Protocol], self.runner.server)

    def room(self) -> int:
        """Most TLS handshakes under way."""
        return HANDSHAKES

    async def start(self) -> None:
        """Start to listen."""
        await self.register()
        self._answerer = self.answerer()
        self._handshakes = Handshakes(
            self._answerer, self.room, self.on_handshake_failed, self.handshake_bytes
        )
        if self.inherited:
            await self._listen_on(self.inherited)
            return
        self.server = await self._listen(host=self.host, port=self.wanted_port)

    async def _listen(self, **where: Any) -> asyncio.AbstractServer:
        loop: Any = (
            asyncio.get_running_loop()
        )  # typed as Any: the overloads reject keywords in a dict
        server: asyncio.AbstractServer = await loop.create_server(
            self._accepted, backlog=self.backlog, **where
        )
        return server

    def _accepted(self) -> asyncio.Protocol:
        """The protocol of a new TCP connection."""
        secure = self.ssl_context
        return self._answerer() if secure is None else SecuredConnection(self._handshakes, secure)

    def exchange(self, secure: ssl.SSLContext) -> None:
        """Accept with another TLS context from now on."""
        self.ssl_context = secure

    @property
    def sockets(self) -> list[socket.socket]:
        """The sockets that the site listens on."""
        return getattr(self.server, "sockets", [])

    async def _listen_on(self, sockets: Sequence[socket.socket]) -> None:
        """Listen on the sockets of one host; each but the first becomes a site of its own."""
        servers = [await self._listen(sock=s) for s in sockets]
        self.server = servers[0]
        for server in servers[1:]:
            beside = Site(self.runner, self.host, self.wanted_port, backlog=self.backlog)
            await beside.register()
            beside.server, beside.ssl_context = server, self.ssl_context


def no_listener(listener: str, host: str, port: int, error: OSError) -> str:
    """The failed listener and its error; asyncio's own text may name another address."""
    prefix = "admin_" if listener == "admin" else ""
    number = error.errno or 0
    why = os.strerror(number) if number > 0 else error.strerror or str(error)
    return f"cannot listen on {host}:{port} ({prefix}host, {prefix}port): {why}"


CLIENTS_RATIO = 0.45
"""Share of the descriptors for clients: less than half, as Envoy advises, so that each client can
have an instance."""
OWN_DESCRIPTORS = 32
"""Descriptors for listeners, logs, event loop, probes and reserved places."""
MOST_DESCRIPTORS = 1 << 20
"""Most descriptors asked for, since a hard limit may be far too high."""
ADMIN_MOST, ADMIN_RATIO = 64, 1 / 16
"""Most connections of the admin listener, and their share of few descriptors."""
PLACES = 8
"""Clients that may be reading a refusal at once; further ones are closed without an answer."""
REFUSED_LINGER_S = 1.0
"""Time for a refused client to read the refusal: an early close could reset it away."""
_BODY = orjson.dumps(overloaded("Service temporarily unavailable: too many connections", 503))
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n" % len(_BODY)
)
_log = logging.getLogger(__name__)


def raise_descriptor_limit() -> int:
    """Raise the soft descriptor limit as far as allowed; returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError) as error:
        _log.warning("descriptor limit stays at %d: %s", soft, error)
        return soft
    return wanted


def client_cap(wanted: int | None) -> int:
    """Most client connections: as the operator wants, else as the descriptors allow."""
    descriptors = raise_descriptor_limit()
    allowed = max(1, int(CLIENTS_RATIO * (descriptors - OWN_DESCRIPTORS)))
    if wanted is not None and wanted > allowed:
        _log.warning(
            "--max-connections %d is more than %d of %d descriptors: with so many clients "
            "instances cannot be reached",
            wanted,
            allowed,
            descriptors,
        )
    return wanted or allowed


def admin_cap() -> int:
    """Most connections of the admin listener; whoever only reaches it has no key."""
    return max(PLACES, min(ADMIN_MOST, int(ADMIN_RATIO * raise_descriptor_limit())))


class ConnectionLimit:
    """Counts client connections against the limit, and keeps the refused ones.

    `ends_idle`: one that waits for its next request gives way. Not a client's: it may have sent it.
    """

    def __init__(
        self, cap: int, on_refused: Callable[[], None], *, ends_idle: bool = False
    ) -> None:
        self.cap, self.ends_idle = cap, ends_idle
        self.refusing: set[PendingConnection] = set()
        self.on_refused = on_refused
        self._server: AiohttpServer | None = None

    @property
    def open(self) -> int:
        """Number of connections being served."""
        return self._server.open_connections if self._server is not None else 0

    def guard(self, server: AiohttpServer) -> Callable[[], asyncio.Protocol]:
        """The protocol factory to listen with, in place of `server` itself."""
        self._server = server
        return lambda: PendingConnection(self, server)


class PendingConnection(asyncio.Protocol):
    """A new connection: passed to the server, or refused with a 503 and closed if there is no room.

    This is decided when the connection is made, not when its protocol is: of a burst the loop makes
    all protocols first.
    """

    def __init__(self, limit: ConnectionLimit, server: AiohttpServer) -> None:
        self._limit, self._server = limit, server
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass the connection to the server, or refuse it, before any byte is read."""
        transport = cast(
            asyncio.Transport, transport
        )  # uvloop's is no subclass of asyncio.Transport
        limit = self._limit
        if limit.open >= limit.cap and not self._server.make_room(ends_idle=limit.ends_idle):
            self._refuse(transport)
            return
        handler = self._server()
        transport.set_protocol(handler)
        handler.connection_made(transport)

    def _refuse(self, transport: asyncio.Transport) -> None:
        """Send the 503; what the client still sends is dropped until it closes."""
        self._limit.on_refused()
        if len(self._limit.refusing) >= PLACES:
            transport.abort()
            return
        self._limit.refusing.add(self)
        own = b"%s: %s\r\n\r\n" % (REQUEST_ID.encode(), new_id().encode())
        transport.write(_REFUSAL + own + _BODY)
        if transport.can_write_eof():
            transport.write_eof()
        self._timer = asyncio.get_running_loop().call_later(REFUSED_LINGER_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the place."""
        del exc
        self._limit.refusing.discard(self)
        if self._timer is not None:
            self._timer.cancel()


class GuardedSite(Site):
    """A listener with a limit on its connections."""

    def __init__(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        limit: ConnectionLimit,
        *,
        backlog: int,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(runner, host, port, backlog=backlog, ssl_context=ssl_context)
        self._limit = limit

    def answerer(self) -> Callable[[], asyncio.Protocol]:
        """The server's factory behind the limit."""
        server = self.runner.server
        assert isinstance(server, AiohttpServer)
        return self._limit.guard(server)

    def room(self) -> int:
        """Free connections, including places reserved for refused clients, who need an answer."""
        return max(0, self._limit.cap - self._limit.open) + PLACES
