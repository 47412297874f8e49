"""One HTTP/1.1 connection to an instance, and the answer that is on its way over it.

llhttp (httptools) reads and judges an answer's head, once; the body is framed by `core.framing`.
Until somebody takes an answer over (`Reply.pour`), its bytes are held, up to `HOLD_BYTES`, then
the connection is paused; afterwards each piece is handed on in the call in which it was read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from proxy.core.framing import Chunked, Framing, FramingError, Length, UntilClose
from proxy.core.types import FailureKind
from proxy.errors import UpstreamFailure

HEAD_BYTES = 65536
"""A longer head is refused; informational ones before it count in."""
HOLD_BYTES = 65536
JOIN_BYTES = 32768
"""Up to here a body is copied behind its head: one buffer is written faster than two."""
_NOT_HTTP = "the answer is not HTTP"
_CLOSED = "the connection was closed"
_NO_BODY = Length(0)

Fields = list[tuple[bytes, bytes]]
Sink = Callable[[bytes], None]


def _nowhere(data: bytes) -> None:
    """The sink of an answer that nobody wants."""


class _Head:
    """What llhttp calls while it reads a head."""

    __slots__ = ("fields", "is_complete")

    def __init__(self) -> None:
        self.fields: Fields = []
        self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_complete = True


class Reply:
    """The answer to one request: `status` and `fields` once its head is there, then the body.

    Names in `fields` are in lower case. `heard`: any byte of it has come. `is_over`: nothing more
    comes, and `failure` says so if that is too early.
    """

    __slots__ = (
        "_connection",
        "_held",
        "_held_bytes",
        "_is_head",
        "_waiter",
        "body",
        "failure",
        "fields",
        "framing",
        "has_begun",
        "heard",
        "is_over",
        "is_stream",
        "keeps",
        "reason",
        "sink",
        "status",
    )

    def __init__(self, connection: Connection, *, is_head: bool) -> None:
        self._connection = connection
        self._is_head = is_head
        self._held: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self.sink: Sink = self.hold
        self.body: list[bytes] = []
        self.failure: UpstreamFailure | None = None
        self.fields: Fields = []
        self.framing: Framing = _NO_BODY
        self.has_begun = self.heard = self.is_over = self.is_stream = self.keeps = False
        self._held_bytes = 0
        self.status = 0
        self.reason = b""

    def header(self, name: bytes) -> bytes | None:
        """The first header of this name (lower case)."""
        for key, value in self.fields:
            if key == name:
                return value
        return None

    def begin(self, head: bytes, parser: HttpResponseParser, fields: Fields) -> None:
        """Its head is complete and good."""
        self.status = parser.get_status_code()
        self.reason = head[13 : head.index(b"\r\n")]
        self.fields = fields
        self.has_begun = True
        kind = self.header(b"content-type") or b""
        self.is_stream = self.status == 200 and kind.lower().startswith(b"text/event-stream")
        self.framing = self._framing()
        self.keeps = self._keeps(is_1_1=head.startswith(b"HTTP/1.1"))

    def _keeps(self, *, is_1_1: bool) -> bool:
        """Whether the connection can carry another request after this answer."""
        if self._is_head or isinstance(self.framing, UntilClose):
            return False
        wish = (self.header(b"connection") or b"").lower()
        return b"close" not in wish if is_1_1 else b"keep-alive" in wish

    def _framing(self) -> Framing:
        if self._is_head or self.status in (204, 304):
            return Length(0)
        if (coding := self.header(b"transfer-encoding")) is not None:
            if coding.strip().lower() != b"chunked":
                raise FramingError("an unknown transfer coding")
            return Chunked()
        length = self.header(b"content-length")
        return UntilClose() if length is None else Length(int(length))

    def hold(self, data: bytes) -> None:
        """The sink until `pour`: keep a piece of the body, and tell who waits."""
        body = self.framing.feed(data)
        self._held.append(self.ended(data) if self.framing.at_end else data)
        self.body.append(body)
        self._held_bytes += len(data)
        if self._held_bytes > HOLD_BYTES:
            self.pause()
        if not self.is_over:
            self.wake()

    def ended(self, data: bytes) -> bytes:
        """A piece in which the body ends, or begins to, without what is not the body's."""
        framing = self.framing
        self.is_over = framing.is_done
        if not framing.is_done or framing.end == len(data):
            return data
        # Bytes that nobody asked for: they are not the client's, and the connection ends.
        self.keeps = False
        return data[: framing.end]

    def wake(self) -> None:
        """Let who waits look again."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def moved(self) -> None:
        """Wait until `wake`; bounded by the caller."""
        self._waiter = self._connection.loop.create_future()
        await self._waiter

    async def begun(self) -> Reply:
        """Wait for the head, and of a stream for its first bytes; raises UpstreamFailure.

        Given up while it waits, the answer is closed.
        """
        is_there = False
        try:
            while not (self.is_over or (self.has_begun and (self.body or not self.is_stream))):
                self._waiter = self._connection.loop.create_future()
                await self._waiter
            is_there = self.has_begun
        finally:
            if not is_there:
                self.close()
        if not is_there:
            assert self.failure is not None
            raise self.failure
        return self

    async def more(self) -> bool:
        """Wait for the next held piece; false when there is none. Raises UpstreamFailure."""
        pieces = len(self.body)
        self.resume()
        while len(self.body) == pieces and not self.is_over:
            await self.moved()
        if len(self.body) == pieces and self.failure is not None:
            raise self.failure
        return len(self.body) > pieces

    async def read(self, limit: int) -> bytes:
        """The body, of which at most `limit` bytes are waited for; raises UpstreamFailure."""
        while sum(map(len, self.body)) <= limit and await self.more():
            pass
        return b"".join(self.body)[:limit]

    def pour(self, sink: Sink) -> bytes:
        """From now on each piece of the wire goes to `sink`; what was held so far is returned."""
        self.sink = sink
        held = b"".join(self._held)
        # Where the last chunk begins is known within the last piece; now all are one.
        if self.framing.at_end and self._held:
            self.framing.last_at += len(held) - len(self._held[-1])
        self._held.clear()
        return held

    def pause(self) -> None:
        """Read no more from the instance."""
        self._connection.pause()

    def resume(self) -> None:
        """Read on."""
        self._connection.resume()

    def fail(self, failure: UpstreamFailure) -> None:
        """The answer ends before its end."""
        self.failure, self.is_over = failure, True
        self.wake()

    def close(self) -> None:
        """Done with it. One that is not over takes its connection along."""
        self.sink = _nowhere
        self._connection.leave(self)


class Connection(asyncio.Protocol):
    """A connection, of use to one request at a time. `on_rest` is called when it is free again."""

    __slots__ = (
        "_buffer",
        "_head_bytes",
        "_is_paused",
        "_on_lost",
        "_on_rest",
        "_reply",
        "_transport",
        "idle_since_s",
        "is_closed",
        "loop",
        "requests",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_rest: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self.loop = loop
        self._on_rest, self._on_lost = on_rest, on_lost
        self._reply: Reply | None = None
        self._buffer = b""
        self._head_bytes = 0
        self._is_paused = False
        self._transport: asyncio.Transport
        self.is_closed = False
        self.idle_since_s = 0.0
        self.requests = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected, TLS included."""
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, head: bytes, body: bytes | None, *, is_head: bool = False) -> Reply:
        """Send a request."""
        reply = self._reply = Reply(self, is_head=is_head)
        self.requests += 1
        self._head_bytes = 0
        try:
            if not body:
                self._transport.write(head)
            elif len(body) <= JOIN_BYTES:
                self._transport.write(head + body)
            else:
                self._transport.writelines([head, body])
        except RuntimeError:
            # uvloop's word for a connection that was closed in this turn of the loop.
            self._broke(UpstreamFailure(FailureKind.RESET, _CLOSED))
        return reply

    def data_received(self, data: bytes) -> None:
        """Bytes from the instance."""
        reply = self._reply
        if reply is None:
            self.abort()  # unasked for: nothing that follows could be told from an answer
            return
        try:
            if reply.has_begun:
                reply.sink(data)
            else:
                self._take_head(reply, data)
        except (HttpParserError, FramingError) as error:
            detail = str(error) if isinstance(error, FramingError) else _NOT_HTTP
            self._broke(UpstreamFailure(FailureKind.MALFORMED, detail))
            return
        if reply.is_over:
            self._finish(reply)

    def _take_head(self, reply: Reply, data: bytes) -> None:
        reply.heard = True
        self._buffer += data
        while not reply.has_begun:
            end = self._buffer.find(b"\r\n\r\n") + 4
            if end < 4:
                if len(self._buffer) > HEAD_BYTES or not b"HTTP/1."[: len(self._buffer)].startswith(
                    self._buffer[:7]
                ):
                    raise FramingError(_NOT_HTTP)
                return
            self._head_bytes += end
            if self._head_bytes > HEAD_BYTES:
                raise FramingError("the answer's head is too long")
            head, self._buffer = self._buffer[:end], self._buffer[end:]
            self._read_head(reply, head)
        rest, self._buffer = self._buffer, b""
        if rest or reply.framing.is_done:
            reply.hold(rest)
        else:
            reply.wake()

    def _read_head(self, reply: Reply, head: bytes) -> None:
        seen = _Head()
        parser = HttpResponseParser(seen)
        try:
            parser.feed_data(head)
        except HttpParserUpgrade as error:
            raise FramingError("switches protocols unasked") from error
        if not seen.is_complete or not head.startswith(b"HTTP/1."):
            raise FramingError(_NOT_HTTP)
        status = parser.get_status_code()
        if status >= 200:
            reply.begin(head, parser, seen.fields)
        elif status == 101 or status < 100:
            raise FramingError("switches protocols unasked")

    def _finish(self, reply: Reply) -> None:
        """The answer is complete: the connection is free again, or of no more use."""
        self._reply = None
        # A request that is still being sent was answered early; its rest would precede the next.
        is_sent = self._transport.get_write_buffer_size() == 0
        if reply.keeps and is_sent and not self.is_closed:
            self.resume()
            self._on_rest(self)
        else:
            self.abort()
        reply.wake()

    def eof_received(self) -> bool:
        """The instance sends nothing more; so do we."""
        self.is_closed = True
        self._end(UpstreamFailure(FailureKind.RESET, _CLOSED))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Gone."""
        self.is_closed = True
        detail = "the connection broke" if exc is not None else _CLOSED
        self._end(UpstreamFailure(FailureKind.RESET, detail), is_clean=exc is None)
        self._on_lost(self)

    def _end(self, failure: UpstreamFailure, *, is_clean: bool = True) -> None:
        reply = self._reply
        if reply is None:
            return
        if is_clean and reply.has_begun and isinstance(reply.framing, UntilClose):
            self._reply = None
            reply.is_over = True
            reply.framing.is_done = reply.framing.at_end = True
            reply.sink(b"")
            reply.wake()
            self.abort()
            return
        self._broke(failure)

    def _broke(self, failure: UpstreamFailure) -> None:
        reply, self._reply = self._reply, None
        self.abort()
        if reply is not None:
            reply.fail(failure)

    def leave(self, reply: Reply) -> None:
        """Nobody wants the rest of this answer."""
        if self._reply is reply:
            self._reply = None
            self.abort()

    def abort(self) -> None:
        """Close at once, whatever is not sent yet."""
        self.is_closed = True
        self._transport.abort()

    def pause(self) -> None:
        """Stop reading."""
        if not self._is_paused and not self.is_closed:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._is_paused and not self.is_closed:
            self._is_paused = False
            self._transport.resume_reading()
