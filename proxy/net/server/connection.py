"""A client's connection: aiohttp's, with stricter checks, header timeouts and a pipeline limit.

aiohttp parses. This module refuses requests that aiohttp would accept or wait for. These are a bad
request line, version, target, method or Host, and a silent connection. Others are an incomplete
head, a body whose framing breaks while a handler waits, and too many requests at once. Error
answers are fixed texts, since aiohttp's own quote the offending line, which may be a key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from aiohttp import HttpVersion10, HttpVersion11, hdrs, web
from aiohttp.http_parser import HttpRequestParser, HttpRequestParserPy, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestHandler

from proxy.net.addresses import party
from proxy.net.server import responses
from proxy.net.server.aiohttp_adapter import (
    AiohttpRunner,
    AiohttpServer,
    Unreadable,
    unread_bytes,
    unreadable,
)
from proxy.net.server.held_heads import (
    COPIES,
    COPIES_IN_PARTS,
    UNCOUNTED_BYTES,
    HeldHeads,
    Room,
    size_of,
)
from proxy.net.server.refusals import NO_FAULT, RefusalLog, RefusedError, refusal_of
from proxy.net.server.request_loop import SerialHandler
from proxy.net.tls_records import SmallRecordsError
from proxy.protocol.endpoints import OFFLOADABLE
from proxy.protocol.errors import ProxyError
from proxy.protocol.framing import FramingError, SmallChunksError
from proxy.protocol.memo import Memo
from proxy.protocol.request_framing import (
    HEAD_BYTES,
    METHODS,
    Refusal,
    RequestFraming,
    is_authority,
    is_line,
    is_target,
)

QUEUED_MAX = 8
"""Requests that may wait behind the one in service; more abort the connection. From 32 on aiohttp
would stop reading and not see the client leave."""
READ_S = 60.0
"""Within this time a client reads most of an answer of the proxy's own."""
SHORT_BYTES = 1 << 16
"""A transport takes a shorter one at once, beside what the kernel has."""
SLICE_BYTES, SLICE_LINES = 16384, 1024
"""A longer read of more lines, which are many small chunks or heads, is parsed in slices."""
LONG_READ_BYTES, LONG_READS = 131072, 3
"""After this many reads of this length the other connections get a turn. libuv reads up to 32 times
in a row. A turn after each read cost 2 % more for 400 kB. Behind a request's first read its handler
has a turn: it decides whether there is room for more."""
LIMITS: dict[str, Any] = {"max_line_size": 8190, "max_field_size": 8190, "max_headers": 100}
_HOSTS: Memo[str, bool] = Memo(256)
"""Hosts that were checked and are valid: clients name few."""


def has_c_parser() -> bool:
    """Whether aiohttp's compiled parser is in use.

    The one in Python accepts other bytes as HTTP, answers some with a 500 and hangs on others.
    """
    return HttpRequestParser is not HttpRequestParserPy


@dataclass(frozen=True, slots=True)
class Rules:
    """Options of all connections of a listener."""

    header_timeout_s: float
    max_body_bytes: int
    log: RefusalLog
    unread: Room | None = None
    """None: each client has READ_S alone."""
    heads: Room | None = None
    """None: heads are not counted."""


class StalledClientError(ConnectionResetError):
    """The client holds its connection and reads nothing; it counts as gone."""


class ClientConnection(SerialHandler):
    """One client's connection."""

    __slots__ = (
        "_body",
        "_bounds",
        "_heads",
        "_held_heads",
        "_is_broken",
        "_is_held",
        "_is_last",
        "_is_refused",
        "_is_silent",
        "_long_reads",
        "_rules",
        "_silent",
        "held_bytes",
    )

    def __init__(
        self,
        server: ConnectionFactory,
        rules: Rules,
        heads: HeaderTimeouts,
        silent: HeaderTimeouts,
        **options: Any,
    ) -> None:
        super().__init__(server, **options)
        self._rules = rules
        self._heads, self._silent = heads, silent
        self._is_silent = True
        self._bounds = RequestFraming()
        self._body: StreamReader = EMPTY_PAYLOAD
        self._is_refused = self._is_broken = self._is_last = self._is_held = False
        self._long_reads = self.held_bytes = 0
        self._held_heads: HeldHeads | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accepted, after the TLS handshake if there is one."""
        super().connection_made(transport)
        self._silent.watch(self)

    def data_received(self, data: bytes) -> None:
        """Bytes from the client; none if a paused parser is to go on."""
        if self._is_silent or len(data) >= LONG_READ_BYTES:
            self._note_read(data)
        size = len(data)
        # Within a body of known length there is nothing to count.
        if size > SLICE_BYTES and self._bounds.left < size and data.count(b"\n") > SLICE_LINES:
            # The parser takes all that it gets before the framing is asked whether it goes on.
            for at in range(0, size, SLICE_BYTES):
                self._receive(data[at : at + SLICE_BYTES])
        else:
            self._receive(data)

    def _receive(self, data: bytes) -> None:
        if self._is_broken or (self._is_refused and data):
            return  # behind a refused request the parser would keep a head that nobody bounds
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
        if self.messages:
            self._look_at_waiting()

    def _look_at_waiting(self) -> None:
        """Requests behind the one in service, or the next, are few, and hold little."""
        is_alone = self.current_request is None and len(self.messages) <= 1
        if is_alone or self._is_broken:
            return
        if self._is_crowded() or self._is_deaf():
            self._give_up()
        elif not self._is_refused:
            self._count_heads()

    def next_message(self) -> tuple[RawRequestMessage | Unreadable, StreamReader]:
        """Take the next message off the queue: its body is its request's from now on."""
        taken = super().next_message()
        if self._held_heads is not None:
            self._count_heads(of_next=taken[0])
        return taken

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001, FBT002
        """Resume reading. aiohttp asks for this with every body, even if nothing was paused."""
        if self.reading_paused:
            super().resume_reading(resume_parser)

    def _note_read(self, data: bytes) -> None:
        """Note the first read; behind long ones pause, so that others get a turn."""
        if self._is_silent:
            self._is_silent = False
            self._silent.forget(self)
        if len(data) < LONG_READ_BYTES:
            return
        self._long_reads += 1
        is_first = self.current_request is None and not self.messages
        if is_first or self._long_reads >= LONG_READS:
            self._long_reads = 0
            self._pause_a_turn()

    def _pause_a_turn(self) -> None:
        self.pause_transport()
        self.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        """Resume after the pause, unless the reading was paused for another reason meanwhile."""
        if not (self.reading_paused or self.buffer_paused or self._is_held):
            self.resume_transport()

    def hold(self) -> None:
        """Read nothing until `let_go`: there is no room for what would come."""
        self._is_held = True
        self.pause_transport()

    def let_go(self) -> None:
        """Read on."""
        self._is_held = False
        self._read_on()

    def _take_whole(self, data: bytes) -> bool:
        """Check a piece with one new message and no other behind it, the common case, cheaply."""
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
        if end > UNCOUNTED_BYTES or self._held_heads is not None:
            self._count_heads()
        return True

    def _take(self, data: bytes, new: int) -> None:
        """Check any other piece: parts of heads, chunks, several messages, errors."""
        came = 0
        try:
            self._bounds.feed(data)
            came = len(self._bounds.pending)
            self._take_messages(len(self.messages) - new)
            if len(self._bounds.pending) > HEAD_BYTES and not self.reading_paused:
                self._refuse(Refusal.HEAD_SIZE)
        except FramingError as error:
            small = isinstance(error, SmallChunksError)
            self._broke(Refusal.CHUNKS if small else Refusal.FRAMING)
        # The parser keeps the last head until another one begins.
        if came > UNCOUNTED_BYTES or (came and self._held_heads is not None):
            self._count_heads(came)
        if self._bounds.in_head and not self._is_broken and not self._is_refused:
            self._heads.watch(self)
        else:
            self._heads.forget(self)

    def _take_more(self, data: bytes, new: int) -> None:
        """A piece after the last request's head: its body, or bytes to drop."""
        self._drop(new)
        try:
            self._take_rest(data)
        except FramingError:
            self._is_broken = True
        if self._is_broken and not self._body.is_eof():
            self._broke(Refusal.FRAMING)

    def _take_messages(self, first: int) -> None:
        """Check the queue's messages from `first` on; raises FramingError."""
        for index in range(first, len(self.messages)):
            message, payload = self.messages[index]
            if isinstance(message, Unreadable):
                self._failed(index, refusal_of(message.exc))
                message.exc.__traceback__ = None  # aiohttp's frame refers to the message
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
        """Why a head that the parser accepted is refused; None if it is not."""
        headers = message.headers
        if message.version is not HttpVersion11 and (refusal := _of_version(message)):
            return refusal
        if message.method not in METHODS:
            return Refusal.METHOD
        if message.path not in OFFLOADABLE and not is_target(message.path):
            return Refusal.TARGET
        if (host := headers.get(hdrs.HOST, "")) not in _HOSTS.known and not _is_host(host):
            return Refusal.HOST
        # In HTTP/1.0 an Upgrade is ignored (RFC 9110 7.8).
        is_asked = message.upgrade and message.version is HttpVersion11
        if is_asked and "websocket" in headers.get(hdrs.UPGRADE, "").lower():
            return Refusal.UPGRADE
        return self._expectation(headers) if hdrs.EXPECT in headers else None

    def _take_last(self, index: int) -> None:
        """Serve a request for another protocol over HTTP/1.1, as the connection's last one.

        The parser drops the bytes behind it in the same piece, so later bytes may begin anywhere.
        """
        message, payload = self.messages[index]
        assert not isinstance(message, Unreadable)
        self.messages[index] = (message._replace(should_close=True), payload)
        self._drop(len(self.messages) - index - 1)
        self._is_last = True
        self._take_rest()

    def _take_rest(self, data: bytes = b"") -> None:
        """Frame more of the last request's body; raises FramingError."""
        self._bounds.feed(data)
        if not self._bounds.in_body:
            self._bounds.pending.clear()
            self._is_refused = True

    def _expectation(self, headers: Any) -> Refusal | None:
        """Why a request with Expect gets no 100 Continue; None if it does."""
        if headers["Expect"].lower() != "100-continue":
            return Refusal.EXPECTATION
        length = int(headers.get("Content-Length", "0"))
        return Refusal.BODY_SIZE if length > self._rules.max_body_bytes else None

    def _is_crowded(self) -> bool:
        is_serving = self.current_request is not None
        return len(self.messages) > QUEUED_MAX + (not is_serving)

    def _count_heads(
        self, came: int = 0, of_next: RawRequestMessage | Unreadable | None = None
    ) -> None:
        """Bound what waits for its turn, and count what it holds with the head of the request.

        `came`: bytes from the beginning of the last one; the parser has it, even if it is refused.
        `of_next`: the request that is about to be served.
        """
        served = of_next or self.current_request
        waiting = list(self.messages)
        if served is None and waiting:
            served = waiting.pop(0)[0]
        heads = [size_of(message) for message, _ in waiting]
        bodies = sum(unread_bytes(payload) for _, payload in waiting)
        if sum(heads) > HEAD_BYTES or (len(waiting) > 1 and bodies > HEAD_BYTES):
            self._give_up()
            return
        is_over = self._is_refused or self._is_broken
        heads.append(0 if served is None else size_of(served))
        parts = COPIES_IN_PARTS * len(self._bounds.pending)
        self._hold_heads(COPIES * (sum(heads) + came * is_over) + parts + bodies)

    def _hold_heads(self, size: int) -> None:
        held, room = self._held_heads, self._rules.heads
        if size > UNCOUNTED_BYTES and room is not None and self.transport is not None:
            if held is None:
                peer = self.transport.get_extra_info("peername")
                owner = party(str(peer[0] if isinstance(peer, list | tuple) else peer or ""))
                held = self._held_heads = HeldHeads(room, owner, self.give_way)
            held.hold(size)
        elif held is not None:
            held.free()
            self._held_heads = None

    def _is_deaf(self) -> bool:
        """Whether an unread body has stopped the reading, which hides a client's leaving."""
        return self.reading_paused and self.current_request is not None

    def _give_up(self) -> None:
        """Abort at too many requests: the one in service is cancelled as if its client had left."""
        self._note(Refusal.PIPELINED)
        self._is_broken = True
        self.messages.clear()
        self._heads.forget(self)
        if self.transport is not None:
            self.transport.abort()

    def head_is_late(self) -> None:
        """The head was not complete in time."""
        self._refuse(Refusal.HEAD_LATE)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for its next request, and nothing of one has come."""
        is_between = not self.messages and self._bounds.is_between
        return is_between and self.current_request is None and not self._is_broken

    def close_silent(self) -> None:
        """Whether nothing has ever come, so that there is no request to answer."""
        self._note(Refusal.SILENT)
        self._is_broken = True
        if self.transport is not None:
            # A TLS connection that is only closed waits for its client's goodbye, beyond the cap.
            self.transport.abort()
        self.force_close()

    def _refuse(self, refusal: Refusal) -> None:
        """Queue an error answer after the requests in the queue, then close."""
        self._note(refusal)
        self._is_broken = True
        self.messages.append((_error(refusal, self._bounds.target), EMPTY_PAYLOAD))
        self._wake()

    def _refuse_at(self, index: int, refusal: Refusal) -> None:
        """Replace a message by an error answer, and drop the messages behind it."""
        message, payload = self.messages[index]
        path = self._bounds.target if isinstance(message, Unreadable) else message.path
        self._drop(len(self.messages) - index)
        self._note(refusal)
        self._is_refused = True
        self.messages.append((_error(refusal, path), payload))

    def _failed(self, index: int, refusal: Refusal) -> None:
        """The parser has failed: on a head, or on a body that a handler may be waiting for."""
        if self._body.is_eof():
            self._refuse_at(index, refusal)
        else:
            self._drop(len(self.messages) - index)
            self._broke(Refusal.FRAMING)
        self._is_broken = True

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Finish an answer. One that is long and not read has a share of the room, and a time."""
        body = resp.body if isinstance(resp, web.Response) else None
        if not isinstance(body, bytes) or len(body) <= SHORT_BYTES or resp.prepared:
            return await super().finish_response(request, resp, start_time)
        room, self.held_bytes = self._rules.unread, len(body)
        try:
            if room is not None and not room.take(self, party(request.remote or ""), len(body)):
                self.give_way()
            async with asyncio.timeout(READ_S):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            self.give_way()
            return resp, True
        finally:
            self.held_bytes = 0
            if room is not None:
                room.free(self)

    def close_idle(self) -> None:
        """Close between two requests, as after the keep-alive time."""
        self._is_broken = True
        self.force_close()
        if self.transport is not None:
            self.transport.close()

    def give_way(self) -> None:
        """End: what is held for this client is too much, it takes too long, or others wait."""
        self._is_broken = True
        if self.transport is not None:
            self.transport.abort()  # else it stays until the client has read what is queued
        self.force_close()

    def _drop(self, count: int) -> None:
        """Remove the last messages of the queue."""
        for _ in range(count):
            message, _ = self.messages.pop()
            self._is_broken |= isinstance(message, Unreadable)

    def _broke(self, refusal: Refusal) -> None:
        """The body's framing is broken: fail the handler that waits for it, then close.

        aiohttp would queue an error behind a handler that waits for ever.
        """
        self._note(refusal)
        self._is_broken = self.is_closing = True
        self.stop_lingering()
        self._body.set_exception(RefusedError(refusal))

    def stop_lingering(self) -> None:
        """Do not read the rest of this client's body."""
        self.lingering_s = 0.0

    def _note(self, refusal: Refusal) -> None:
        if refusal not in NO_FAULT:
            self._rules.log.note(refusal, self.loop.time())

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Closed. The last body is released, else a reference cycle would keep it."""
        if isinstance(exc, SmallRecordsError):
            self._note(Refusal.RECORDS)
        self._heads.forget(self)
        self._silent.forget(self)
        self._hold_heads(0)
        self._body = EMPTY_PAYLOAD
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """An error as a fixed text, in its path's form; a defect is logged with its traceback."""
        del message
        error = exc if isinstance(exc, ProxyError) else ProxyError("internal error")
        if error is not exc:
            error.status = status
            self.log_exception("a handler failed", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        own = responses.Headers({responses.REQUEST_ID: responses.new_id()})
        path = error.path if isinstance(error, RefusedError) else request.path
        response = responses.error(path, error, own)
        response.force_close()
        return response


def _of_version(message: RawRequestMessage) -> Refusal | None:
    """Why a message that is not HTTP/1.1 is refused; None for a valid HTTP/1.0 message."""
    if message.version is not HttpVersion10:
        return Refusal.VERSION
    return Refusal.FRAMING if message.chunked else None  # HTTP/1.0 has no chunks


def _complaint_of(head: bytes | None) -> Refusal | None:
    """Why a head's bytes are refused. `head` None: it begins elsewhere than the parser says."""
    if head is None:
        return Refusal.FRAMING
    if len(head) > HEAD_BYTES:
        return Refusal.HEAD_SIZE
    return None if is_line(head) else Refusal.LINE


def _is_host(host: str) -> bool:
    if not is_authority(host):
        return False
    return _HOSTS.keep(host, value=True)


def _error(refusal: Refusal, path: str) -> Unreadable:
    error = RefusedError(refusal, path)
    return unreadable(error.status, error)


class HeaderTimeouts:
    """Connections that have not sent something in time; one timer for all of them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        on_late: Callable[[ClientConnection], None],
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._on_late = on_late
        self._due_s: dict[ClientConnection, float] = {}
        """Due times, the earliest first."""
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, connection: ClientConnection) -> None:
        """Start the time of a connection, unless it runs already."""
        due_s = self._due_s.setdefault(connection, self._loop.time() + self._seconds)
        if self._timer is None:
            self._timer = self._loop.call_at(due_s, self._look)

    def forget(self, connection: ClientConnection) -> None:
        """Stop the time of a connection."""
        self._due_s.pop(connection, None)

    def expire_first(self) -> bool:
        """End the time of the connection that waits for longest; False if none does."""
        if not self._due_s:
            return False
        connection = next(iter(self._due_s))
        del self._due_s[connection]
        self._on_late(connection)
        return True

    def _look(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        while self._due_s:
            due_s = next(iter(self._due_s.values()))
            if due_s > now_s:
                self._timer = self._loop.call_at(due_s, self._look)
                return
            self.expire_first()


class ConnectionFactory(AiohttpServer):
    """Makes the connections of one listener."""

    def __init__(self, made: web.Server, rules: Rules) -> None:
        """`made`: aiohttp's own server of the same application."""
        super().__init__(made)
        self._rules = rules
        seconds = rules.header_timeout_s
        self._heads = HeaderTimeouts(self.loop, seconds, ClientConnection.head_is_late)
        self._silent = HeaderTimeouts(self.loop, seconds, ClientConnection.close_silent)

    def __call__(self) -> RequestHandler:
        """Make the protocol of an accepted connection."""
        watched = self._heads, self._silent
        return ClientConnection(self, self._rules, *watched, loop=self.loop, **self.options)

    def end_idle(self, most: int) -> None:
        """Close connections that wait for their next request, the oldest first."""
        idle = (c for c in self.connections if isinstance(c, ClientConnection) and c.is_idle)
        for connection in list(islice(idle, most)):
            connection.close_idle()

    def make_room(self, *, ends_idle: bool) -> bool:
        """Close the connection that has been silent for longest since it was made.

        `ends_idle`: for want of one the oldest that waits for its next request.
        """
        if self._silent.expire_first():
            return True
        idle = (c for c in self.connections if isinstance(c, ClientConnection) and c.is_idle)
        oldest = next(idle, None) if ends_idle else None
        if oldest is not None:
            oldest.give_way()
        return oldest is not None


class Runner(AiohttpRunner):
    """Runs an application with `ClientConnection` for its connections."""

    __slots__ = ("_rules",)

    def __init__(self, app: web.Application, rules: Rules, **options: Any) -> None:
        super().__init__(app, **{**LIMITS, **options})
        self._rules = rules

    def exchange_server(self, made: web.Server) -> ConnectionFactory:
        """A ConnectionFactory in place of aiohttp's server."""
        return ConnectionFactory(made, self._rules)


def connection_of(request: web.BaseRequest) -> ClientConnection:
    """The connection over which a request came."""
    return cast(ClientConnection, request.protocol)
