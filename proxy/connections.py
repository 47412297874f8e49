"""How many clients may be connected: a part of the process's file descriptors, never all of them.

A request needs one descriptor for its client and one or two for instances. If clients could take
them all, no instance could be reached for those who are already in. What comes above the cap is
told so with a 503 from one of a few reserved places, and closed; above those it is just closed.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import ssl
from collections.abc import Callable
from typing import cast

from aiohttp import web

CLIENTS_RATIO = 0.45
"""Of the descriptors: less than half, as Envoy advises, so each client can have an instance."""
OWN_DESCRIPTORS = 32
"""Listeners, logs, event loop, probes, the reserved places."""
MOST_DESCRIPTORS = 1 << 20
"""A hard limit may be absurd; more than this is not asked for."""
PLACES = 8
"""Refusals that are being said; others are closed without a word."""
LINGER_S = 1.0
"""How long a refused client may take to read it: an early close could reset the words away."""
_BODY = (
    b'{"message":"Service temporarily unavailable: too many connections",'
    b'"type":"service_unavailable","code":503,"error":{"message":"Service temporarily unavailable: '
    b'too many connections","type":"service_unavailable","code":503,"param":null}}'
)
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)
_log = logging.getLogger(__name__)


def raise_descriptor_limit() -> int:
    """Take the soft limit as high as is allowed; returns what it is now."""
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


def default_cap(descriptors: int) -> int:
    """How many clients may be connected when nobody says."""
    return max(1, int(CLIENTS_RATIO * (descriptors - OWN_DESCRIPTORS)))


class Door:
    """Decides for each new connection who answers it: the server, or a refusal."""

    def __init__(self, cap: int, on_refused: Callable[[], None]) -> None:
        self.cap = cap
        self.refusing: set[Refusal] = set()
        self._on_refused = on_refused
        self._servers: list[web.Server] = []

    @property
    def open(self) -> int:
        """Connections that are being served."""
        return sum(len(server._connections) for server in self._servers)

    def guard(self, server: web.Server) -> Callable[[], asyncio.Protocol]:
        """The protocol factory to listen with, instead of `server` itself."""
        self._servers.append(server)

        def answer() -> asyncio.Protocol:
            if self.open < self.cap:
                return cast(asyncio.Protocol, server())
            self._on_refused()
            return Refusal(self)

        return answer


class Refusal(asyncio.Protocol):
    """One client too many: says so where there is a place for it, and closes."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer before anything was asked; what comes in is dropped until the client closes."""
        assert isinstance(transport, asyncio.Transport)
        if len(self._door.refusing) >= PLACES:
            transport.abort()
            return
        self._door.refusing.add(self)
        transport.write(_REFUSAL)
        if transport.can_write_eof():
            transport.write_eof()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LINGER_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """The place is free again."""
        del exc
        self._door.refusing.discard(self)
        if self._timer is not None:
            self._timer.cancel()


class GuardedSite(web.TCPSite):
    """A listener behind a door."""

    def __init__(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        door: Door,
        *,
        backlog: int,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(runner, host, port, backlog=backlog, ssl_context=ssl_context)
        self._door = door

    async def start(self) -> None:
        """Listen."""
        await super(web.TCPSite, self).start()
        server = self._runner.server
        assert isinstance(server, web.Server)
        self._server = await asyncio.get_running_loop().create_server(
            self._door.guard(server),
            self._host,
            self._port,
            ssl=self._ssl_context,
            backlog=self._backlog,
        )
