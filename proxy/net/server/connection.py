"""A client's connection: aiohttp's, but stricter with bytes, and with limits on what it waits for.

aiohttp parses. This module refuses what aiohttp would accept or wait for: a request line, version,
target, method or Host that no server behind may see; a head that does not come to its end; a body
that breaks off in its framing while a handler waits for it; more requests at once than one client
can mean. Error answers are fixed texts: aiohttp's own quote the line that offended, which may be a
key.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_parser import HttpRequestParser, HttpRequestParserPy, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestHandler

from proxy.net.server import responses
from proxy.net.server.aiohttp_adapter import (
    AiohttpRunner,
    AiohttpServer,
    Unreadable,
    unreadable,
)
from proxy.net.server.refusals import RefusalLog, RefusedError, refusal_of
from proxy.net.server.request_loop import SerialHandler
from proxy.protocol.endpoints import OFFLOADABLE
from proxy.protocol.errors import ProxyError
from proxy.protocol.framing import FramingError
from proxy.protocol.memo import Memo
from proxy.protocol.request_framing import (
    HEAD_BYTES,
    METHODS,
    Refusal,
    RequestFraming,
    SmallChunksError,
    is_authority,
    is_line,
    is_target,
)

QUEUED_MAX = 8
"""Requests that may wait behind the one in service. aiohttp would stop reading, and never see the
client leave, from 32 on."""
LONG_READ_BYTES, LONG_READS = 131072, 3
"""After so many reads of such length it is everybody else's turn. libuv would read on up to 32
times, and a turn after each was 2 % dearer for 400 kB."""
LIMITS: dict[str, Any] = {"max_line_size": 8190, "max_field_size": 8190, "max_headers": 100}
_HOSTS: Memo[str, bool] = Memo(256)
"""Hosts that were looked at and are fine: clients name few."""


def has_c_parser() -> bool:
    """Whether aiohttp's compiled parser is in use.

    The one in Python takes other things for HTTP, answers some with a 500 and hangs on others.
    """
    return HttpRequestParser is not HttpRequestParserPy


@dataclass(frozen=True, slots=True)
class Rules:
    """What a listener's connections share."""

    header_timeout_s: float
    max_body_bytes: int
    log: RefusalLog


class ClientConnection(SerialHandler):
    """One client's connection."""

    __slots__ = (
        "_body",
        "_bounds",
        "_heads",
        "_is_broken",
        "_is_last",
        "_is_refused",
        "_long_reads",
        "_rules",
    )

    def __init__(
        self, server: ConnectionFactory, rules: Rules, heads: HeaderTimeouts, **options: Any
    ) -> None:
        super().__init__(server, **options)
        self._rules = rules
        self._heads = heads
        self._bounds = RequestFraming()
        self._body: StreamReader = EMPTY_PAYLOAD
        self._is_refused = self._is_broken = self._is_last = False
        self._long_reads = 0

    def data_received(self, data: bytes) -> None:
        """Bytes from the client, or none when a paused parser is to go on."""
        if self._is_broken:
            return
        if len(data) >= LONG_READ_BYTES:
            self._yield()
        before, bounds = self.request_count, self._bounds
        super().data_received(data)
        new = self.request_count - before
        if self._is_refused:
            self._drop(new)
        elif not new and bounds.left > len(data):
            bounds.left -= len(data)  # in the middle of a body of known length
        elif self._is_last:
            self._take_more(data, new)
        elif new != 1 or not bounds.is_between or not self._take_whole(data):
            self._take(data, new)
        is_alone = self.current_request is None and len(self.messages) <= 1
        if self.messages and not is_alone and (self._is_crowded() or self._is_deaf()):
            self._give_up()

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001, FBT002
        """Read on. aiohttp asks for it with every body, though nothing was ever paused."""
        if self.reading_paused:
            super().resume_reading(resume_parser)

    def _yield(self) -> None:
        """A long read: now and then the others have their turn."""
        self._long_reads += 1
        if self._long_reads >= LONG_READS:
            self._long_reads = 0
            self.pause_transport()
            self.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        """They had it."""
        if not self.reading_paused and not self.buffer_paused:
            self.resume_transport()

    def _take_whole(self, data: bytes) -> bool:
        """The nearly only case, cheaply: one message begins here, and no other behind it."""
        message, payload = self.messages[-1]
        if isinstance(message, Unreadable) or message.chunked or message.upgrade:
            return False
        if self._complaint(message):
            return False
        end = data.find(b"\r\n\r\n") + 4
        length = 0 if payload is EMPTY_PAYLOAD else int(message.headers["Content-Length"])
        left = end + length - len(data)
        if left < 0 or not 4 <= end <= HEAD_BYTES or not is_line(data):
            return False
        self._body = payload
        self._bounds.left = left
        return True

    def _take(self, data: bytes, new: int) -> None:
        """Any other piece: parts of heads, chunks, several messages, errors."""
        try:
            self._bounds.feed(data)
            self._take_messages(len(self.messages) - new)
            if len(self._bounds.pending) > HEAD_BYTES and not self.reading_paused:
                self._refuse(Refusal.HEAD_SIZE)
        except FramingError as error:
            small = isinstance(error, SmallChunksError)
            self._broke(Refusal.CHUNKS if small else Refusal.FRAMING)
        if self._bounds.in_head and not self._is_broken and not self._is_refused:
            self._heads.watch(self)
        else:
            self._heads.forget(self)

    def _take_more(self, data: bytes, new: int) -> None:
        """Any piece behind the last request's head, its body's or not."""
        self._drop(new)
        try:
            self._take_rest(data)
        except FramingError:
            self._is_broken = True
        if self._is_broken and not self._body.is_eof():
            self._broke(Refusal.FRAMING)

    def _take_messages(self, first: int) -> None:
        """Look at the queue's messages from `first` on; raises FramingError."""
        for index in range(first, len(self.messages)):
            message, payload = self.messages[index]
            if isinstance(message, Unreadable):
                self._failed(index, refusal_of(message.exc))
                message.exc.__traceback__ = None  # aiohttp's frame, which holds the message
                return
            head = self._bounds.head()
            if refusal := self._complaint(message) or _complaint_of(head):
                self._refuse_at(index, refusal)
                return
            self._body = payload
            has_length = payload is not EMPTY_PAYLOAD and not message.chunked
            length = int(message.headers["Content-Length"]) if has_length else 0
            self._bounds.body(None if message.chunked else length)
            if message.upgrade:
                self._take_last(index)
                return

    def _complaint(self, message: RawRequestMessage) -> Refusal | None:
        """What is wrong with a head that the parser took."""
        headers = message.headers
        if message.version is not HttpVersion11 and (refusal := _of_version(message)):
            return refusal
        if message.method not in METHODS:
            return Refusal.METHOD
        if message.path not in OFFLOADABLE and not is_target(message.path):
            return Refusal.TARGET
        if (host := headers.get("Host", "")) not in _HOSTS.known and not _is_host(host):
            return Refusal.HOST
        if message.upgrade and "websocket" in headers.get("Upgrade", "").lower():
            return Refusal.UPGRADE
        return self._expectation(headers) if "Expect" in headers else None

    def _take_last(self, index: int) -> None:
        """A request that asks for another protocol is answered in this one, and is the last.

        The parser drops what came behind it in one piece: what follows that may begin anywhere.
        """
        message, payload = self.messages[index]
        assert not isinstance(message, Unreadable)
        self.messages[index] = (message._replace(should_close=True), payload)
        self._drop(len(self.messages) - index - 1)
        self._is_last = True
        self._take_rest()

    def _take_rest(self, data: bytes = b"") -> None:
        """More of the last request's body; raises FramingError."""
        self._bounds.feed(data)
        if not self._bounds.in_body:
            self._bounds.pending.clear()
            self._is_refused = True

    def _expectation(self, headers: Any) -> Refusal | None:
        """Before a client is told to go on: whether it should."""
        if headers["Expect"].lower() != "100-continue":
            return Refusal.EXPECTATION
        length = int(headers.get("Content-Length", "0"))
        return Refusal.BODY_SIZE if length > self._rules.max_body_bytes else None

    def _is_crowded(self) -> bool:
        is_serving = self.current_request is not None
        return len(self.messages) > QUEUED_MAX + (not is_serving)

    def _is_deaf(self) -> bool:
        """Whether a waiting request's body has stopped the reading: no news of the client then."""
        return self.reading_paused and self.current_request is not None

    def _give_up(self) -> None:
        """Too much at once: the request in service is cancelled, as by a client that leaves."""
        self._note(Refusal.PIPELINED)
        self._is_broken = True
        self.messages.clear()
        self._heads.forget(self)
        if self.transport is not None:
            self.transport.abort()

    def head_is_late(self) -> None:
        """The head has not come to its end in time."""
        self._refuse(Refusal.HEAD_LATE)

    def _refuse(self, refusal: Refusal) -> None:
        """Answer with an error behind whatever is in service, then close."""
        self._note(refusal)
        self._is_broken = True
        self.messages.append((_error(refusal), EMPTY_PAYLOAD))
        self._wake()

    def _refuse_at(self, index: int, refusal: Refusal) -> None:
        """Answer a message with an error instead of a handler's answer, and none behind it."""
        _, payload = self.messages[index]
        self._drop(len(self.messages) - index)
        self._note(refusal)
        self._is_refused = True
        self.messages.append((_error(refusal), payload))

    def _failed(self, index: int, refusal: Refusal) -> None:
        """The parser has given up: on a head, or on a body that a handler may be waiting for."""
        if self._body.is_eof():
            self._refuse_at(index, refusal)
        else:
            self._drop(len(self.messages) - index)
            self._broke(Refusal.FRAMING)
        self._is_broken = True

    def _drop(self, count: int) -> None:
        """Forget the last messages of the queue."""
        for _ in range(count):
            message, _ = self.messages.pop()
            self._is_broken |= isinstance(message, Unreadable)

    def _broke(self, refusal: Refusal) -> None:
        """The body's framing is broken: a handler that waits for it answers, then this closes.

        aiohttp would queue an error behind a handler that waits for ever.
        """
        self._note(refusal)
        self._is_broken = self.is_closing = True
        self.stop_lingering()
        self._body.set_exception(RefusedError(refusal))

    def stop_lingering(self) -> None:
        """Enough was waited for this client: the rest of its body is not read."""
        self.lingering_s = 0.0

    def _note(self, refusal: Refusal) -> None:
        self._rules.log.note(refusal, self.loop.time())

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Gone; its last body lets go, else a cycle would keep both."""
        self._heads.forget(self)
        self._body = EMPTY_PAYLOAD
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """An OpenAI-shaped error in fixed words; a defect of ours is logged with its traceback."""
        del message
        error = exc if isinstance(exc, ProxyError) else ProxyError("internal error")
        if error is not exc:
            error.status = status
            self.log_exception("a handler failed", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        response = responses.error(error, responses.Headers())
        response.force_close()
        return response


def _of_version(message: RawRequestMessage) -> Refusal | None:
    """What is wrong with a message that is not HTTP/1.1."""
    if message.version is not HttpVersion10:
        return Refusal.VERSION
    return Refusal.FRAMING if message.chunked else None  # that version has no chunks


def _complaint_of(head: bytes | None) -> Refusal | None:
    """What is wrong with a head's bytes; None is one that begins elsewhere than the parser says."""
    if head is None:
        return Refusal.FRAMING
    if len(head) > HEAD_BYTES:
        return Refusal.HEAD_SIZE
    return None if is_line(head) else Refusal.LINE


def _is_host(host: str) -> bool:
    if not is_authority(host):
        return False
    return _HOSTS.keep(host, value=True)


def _error(refusal: Refusal) -> Unreadable:
    error = RefusedError(refusal)
    return unreadable(error.status, error)


class HeaderTimeouts:
    """Connections whose head has begun and is not complete; one timer for all of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._due_s: dict[ClientConnection, float] = {}
        """In the order in which they are due."""
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, connection: ClientConnection) -> None:
        """A head has begun, if it had not already."""
        due_s = self._due_s.setdefault(connection, self._loop.time() + self._seconds)
        if self._timer is None:
            self._timer = self._loop.call_at(due_s, self._look)

    def forget(self, connection: ClientConnection) -> None:
        """It is complete, or the connection is gone."""
        self._due_s.pop(connection, None)

    def _look(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        while self._due_s:
            connection, due_s = next(iter(self._due_s.items()))
            if due_s > now_s:
                self._timer = self._loop.call_at(due_s, self._look)
                return
            del self._due_s[connection]
            connection.head_is_late()


class ConnectionFactory(AiohttpServer):
    """Makes the connections of one listener."""

    def __init__(self, made: web.Server, rules: Rules) -> None:
        """`made`: aiohttp's own server over the same application."""
        super().__init__(made)
        self._rules = rules
        self._heads = HeaderTimeouts(self.loop, rules.header_timeout_s)

    def __call__(self) -> RequestHandler:
        """A connection was accepted."""
        return ClientConnection(self, self._rules, self._heads, loop=self.loop, **self.options)


class Runner(AiohttpRunner):
    """Runs an application behind this edge."""

    __slots__ = ("_rules",)

    def __init__(self, app: web.Application, rules: Rules, **options: Any) -> None:
        super().__init__(app, **{**LIMITS, **options})
        self._rules = rules

    def exchange_server(self, made: web.Server) -> ConnectionFactory:
        """One that makes the connections of here."""
        return ConnectionFactory(made, self._rules)


def connection_of(request: web.BaseRequest) -> ClientConnection:
    """The connection that a request came over."""
    return cast(ClientConnection, request.protocol)
