"""Instances by the EndpointSlices of a Kubernetes service: a list, then a watch, again and again.

A deleted slice that no event tells of is found by the list with which each connection begins. A
watch ends after WATCH_S, or when nothing is heard of it for QUIET_S: a connection may be half open.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.config.regular_files import read_regular
from proxy.config.values import DiscoverAt
from proxy.core.types import FailureKind, Instance
from proxy.fleet.discovery.base import DiscoveryError, Found, Tell
from proxy.fleet.discovery.slices import GONE, Lines, OutdatedError, Slices
from proxy.net.cheap_tls import cheap
from proxy.net.peer_documents import TooMuchError, read_json
from proxy.net.timeouts import Limit, MayHang
from proxy.net.upstream.client import Upstream
from proxy.net.upstream.pool import ConnectOptions
from proxy.net.upstream.response import UpstreamResponse
from proxy.protocol.errors import UpstreamFailure

READ_S = 5.0
"""Longest time to read token and CA."""
LIST_BYTES = LINE_BYTES = 2 << 20
"""Most bytes of a list, and of one event of a watch."""
SECRET_BYTES = 64 << 10
PROVEN_S = 30.0
"""A set that stays as it is is told so often: it is proven by whatever the watch tells."""
REST_S, SLICE_S = 0.1, 0.002
"""Pause before more of a watch is read, and CPU time after which other tasks have their turn."""
TOKEN, CA = "token", "ca.crt"
HOST, PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_TOKEN = re.compile(rb"[!-~]+")
_MEANS = {
    401: ": the token is not accepted",
    403: ": the Role lacks endpointslices of discovery.k8s.io: get, list, watch",
    404: ": is this a Kubernetes API?",
}


@dataclass(frozen=True, slots=True)
class Times:
    """Limits of time: to connect, of a list and a watch's head, of silence, of a whole watch.

    `tell_s`: pause after a changed set was told, so that the fleet changes at most so often.
    """

    connect_s: float = 5.0
    list_s: float = 10.0
    quiet_s: float = 60.0
    watch_s: float = 300.0
    tell_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Api:
    """Where the API is, and the folder with the token and the CA."""

    url: str
    account: Path

    @classmethod
    def named_by(cls, environ: Mapping[str, str], account: Path) -> Api:
        """The API that Kubernetes names to its pods; raises DiscoveryError."""
        host, port = environ.get(HOST, ""), environ.get(PORT, "443")
        if not host or not port.isdecimal():
            raise DiscoveryError(f"{HOST} and {PORT} do not name the API: is this a pod?")
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", account)


@dataclass(frozen=True, slots=True)
class _Connected:
    upstream: Upstream
    headers: bytes


class Kubernetes:
    """The pods of one service that are ready."""

    def __init__(self, at: DiscoverAt, api: Api, times: Times) -> None:
        self._api, self._times = api, times
        self._files = MayHang[tuple[bytes, bytes]]("service account")
        label = f"labelSelector=kubernetes.io%2Fservice-name%3D{at.what}"
        group = "/apis/discovery.k8s.io/v1"
        self._path = f"{group}/namespaces/{at.scope}/endpointslices?{label}"

    async def look(self) -> Found:
        """Ask for the list once; raises DiscoveryError."""
        slices = Slices()
        async with self._connected() as api:
            await self._list(api, slices)
        return slices.found()

    async def follow(self, tell: Tell) -> None:
        """List, then watch until the watch ends; raises DiscoveryError."""
        slices = Slices()
        async with self._connected() as api:
            await self._list(api, slices)
            await tell(slices.found())
            try:
                with Limit(self._times.watch_s):
                    await self._watch(api, slices, tell)
            except (OutdatedError, TimeoutError):
                return  # the caller begins again, with a list

    async def _list(self, api: _Connected, slices: Slices) -> None:
        try:
            with Limit(self._times.list_s):
                reply = await self._answer(api, self._path)
                try:
                    body = await reply.read(LIST_BYTES + 1)
                finally:
                    reply.close()
        except TimeoutError as error:
            raise DiscoveryError(f"no list in {self._times.list_s:g} s") from error
        except UpstreamFailure as failure:
            raise DiscoveryError(failure.detail) from failure
        if len(body) > LIST_BYTES:
            raise DiscoveryError(f"its list has more than {LIST_BYTES} bytes")
        slices.replace(_document(body))

    async def _watch(self, api: _Connected, slices: Slices, tell: Tell) -> None:
        """Take events until the API ends the watch; TimeoutError where it is silent."""
        since = f"&resourceVersion={slices.version}" if slices.version else ""
        ends = f"&timeoutSeconds={self._times.watch_s:.0f}"
        path = f"{self._path}&watch=true&allowWatchBookmarks=true{since}{ends}"
        lines, loop = Lines(LINE_BYTES), asyncio.get_running_loop()
        told_s = loop.time()
        try:
            with Limit(self._times.list_s):
                reply = await self._answer(api, path)
            try:
                while events := await self._events(reply, lines):
                    rest_s = REST_S
                    if await _apply(slices, events) or loop.time() - told_s >= PROVEN_S:
                        await tell(slices.found())
                        told_s, rest_s = loop.time(), self._times.tell_s
                    await asyncio.sleep(rest_s)
            finally:
                reply.close()
        except UpstreamFailure as failure:
            if failure.status is not None and failure.status != GONE:
                raise DiscoveryError(failure.detail) from failure

    async def _events(self, reply: UpstreamResponse, lines: Lines) -> list[bytes]:
        """The next whole lines; none where the watch has ended."""
        with Limit(self._times.quiet_s):
            while True:
                data = b"".join(reply.body)
                reply.body.clear()
                if events := [*lines.feed(data)]:
                    return events
                if not await reply.more():
                    return []

    async def _answer(self, api: _Connected, path: str) -> UpstreamResponse:
        """The answer whose status is 200; raises UpstreamFailure."""
        reply = await api.upstream.send("GET", path, api.headers, None)
        if reply.status != 200:
            reply.close()
            said = f"the API answers {reply.status}{_MEANS.get(reply.status, '')}"
            raise UpstreamFailure(FailureKind.SERVER_ERROR, said, status=reply.status)
        return reply

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[_Connected]:
        """Connections with the token and the CA as they are now: Kubernetes renews them."""
        try:
            token, ca = await self._files.run(lambda: _read(self._api.account), READ_S)
            options = ConnectOptions(_trusting(ca) if self._api.url.startswith("https") else None)
        except (ValueError, OSError) as error:  # SSLError is an OSError
            raise DiscoveryError(f"service account {self._api.account}: {error}") from error
        instance = Instance("kubernetes", self._api.url)
        upstream = Upstream(instance, self._times.connect_s, connect_options=options)
        lines = b"Accept: application/json\r\nAuthorization: Bearer " + token + b"\r\n"
        try:
            yield _Connected(upstream, lines)
        finally:
            await upstream.close()


async def _apply(slices: Slices, events: Iterable[bytes]) -> bool:
    """Take events in turns with other tasks; returns whether a slice has changed."""
    loop, has_changed = asyncio.get_running_loop(), False
    turn_s = loop.time() + SLICE_S
    for event in events:
        has_changed |= slices.apply(_document(event))
        if loop.time() > turn_s:
            await asyncio.sleep(0)
            turn_s = loop.time() + SLICE_S
    return has_changed


def _read(account: Path) -> tuple[bytes, bytes]:
    """Token and CA. Reads files."""
    token, ca = (read_regular(account / name, SECRET_BYTES) for name in (TOKEN, CA))
    if not _TOKEN.fullmatch(token.strip()):
        raise ValueError(f"{TOKEN} is not one word")
    return token.strip(), ca


def _trusting(ca: bytes) -> ssl.SSLContext:
    """TLS with this CA alone; raises SSLError, ValueError."""
    context = cheap(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    context.load_verify_locations(cadata=ca.decode("ascii"))
    return context


def _document(raw: bytes) -> Any:
    try:
        return read_json(raw)
    except TooMuchError as error:
        raise DiscoveryError("its answer has too many values") from error
    except ValueError as error:
        raise DiscoveryError("its answer is not JSON") from error
