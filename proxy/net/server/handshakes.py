"""TLS handshakes with clients: their deadline, and a limit on those under way.

Before its handshake is over a client has sent no request, yet it holds a descriptor and memory. An
honest handshake is done within a few round trips. So the oldest one is ended when a new one finds
no room: silent clients make room for others. For want of memory it is the oldest one of the address
that has most.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from proxy.core.admission.largest_pays import LargestPays
from proxy.net.secured import Secured, Shaking
from proxy.net.tls import HandshakeEnd

HANDSHAKE_S = 10.0
"""A client that has not finished the TLS handshake after this time is closed."""


COST_BYTES = 80 << 10
"""Most memory of one: OpenSSL's buffers, and a record of 16 KiB that is not complete."""
MOST_BYTES, MEMORY_PART = 256 << 20, 8
"""Most memory of those of a listener, and its part of a memory limit."""


def most_bytes(limit_bytes: int | None) -> int:
    """The room for handshakes. `limit_bytes`: of the process."""
    return MOST_BYTES if limit_bytes is None else min(MOST_BYTES, limit_bytes // MEMORY_PART)


class Handshakes:
    """The TLS handshakes under way on one listener, oldest first.

    `make_protocol` makes the protocol of a connection whose handshake is over. `room` is how many
    may be under way, and `bytes_` what they may have together. `on_failed` is called for each that
    is not finished.
    """

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        room: Callable[[], int],
        on_failed: Callable[[HandshakeEnd], None],
        bytes_: int = MOST_BYTES,
    ) -> None:
        self._held: LargestPays[Secured] = LargestPays(bytes_)
        self._make_protocol, self._room, self._on_failed = make_protocol, room, on_failed
        self._shaking = Shaking()
        self._running: dict[Secured, asyncio.TimerHandle] = {}

    def begin(self, transport: asyncio.Transport, secure: ssl.SSLContext) -> None:
        """Begin the handshake of a TCP connection from which nothing was read yet."""
        while self._running and len(self._running) >= self._room():
            self._end(next(iter(self._running)), HandshakeEnd.DISPLACED)
        made = Secured(secure, self._make_protocol, self._shaken, self._shaking)
        loop = asyncio.get_running_loop()
        self._running[made] = loop.call_later(HANDSHAKE_S, self._end, made, HandshakeEnd.LATE)
        transport.set_protocol(made)
        made.connection_made(transport)
        if made in self._running:
            oldest = self._held.hold(made, made.owner, COST_BYTES)
            if oldest is not None:
                self._end(oldest, HandshakeEnd.DISPLACED)

    def _shaken(self, connection: Secured, error: OSError | None) -> None:
        self._held.drop(connection)
        timer = self._running.pop(connection, None)
        if timer is not None:
            timer.cancel()
            if error is not None:
                self._on_failed(HandshakeEnd.FAILED)

    def _end(self, connection: Secured, end: HandshakeEnd) -> None:
        self._running.pop(connection).cancel()
        self._held.drop(connection)
        self._on_failed(end)
        connection.abort()


class SecuredConnection(asyncio.Protocol):
    """A new TCP connection to a port that speaks TLS: passed on to its handshake at once.

    Its handshake begins when the connection is made, not when its protocol is: of a burst the loop
    makes all protocols first.
    """

    def __init__(self, handshakes: Handshakes, secure: ssl.SSLContext) -> None:
        self._handshakes, self._secure = handshakes, secure

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, before any byte is read."""
        # uvloop's is no subclass of asyncio.Transport
        self._handshakes.begin(cast(asyncio.Transport, transport), self._secure)
