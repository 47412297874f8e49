"""TLS handshakes with clients: their deadline, and a limit on those under way.

Before its handshake is over a client has sent no request, yet it holds a descriptor. An honest
handshake is done within a few round trips. So the oldest one is ended when a new one finds no room:
silent clients make room for others.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from proxy.net.tls import HandshakeEnd

HANDSHAKE_S = 10.0
"""A client that has not finished the TLS handshake after this time is closed."""
GOODBYE_S = 2.0
"""Time for a client's TLS close_notify before its connection is closed without it."""


class Handshakes:
    """The TLS handshakes under way on one listener, oldest first.

    `make_protocol` makes the protocol of a connection whose handshake is over. `room` is how many
    may be under way. `on_failed` is called for each that is not finished.
    """

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        room: Callable[[], int],
        on_failed: Callable[[HandshakeEnd], None],
    ) -> None:
        self._make_protocol, self._room, self._on_failed = make_protocol, room, on_failed
        self._running: dict[asyncio.Task[None], socket.socket] = {}

    def begin(self, transport: asyncio.Transport, secure: ssl.SSLContext) -> None:
        """Begin the handshake of a TCP connection from which nothing was read yet.

        Its socket goes on in a transport with TLS, and `transport` is closed: a transport that
        already reads would lose the client's first bytes.
        """
        while self._running and len(self._running) >= self._room():
            self._displace()
        try:
            accepted = transport.get_extra_info("socket").fileno()
            sock = socket.socket(fileno=os.dup(accepted))
        except OSError:
            self._on_failed(HandshakeEnd.FAILED)
            return
        finally:
            transport.abort()
        task = asyncio.get_running_loop().create_task(self._shake(sock, secure))
        self._running[task] = sock
        task.add_done_callback(self._ended)

    def _displace(self) -> None:
        """End the oldest handshake: its task sees the end of the connection, and ends."""
        oldest = next(iter(self._running))
        with suppress(OSError):
            self._running.pop(oldest).shutdown(socket.SHUT_RDWR)
        self._on_failed(HandshakeEnd.DISPLACED)

    async def _shake(self, sock: socket.socket, secure: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        end = HandshakeEnd.FAILED
        try:
            await loop.connect_accepted_socket(
                self._make_protocol,
                sock,
                ssl=secure,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=GOODBYE_S,
            )
            return
        except ConnectionAbortedError:  # how asyncio and uvloop say that it took too long
            end = HandshakeEnd.LATE
        except OSError:
            pass
        sock.close()
        if asyncio.current_task() in self._running:
            self._on_failed(end)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)


class SecuredConnection(asyncio.Protocol):
    """A new TCP connection to a port that speaks TLS: passed on to its handshake at once."""

    def __init__(self, handshakes: Handshakes, secure: ssl.SSLContext) -> None:
        self._handshakes, self._secure = handshakes, secure

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, before any byte is read."""
        # uvloop's is no subclass of asyncio.Transport
        self._handshakes.begin(cast(asyncio.Transport, transport), self._secure)
