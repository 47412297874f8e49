"""The connections to one address: made when needed, kept while idle, the last used first.

vLLM closes an idle connection after 5 s, so the pool keeps them for 4. The connection that became
idle last is used first, so that after a peak the others grow old and are closed. All pools share
TLS, the proxy's key for instances, and the resolver (`ConnectOptions`).
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from copy import copy
from functools import partial
from urllib.parse import urlsplit

from proxy.core.types import FailureKind
from proxy.net import tcp
from proxy.net.addresses import Resolver, literal
from proxy.net.cheap_tls import by_the_system
from proxy.net.secured import Secured, Shaking
from proxy.net.timeouts import Limit
from proxy.net.upstream.connection import UpstreamConnection
from proxy.net.upstream.response import Share
from proxy.protocol.errors import UpstreamFailure


class ConnectOptions:
    """TLS, key and resolver of all pools; changed by a reload, for later connections and probes.

    `auth`: Authorization header line for the proxy's own requests, if instances want a key.
    `shaking`: TLS handshakes that go on.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, auth: bytes = b"") -> None:
        self._tls = tls
        self.auth = auth
        self.resolver = Resolver()
        self.shaking = Shaking()

    async def tls(self) -> ssl.SSLContext:
        """The TLS context for https instances; with the system's CAs if no other was given.

        The system's CAs are read in a thread, once: it takes some 20 ms.
        """
        if self._tls is None:
            return await self._read()
        return self._tls

    async def _read(self) -> ssl.SSLContext:
        made = await asyncio.to_thread(by_the_system)
        if self._tls is None:  # a reload may have set another one meanwhile
            self._tls = made
        return self._tls

    def change(self, tls: ssl.SSLContext | None, auth: bytes) -> None:
        """Replace TLS and key."""
        self._tls, self.auth = tls, auth


KEEPALIVE_S = 4.0
_OUR_OWN = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of the proxy's own machine; the instance is not at fault."""


class Pool:
    """Connections to the scheme, host and port of `url`; `share`: of what their answers hold."""

    def __init__(
        self,
        url: str,
        connect_timeout_s: float,
        connect_options: ConnectOptions,
        share: Share | None = None,
    ) -> None:
        parts = urlsplit(url)
        self._is_tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._is_literal = literal(self._host) is not None
        self._port = parts.port or (443 if self._is_tls else 80)
        self.host_header = parts.netloc.encode()
        self._connect_options = connect_options
        self._connect_timeout_s, self._share = connect_timeout_s, share
        self._open: set[UpstreamConnection] = set()
        self._idle: list[UpstreamConnection] = []
        self._sweep: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def in_use(self) -> int:
        """Number of connections that serve a request, or are still open after one was given up."""
        return len(self._open) - len(self._idle)

    def is_heard_within(self, seconds: float) -> bool:
        """Whether an answer that has begun, and is not over, has gone on in these last seconds."""
        return any(connection.is_heard_within(seconds) for connection in self._open)

    def end_mute_answers(self, seconds: float, detail: str) -> int:
        """See `Upstream.end_mute_answers`."""
        if not tcp.TELLS_LAST_DATA or self.is_heard_within(seconds):
            return 0
        failure = UpstreamFailure(FailureKind.WENT_DOWN, detail)
        return sum(connection.give_up(failure) for connection in list(self._open))

    def idle(self) -> UpstreamConnection | None:
        """A kept connection, which may turn out to be stale; None if there is none."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed and not self._is_old(connection):
                return connection
            connection.abort()
        return None

    def _is_old(self, connection: UpstreamConnection) -> bool:
        return connection.loop.time() - connection.idle_since_s >= KEEPALIVE_S

    async def connect(self) -> UpstreamConnection:
        """Make a fresh connection; raises UpstreamFailure: CONNECT where it is refused."""
        try:
            with Limit(self._connect_timeout_s):
                connection = await self._connected()
        except TimeoutError as error:
            late = "no connection in time (--connect-timeout)"
            raise UpstreamFailure(FailureKind.UNREACHABLE, late) from error
        except ssl.SSLError as error:
            raise UpstreamFailure(FailureKind.UNREACHABLE, "TLS: " + _plain(error)) from error
        except ConnectionRefusedError as error:
            raise UpstreamFailure(FailureKind.CONNECT, _plain(error)) from error
        except OSError as error:
            kind = FailureKind.NO_ROOM if error.errno in _OUR_OWN else FailureKind.UNREACHABLE
            raise UpstreamFailure(kind, _plain(error)) from error
        self._open.add(connection)
        if self._is_closed:
            connection.abort()
        return connection

    async def _connected(self) -> UpstreamConnection:
        """Connect to the first address that accepts; raises the last address's OSError."""
        if self._is_literal:
            return await self._connect_to(self._host)
        addresses = await self._connect_options.resolver.addresses(self._host, self._port)
        for address in addresses[:-1]:
            try:
                return await self._connect_to(address)
            except OSError:
                continue
        return await self._connect_to(addresses[-1])

    async def _connect_to(self, address: str) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        connection = UpstreamConnection(loop, self._rest, self._lost, self._share)
        if not self._is_tls:
            await loop.create_connection(lambda: connection, address, self._port)
            return connection
        secure = await self._connect_options.tls()
        shaken: asyncio.Future[OSError | None] = loop.create_future()
        on_shaken, shaking = partial(_tell, shaken), self._connect_options.shaking
        secured = Secured(secure, lambda: connection, on_shaken, shaking, self._host)
        is_up = False
        try:
            await loop.create_connection(lambda: secured, address, self._port)
            error = await shaken
            is_up = error is None
        finally:
            # Whoever is cancelled may be so after the handshake's end, before this has gone on.
            if not is_up:
                secured.abort()
        if error is not None:
            raise copy(error)  # this frame keeps it: see UpstreamFailure.again
        return connection

    def _rest(self, connection: UpstreamConnection) -> None:
        """Keep a connection that is free again."""
        if self._is_closed:
            connection.abort()
            return
        connection.idle_since_s = connection.loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = connection.loop.call_later(KEEPALIVE_S, self._close_old)

    def _close_old(self) -> None:
        self._sweep = None
        while self._idle and (self._idle[0].is_closed or self._is_old(self._idle[0])):
            self._idle.pop(0).abort()
        if self._idle:
            loop = self._idle[0].loop
            due_s = self._idle[0].idle_since_s + KEEPALIVE_S
            self._sweep = loop.call_later(max(0.05, due_s - loop.time()), self._close_old)

    def _lost(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def abort(self) -> None:
        """Close every connection at once."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    async def close(self) -> None:
        """Close every connection."""
        self.abort()
        await asyncio.sleep(0)  # lets TLS connections send their close_notify


def _tell(shaken: asyncio.Future[OSError | None], secured: Secured, error: OSError | None) -> None:
    """Tell whoever waits that a handshake is over."""
    del secured
    if not shaken.done():
        shaken.set_result(error)


def _plain(error: OSError) -> str:
    """The error's text for clients, without addresses and names of libraries."""
    if isinstance(error, ssl.SSLCertVerificationError):
        # What is behind a comma is the name or address that was asked for.
        return f"its certificate is not trusted: {error.verify_message.split(', ')[0][:100]}"
    text = getattr(error, "reason", None) if isinstance(error, ssl.SSLError) else error.strerror
    return text.split(" [")[0][:100] if text else "the connection failed"
