"""HTTP/1.1 to one instance: requests, probes, its engine id; ends waits when it goes down.

A request on a kept connection that turns out to be stale is replayed once on a fresh one; its
client does not notice.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import orjson

from proxy.core.connectors.engine_id import EngineId
from proxy.core.types import FailureKind, Instance
from proxy.net.peer_documents import read_json
from proxy.net.timeouts import Limit
from proxy.net.upstream.bootstrap import read_engine_id
from proxy.net.upstream.pool import ConnectOptions, Pool
from proxy.net.upstream.response import Share, UpstreamResponse
from proxy.protocol.errors import UpstreamFailure
from proxy.protocol.headers import keyed, request_head
from proxy.protocol.prompt.rendered import IDS
from proxy.telemetry.log import Throttle

ANSWER_BYTES = 2 << 20
"""A longer answer of a prefill leg is not parsed: the allowed KV parameters take less
(connectors.params)."""
PROBE_BYTES = 64 << 10
"""Most bytes read of an answer to a probe."""
IDS_REST_S = 60.0
"""An engine whose `/tokenize` failed is asked again after this time."""
MOST_IDS = 1 << 15
"""An answer of more token ids than this is not read: it takes 100 ns for each."""
LIST_BYTES = 1 << 20
"""Most bytes read of a list: models, metrics."""
MOST_CARDS = 1024
"""Models of one instance; a list of more is not believed."""
LENGTH, MOST_LENGTH = "max_model_len", 1 << 40
"""A card's member with the tokens of the model's context, and the first implausible length."""
_MEANS: Mapping[int, str] = {
    401: ": does it want a key (--instance-api-key)?",
    403: ": does it want a key (--instance-api-key)?",
    404: ": is this a vLLM server?",
}
"""The usual cause of an instance's status on a probe."""
_PLAIN: Mapping[int, str] = {}
_JSON = b"Content-Type: application/json\r\n"
OnSent = Callable[[UpstreamResponse], None]


class Scope(Protocol):
    """A time limit that can be ended early: `Limit`, or `asyncio.Timeout`."""

    def reschedule(self, when_s: float, /) -> None:
        """Set the end, in the loop's time."""


class Upstream:
    """One instance's connections. `connect_timeout_s` limits each attempt to connect.

    `on_replay` is called when a stale connection was replaced. `share`: of what its answers hold.
    """

    def __init__(
        self,
        instance: Instance,
        connect_timeout_s: float,
        on_replay: Callable[[], None] = lambda: None,
        connect_options: ConnectOptions | None = None,
        share: Share | None = None,
    ) -> None:
        self.instance = instance
        self._on_replay = on_replay
        self._connect_timeout_s = connect_timeout_s
        self.is_down = False
        self.throttle = Throttle()
        """Throttle of log lines about this instance's answers."""
        self._id = EngineId()
        self._asked_again_s = -math.inf
        self.bootstrap_fault: str | None = None
        """Why the bootstrap server told no engine id when it was asked last."""
        self.refuses_key = False
        self.models_read = 0
        """It refused the proxy's own key at the last request for its models."""
        self.has_new_engine = False
        """Another engine id was seen than before; reset by the caller that acts on it."""
        self.routes: dict[str, tuple[int, bool]] = {}
        """Paths for probes: whether they are there, of the process with this number."""
        self.scrapes = self.silent_scrapes = self.answers_before = 0
        """Reads of its metrics, those in a row without an answer to waiting requests, and how many
        requests it had answered at the last one."""
        self.watchers: set[Scope] = set()
        """Time limits that end when the instance goes down. Callers for which `watch` is too slow
        add to this set themselves."""
        self._connect_options = connect_options = connect_options or ConnectOptions()
        self._pool = Pool(instance.url, connect_timeout_s, connect_options, share)
        bootstrap_url = instance.bootstrap_url
        self._bootstrap = (
            Pool(bootstrap_url, connect_timeout_s, connect_options) if bootstrap_url else None
        )

    def abort(self) -> None:
        """Close every connection at once."""
        self._pool.abort()
        if self._bootstrap is not None:
            self._bootstrap.abort()

    async def close(self) -> None:
        """Close every connection."""
        self.abort()
        await asyncio.sleep(0)  # lets TLS connections send their close_notify

    @property
    def in_use(self) -> int:
        """Number of connections that serve a request."""
        return self._pool.in_use

    def is_heard_within(self, seconds: float) -> bool:
        """Whether a request's answer, which has begun, has gone on in these last seconds."""
        return self._pool.is_heard_within(seconds)

    def keyed(self, headers: bytes) -> bytes:
        """A request's header lines with the key that instances want now, if they want one."""
        return keyed(headers, self._connect_options.auth)

    def send(
        self,
        method: str,
        path: str,
        headers: bytes,
        body: bytes | None,
        on_sent: OnSent | None = None,
    ) -> Coroutine[None, None, UpstreamResponse]:
        """Send a request and wait for the answer's head; raises UpstreamFailure.

        `headers`: lines, each with its end. For a stream this also waits for the first bytes.
        `on_sent` is called when the request is sent: from then on the instance may have seen it.
        """
        head = request_head(method, path, self._pool.host_header, headers, body)
        is_head = method == "HEAD"
        return _ask(self._pool, head, body, is_head, self._on_replay, on_sent)

    async def get(
        self,
        path: str,
        timeout_s: float,
        headers: bytes = b"",
        limit: int = PROBE_BYTES,
        more: bytes = b"",
    ) -> bytes:
        """The body of a 200 answer to GET, for probes and scrapes; raises UpstreamFailure.

        At most `limit` bytes of it. A redirect is a failure like any other status. `headers`: in
        place of the proxy's key; `more`: further lines.
        """
        lines = (headers or self._connect_options.auth) + more
        return await get_from(self._pool, path, timeout_s, lines, limit, _MEANS)

    def end_mute_answers(self, seconds: float, detail: str) -> int:
        """End the answers that have begun, if none of them has gone on in these last seconds.

        Returns how many those are; none where the system does not tell.
        """
        return self._pool.end_mute_answers(seconds, detail)

    async def token_ids(self, model: str, text: str, timeout_s: float) -> bytes:
        """The ids that the engine cuts a text into, 4 bytes each; raises UpstreamFailure.

        An engine that did not tell is left alone for IDS_REST_S, as a request waits for this.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s < self._asked_again_s:
            raise UpstreamFailure(FailureKind.TIMEOUT, "/tokenize did not answer lately")
        try:
            return await self._token_ids(model, text, timeout_s)
        except UpstreamFailure:
            self._asked_again_s = now_s + IDS_REST_S
            raise

    async def _token_ids(self, model: str, text: str, timeout_s: float) -> bytes:
        asked = {"model": model, "prompt": text, "add_special_tokens": False}
        head = _JSON + self._connect_options.auth
        try:
            with Limit(timeout_s):
                reply = await self.send("POST", "/tokenize", head, orjson.dumps(asked))
                try:
                    body = await reply.read(LIST_BYTES)
                finally:
                    reply.close()
        except TimeoutError as error:
            raise UpstreamFailure(FailureKind.TIMEOUT, f"no answer in {timeout_s:g} s") from error
        return read_token_ids(body)

    async def try_bootstrap(self, url: str) -> str | None:
        """The engine's id as a bootstrap server tells it, which need not exist; None: no engine.

        Raises UpstreamFailure.
        """
        pool = Pool(url, self._connect_timeout_s, self._connect_options)
        try:
            return read_engine_id(await get_from(pool, "/query", self._connect_timeout_s))
        finally:
            pool.abort()

    def use_bootstrap(self, url: str) -> Instance:
        """Use this bootstrap server if none was given; returns the new instance."""
        self.instance = replace(self.instance, bootstrap_url=url)
        self._bootstrap = Pool(url, self._connect_timeout_s, self._connect_options)
        return self.instance

    def known_engine_id(self) -> str | None:
        """The KV engine's id, as far as it was told lately."""
        return self._id.known(asyncio.get_running_loop().time())

    async def engine_id(self) -> str | None:
        """The KV engine's id, read from the bootstrap server if unknown; None without one.

        Raises UpstreamFailure if the server cannot be asked.
        """
        now_s = asyncio.get_running_loop().time()
        if self._id.known(now_s) is None and self._id.may_ask(now_s):
            await self.look_up_engine_id()
        return self._id.known(now_s)

    async def look_up_engine_id(self) -> None:
        """Read the engine's id from the bootstrap server, even if it is known.

        Raises UpstreamFailure; the known id is kept for a while.
        """
        if self._bootstrap is None:
            return
        loop = asyncio.get_running_loop()
        try:
            found = read_engine_id(
                await get_from(self._bootstrap, "/query", self._connect_timeout_s)
            )
        except UpstreamFailure as failure:
            self._id.failed(loop.time())
            self.bootstrap_fault = failure.detail
            raise
        self.bootstrap_fault = None if found is not None else "it lists no engine"
        self.has_new_engine |= self._id.answered(found, loop.time())

    def forget_engine_id(self) -> None:
        """Forget the id: a restarted engine has a new one, and D's pull with the old one fails."""
        self._id.forget()

    @contextmanager
    def watch(self, scope: Scope) -> Iterator[None]:
        """End a time limit at once if this instance goes down."""
        self.watchers.add(scope)
        try:
            yield
        finally:
            self.watchers.discard(scope)

    def came_up(self) -> None:
        """The instance answers again."""
        self.is_down = False

    def went_down(self) -> None:
        """End all waits on this instance, and forget what may differ when it returns."""
        self.is_down = True
        self._id.renew()
        self.has_new_engine = False
        now_s = asyncio.get_running_loop().time()
        for scope in list(self.watchers):
            scope.reschedule(now_s)


async def _ask(
    pool: Pool,
    head: bytes,
    body: bytes | None,
    is_head: bool = False,  # noqa: FBT001, FBT002 - one of six, and never a literal
    on_replay: Callable[[], None] = lambda: None,
    on_sent: OnSent | None = None,
) -> UpstreamResponse:
    connection = pool.idle()
    if connection is not None:
        reply = connection.ask(head, body, is_head=is_head)
        if on_sent is not None:
            on_sent(reply)
        try:
            return await reply.begun()
        except UpstreamFailure as failure:
            # A connection whose client has left also closes like this. It is not replayed: a second
            # leg of the same transfer makes vLLM hold its KV for ever.
            if failure.kind is not FailureKind.RESET or reply.heard or not reply.may_repeat:
                raise
            on_replay()
    connection = await pool.connect()
    reply = connection.ask(head, body, is_head=is_head)
    if on_sent is not None:
        on_sent(reply)
    return await reply.begun()


async def get_from(
    pool: Pool,
    path: str,
    timeout_s: float,
    headers: bytes = b"",
    limit: int = PROBE_BYTES,
    means: Mapping[int, str] = _PLAIN,
) -> bytes:
    """At most `limit` bytes of the body of a 200 answer to GET; raises UpstreamFailure.

    `means`: what a status of another answer most often means.
    """
    try:
        with Limit(timeout_s):
            reply = await _ask(
                pool, request_head("GET", path, pool.host_header, headers, None), None
            )
            try:
                body = await reply.read(limit)
            finally:
                reply.close()
    except TimeoutError as error:
        raise UpstreamFailure(FailureKind.TIMEOUT, f"no answer in {timeout_s:g} s") from error
    if reply.status != 200:
        meaning = means.get(reply.status, "")
        answer = f"GET {path} answers {reply.status}{meaning}"
        raise UpstreamFailure(FailureKind.SERVER_ERROR, answer, status=reply.status)
    return body


def read_token_ids(body: bytes) -> bytes:
    """The ids of an answer to `/tokenize`, 4 bytes each; raises UpstreamFailure for another."""
    if body.count(b",") > MOST_IDS:
        raise UpstreamFailure(FailureKind.MALFORMED, "/tokenize gives too many token ids")
    try:
        return array(IDS, read_json(body)["tokens"]).tobytes()
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UpstreamFailure(FailureKind.MALFORMED, "/tokenize gives no token ids") from error


def flag_in(body: bytes, name: str) -> bool | None:
    """A member of an answer's object that is true or false; None for any other answer."""
    try:
        told = read_json(body)
    except ValueError:
        return None
    flag = told.get(name) if isinstance(told, dict) else None
    return flag if isinstance(flag, bool) else None


def model_cards(body: bytes) -> list[dict[str, object]] | None:
    """The model cards of a `/v1/models` answer; None if it is not one, not whole, or too much.

    Cards of a few bytes are parsed fast, but each of them is looked at for every client who asks.
    """
    try:
        answer = read_json(body)
    except ValueError:
        return None
    cards = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(cards, list) or len(cards) > MOST_CARDS:
        return None
    return [c for c in cards if isinstance(c, dict) and isinstance(c.get("id"), str)]


def context_lengths(cards: Iterable[Mapping[str, object]]) -> dict[str, int]:
    """Tokens of context by model, of the cards that tell them."""
    told: dict[str, int] = {}
    bases: dict[str, object] = {}
    for card in cards:
        model, length = str(card["id"]), card.get(LENGTH)
        if type(length) is int and 0 < length < MOST_LENGTH:
            told[model] = length
        bases[model] = card.get("parent")
    # vLLM tells no length of an adapter: it has its base model's.
    adapters = {m: told[p] for m, p in bases.items() if isinstance(p, str) and p in told}
    return adapters | told
