"""HTTP/1.1 to one instance: its connections, its engine id, and the news that it has gone.

vLLM closes an idle connection after 5 s, so ours are kept for 4; a connection that turns out to be
stale is replayed once on a fresh one, which no client notices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import aiohttp
import orjson
from multidict import CIMultiDict
from yarl import URL

from proxy.core.types import FailureKind, Instance
from proxy.errors import UpstreamFailure

KEEPALIVE_S = 4.0
READ_BUFFER_BYTES = 16384
ERROR_BODY_BYTES = 65536
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_FORWARDED = HOP_BY_HOP | {"host", "content-length", "accept-encoding", "expect"}


def forwarded(headers: Mapping[str, str], request_id: str) -> CIMultiDict[str]:
    """A client's headers as an instance gets them: end-to-end ones, and the request id."""
    named = headers.get("Connection", "").lower().replace(" ", "").split(",")
    kept = CIMultiDict[str]()
    for key, value in headers.items():
        lower = key.lower()
        if lower not in _NOT_FORWARDED and lower not in named:
            kept.add(key, value)
    kept["X-Request-Id"] = request_id
    kept["Accept-Encoding"] = "identity"
    return kept


_WORDS: dict[type[BaseException], str] = {
    aiohttp.ConnectionTimeoutError: "no connection in time (--connect-timeout)",
    aiohttp.ServerDisconnectedError: "the connection was closed",
    aiohttp.ClientResponseError: "the answer is not HTTP",
}


class Upstream:
    """One instance's connections. `connect_timeout_s` bounds each attempt to connect."""

    def __init__(self, instance: Instance, connect_timeout_s: float) -> None:
        self.instance = instance
        self._connect_timeout_s = connect_timeout_s
        self.is_down = False
        self._engine_id: str | None = None
        self._watchers: set[asyncio.Timeout] = set()
        self._session = self._open(
            aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=10)
        )
        self._fresh = self._open(aiohttp.TCPConnector(limit=0, force_close=True))

    def _open(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            auto_decompress=False,
            read_bufsize=READ_BUFFER_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()
        await self._fresh.close()

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> aiohttp.ClientResponse:
        """Send a request and wait for the answer's head; raises UpstreamFailure."""
        try:
            return await self._attempt(self._session, method, path, headers, body)
        except UpstreamFailure as failure:
            if failure.kind is not FailureKind.RESET:
                raise
        return await self._attempt(self._fresh, method, path, headers, body)

    async def _attempt(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
    ) -> aiohttp.ClientResponse:
        try:
            return await session.request(
                method,
                URL(self.instance.url + path, encoded=True),
                headers=headers,
                data=body,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UpstreamFailure(FailureKind.CONNECT, _plain(error)) from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            raise UpstreamFailure(FailureKind.RESET, _plain(error)) from error
        except aiohttp.ClientError as error:
            raise UpstreamFailure(FailureKind.MALFORMED, _plain(error)) from error

    async def get(
        self, path: str, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """The body of a 200 answer to GET; raises UpstreamFailure. For probes and scrapes."""
        return await self._fetch(self.instance.url + path, timeout_s, headers)

    async def _fetch(
        self, url: str, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> bytes:
        get = self._session.get
        try:
            async with asyncio.timeout(timeout_s), get(url, headers=headers) as answer:
                body = await answer.read()
                if answer.status != 200:
                    raise UpstreamFailure(FailureKind.SERVER_ERROR, f"status {answer.status}")
                return body
        except TimeoutError as error:
            raise UpstreamFailure(FailureKind.TIMEOUT, f"no answer in {timeout_s} s") from error
        except aiohttp.ClientError as error:
            raise UpstreamFailure(FailureKind.CONNECT, _plain(error)) from error

    async def engine_id(self) -> str | None:
        """The KV engine's id, asked from the bootstrap server when not known; None without one."""
        if self._engine_id is None and self.instance.bootstrap_url is not None:
            url = self.instance.bootstrap_url + "/query"
            self._engine_id = _engine_id(await self._fetch(url, self._connect_timeout_s))
        return self._engine_id

    def forget_engine_id(self) -> None:
        """A restarted engine has a new id; an old one makes D's pull fail."""
        self._engine_id = None

    @contextmanager
    def watch(self, scope: asyncio.Timeout) -> Iterator[None]:
        """Let a timeout scope run out at once when this instance goes down."""
        self._watchers.add(scope)
        try:
            yield
        finally:
            self._watchers.discard(scope)

    def came_up(self) -> None:
        """It answers again."""
        self.is_down = False

    def went_down(self) -> None:
        """End what waits on this instance, and forget what a new incarnation would deny."""
        self.is_down = True
        self.forget_engine_id()
        now_s = asyncio.get_running_loop().time()
        for scope in list(self._watchers):
            scope.reschedule(now_s)


def _engine_id(body: bytes) -> str | None:
    """The id of data-parallel rank 0 in a bootstrap server's `/query` answer."""
    try:
        ranks = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    rank = ranks.get("0") if isinstance(ranks, dict) else None
    found = rank.get("engine_id") if isinstance(rank, dict) else None
    return found if isinstance(found, str) else None


def model_cards(body: bytes) -> list[dict[str, object]]:
    """The cards of a `/v1/models` answer; none when it is not one."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return []
    cards = answer.get("data") if isinstance(answer, dict) else None
    return [c for c in cards or () if isinstance(c, dict) and isinstance(c.get("id"), str)]


def _plain(error: BaseException) -> str:
    """What a client may read: neither addresses nor a library's names."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror.split(" [")[0][:100]
    return _WORDS.get(type(error), "the connection failed")
