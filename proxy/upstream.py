"""HTTP/1.1 to one instance: its connections, its engine id, and the news that it has gone.

A kept connection that turns out to be stale is replayed once on a fresh one, which no client
notices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Protocol

import orjson

from proxy.answer import Reply
from proxy.core.types import FailureKind, Instance
from proxy.deadline import Limit
from proxy.errors import UpstreamFailure
from proxy.heads import request_head
from proxy.pool import Pool
from proxy.ways import Ways

ANSWER_BYTES = 16 << 20
"""The most that is read of a prefill leg's answer."""
PROBE_BYTES = 64 << 10
"""The most that is read of an answer to a probe."""
LIST_BYTES = 1 << 20
"""The same where the answer is a list: models, metrics."""


class Scope(Protocol):
    """What can be ended early: `Limit`, or `asyncio.Timeout`."""

    def reschedule(self, when_s: float, /) -> None:
        """Set the end, in the loop's time."""


class Upstream:
    """One instance's connections. `connect_timeout_s` bounds each attempt to connect.

    `on_replay` is called when a stale connection was replaced.
    """

    def __init__(
        self,
        instance: Instance,
        connect_timeout_s: float,
        on_replay: Callable[[], None] = lambda: None,
        ways: Ways | None = None,
    ) -> None:
        self.instance = instance
        self._on_replay = on_replay
        self._connect_timeout_s = connect_timeout_s
        self.is_down = False
        self._engine_id: str | None = None
        self._last_engine_id: str | None = None
        self.has_new_engine = False
        """Another engine id was seen than before; for whoever acts on it to reset."""
        self.watchers: set[Scope] = set()
        """What `watch` holds; to be used alone where its own cost matters."""
        self._ways = ways = ways or Ways()
        self._pool = Pool(instance.url, connect_timeout_s, ways)
        bootstrap_url = instance.bootstrap_url
        self._bootstrap = Pool(bootstrap_url, connect_timeout_s, ways) if bootstrap_url else None

    async def close(self) -> None:
        """Close every connection."""
        await self._pool.close()
        if self._bootstrap is not None:
            await self._bootstrap.close()

    @property
    def in_use(self) -> int:
        """Connections that serve a request."""
        return self._pool.in_use

    def send(
        self, method: str, path: str, headers: bytes, body: bytes | None
    ) -> Coroutine[None, None, Reply]:
        """Send a request and wait for the answer's head; raises UpstreamFailure.

        `headers`: lines, each with its end. Of a stream the first bytes are waited for as well.
        """
        return _ask(self._pool, method, path, headers, body, self._on_replay)

    async def get(
        self, path: str, timeout_s: float, headers: bytes = b"", limit: int = PROBE_BYTES
    ) -> bytes:
        """The body of a 200 answer to GET; raises UpstreamFailure. For probes and scrapes.

        No more than `limit` bytes of it. A redirect is a failure like any other status.
        """
        return await _get(self._pool, path, timeout_s, headers or self._ways.auth, limit)

    async def engine_id(self) -> str | None:
        """The KV engine's id, asked from the bootstrap server when not known; None without one."""
        if self._engine_id is None:
            await self.look_up_engine_id()
        return self._engine_id

    async def look_up_engine_id(self) -> None:
        """Ask for the engine's id, known or not; raises UpstreamFailure."""
        if self._bootstrap is None:
            return
        body = await _get(self._bootstrap, "/query", self._connect_timeout_s)
        last, found = self._last_engine_id, _engine_id(body)
        self._engine_id = found
        if found is not None:
            self.has_new_engine |= last is not None and found != last
            self._last_engine_id = found

    def forget_engine_id(self) -> None:
        """A restarted engine has a new id; an old one makes D's pull fail."""
        self._engine_id = None

    @contextmanager
    def watch(self, scope: Scope) -> Iterator[None]:
        """Let a timeout scope run out at once when this instance goes down."""
        self.watchers.add(scope)
        try:
            yield
        finally:
            self.watchers.discard(scope)

    def came_up(self) -> None:
        """It answers again."""
        self.is_down = False

    def went_down(self) -> None:
        """End what waits on this instance, and forget what a new incarnation would deny."""
        self.is_down = True
        self.forget_engine_id()
        self._last_engine_id = None
        self.has_new_engine = False
        now_s = asyncio.get_running_loop().time()
        for scope in list(self.watchers):
            scope.reschedule(now_s)


async def _ask(
    pool: Pool,
    method: str,
    path: str,
    headers: bytes,
    body: bytes | None,
    on_replay: Callable[[], None] = lambda: None,
) -> Reply:
    head = request_head(method, path, pool.host_header, headers, body)
    is_head = method == "HEAD"
    connection = pool.idle()
    if connection is not None:
        reply = connection.ask(head, body, is_head=is_head)
        try:
            return await reply.begun()
        except UpstreamFailure as failure:
            if failure.kind is not FailureKind.RESET or reply.heard:
                raise
            on_replay()
    connection = await pool.connect()
    return await connection.ask(head, body, is_head=is_head).begun()


async def _get(
    pool: Pool, path: str, timeout_s: float, headers: bytes = b"", limit: int = PROBE_BYTES
) -> bytes:
    try:
        with Limit(timeout_s):
            reply = await _ask(pool, "GET", path, headers, None)
            try:
                body = await reply.read(limit)
            finally:
                reply.close()
    except TimeoutError as error:
        raise UpstreamFailure(FailureKind.TIMEOUT, f"no answer in {timeout_s:g} s") from error
    if reply.status != 200:
        raise UpstreamFailure(FailureKind.SERVER_ERROR, f"status {reply.status}")
    return body


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
    if not isinstance(cards, list):
        return []
    return [c for c in cards if isinstance(c, dict) and isinstance(c.get("id"), str)]
