"""One HTTP/1.1 connection to an instance.

llhttp (httptools) parses and checks an answer's head, once; the body is framed by
`protocol/framing.py`, which `UpstreamResponse` drives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from proxy.core.types import FailureKind
from proxy.net import tcp
from proxy.net.tls_records import SmallRecordsError
from proxy.net.upstream.response import Fields, Head, Share, UpstreamResponse
from proxy.protocol.errors import UpstreamFailure
from proxy.protocol.framing import FramingError, UntilClose
from proxy.protocol.memo import Memo
from proxy.protocol.streams.sse import FastPath

HEAD_BYTES, HEAD_LINES = 16384, 256
"""A longer head is refused; informational heads before it are counted in its bytes."""
READ_BYTES = 65536
"""Most bytes of one read."""
JOIN_BYTES = 32768
"""A body up to this size is copied behind its head: one buffer is written faster than two."""
SLICE_BYTES = 524288
"""Most bytes of a body that are sent in one turn of the event loop: a system call for 4 MB delays
every stream by milliseconds."""
KNOWN_HEADS: Memo[bytes, Head] = Memo(256)
"""Parsed heads by their bytes: an instance's answers of one second, and streams of one length,
begin with the same bytes."""
KNOWN_HEAD_BYTES = 2048
"""A longer head is not remembered."""
INTERIM_MAX = 20
"""Most informational answers (1xx) before the final one."""
_NOT_HTTP = "the answer is not HTTP"
_CLOSED = "the connection was closed"
_reads = memoryview(bytearray(READ_BYTES))


def _drop(data: bytes) -> None:
    """Sink of a closed connection's bytes; it refers to no connection."""


class _Reader:
    """llhttp's callbacks for a head."""

    __slots__ = ("fields", "is_complete")

    def __init__(self) -> None:
        self.fields: Fields = []
        self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_complete = True


class UpstreamConnection(asyncio.BufferedProtocol):
    """A connection, used by one request at a time. `on_rest` is called when it is free again.

    All reads go into one buffer of the process, so a piece is at most `READ_BYTES`, and so is what
    comes on top of a client's full buffer. The event loop's own reads are four times as long.
    """

    __slots__ = (
        "_buffer",
        "_fast_path",
        "_head_bytes",
        "_interim",
        "_is_full",
        "_is_paused",
        "_on_lost",
        "_on_rest",
        "_reply",
        "_transport",
        "_unsent",
        "buffer_updated",
        "get_buffer",
        "idle_since_s",
        "is_closed",
        "loop",
        "requests",
        "share",
    )

    get_buffer: Callable[[int], memoryview]  # type: ignore[assignment]
    buffer_updated: Callable[[int], None]  # type: ignore[assignment]

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_rest: Callable[[UpstreamConnection], None],
        on_lost: Callable[[UpstreamConnection], None],
        share: Share | None = None,
    ) -> None:
        self.loop = loop
        self.share = share
        self._on_rest, self._on_lost = on_rest, on_lost
        self._reply: UpstreamResponse | None = None
        # The event loop gets these attributes once, and calls them for every read.
        self._fast_path = reads = FastPath(_reads)
        self.get_buffer, self.buffer_updated = reads.get_buffer, reads.buffer_updated
        self._buffer = b""
        self._head_bytes = self._interim = 0
        self._is_paused = self._is_full = False
        self._unsent: memoryview | None = None
        self._transport: asyncio.Transport
        self.is_closed = False
        self.idle_since_s = 0.0
        self.requests = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected, with the TLS handshake done."""
        self._fast_path.rest = self._take
        self._transport = cast(asyncio.Transport, transport)
        tcp.bound_reads(transport.get_extra_info("socket"))
        if (sock := transport.get_extra_info("socket")) is not None:
            tcp.watch(sock)

    def ask(self, head: bytes, body: bytes | None, *, is_head: bool = False) -> UpstreamResponse:
        """Send a request; returns its answer, not begun yet."""
        reply = self._reply = UpstreamResponse(self, is_head=is_head)
        self.requests += 1
        self._head_bytes = self._interim = 0
        try:
            if not body:
                self._transport.write(head)
            elif len(body) <= JOIN_BYTES:
                self._transport.write(head + body)
            elif len(body) <= SLICE_BYTES:
                self._transport.writelines([head, body])
            else:
                view = memoryview(body)
                self._unsent = view[SLICE_BYTES:]
                self._transport.writelines([head, view[:SLICE_BYTES]])
                if not self._is_full:
                    self.loop.call_soon(self._send_on, reply)
        except RuntimeError:
            # uvloop raises this for a connection that was closed in this turn of the loop.
            self._broke(UpstreamFailure(FailureKind.RESET, _CLOSED))
        return reply

    def _send_on(self, reply: UpstreamResponse, *, has_looked: bool = False) -> None:
        """Send the next slice of a long body, while the answer is wanted and the instance reads.

        Bytes that the instance has sent are read first: it may have answered and closed, and a
        write that then fails would lose the answer.
        """
        unsent = self._unsent
        if unsent is None or self._reply is not reply:
            return
        if not has_looked and tcp.has_news(self._transport.get_extra_info("socket")):
            self.loop.call_soon(partial(self._send_on, reply, has_looked=True))
            return
        self._unsent = unsent[SLICE_BYTES:] if len(unsent) > SLICE_BYTES else None
        try:
            self._transport.write(unsent[:SLICE_BYTES])
        except RuntimeError:
            self._broke(UpstreamFailure(FailureKind.RESET, _CLOSED))
            return
        if self._unsent is not None and not self._is_full:
            self.loop.call_soon(self._send_on, reply)

    def pause_writing(self) -> None:
        """The instance reads less than is sent."""
        self._is_full = True

    def resume_writing(self) -> None:
        """The instance reads again."""
        self._is_full = False
        if self._unsent is not None and self._reply is not None:
            self.loop.call_soon(self._send_on, self._reply)

    def _take(self, data: bytes) -> None:
        """A piece that the fast path did not pass on."""
        reply = self._reply
        if reply is None:
            self.abort()  # unasked for: what follows could be taken for an answer
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

    def _take_head(self, reply: UpstreamResponse, data: bytes) -> None:
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
            tcp.acknowledge_now(self._transport.get_extra_info("socket"))
            reply.wake()

    def _read_head(self, reply: UpstreamResponse, head: bytes) -> None:
        known = KNOWN_HEADS.known.get(head)
        if known is None:
            known = _parsed(head)
            if len(head) <= KNOWN_HEAD_BYTES:
                KNOWN_HEADS.keep(head, known)
        if known.status >= 200:
            if known.status < 300 and not self._is_sent():
                # A refusal may come early. A success would hold the request as long as it lasts.
                raise FramingError("it answers before it has read the request")
            reply.begin(known)
            return
        self._interim += 1
        if self._interim > INTERIM_MAX:
            raise FramingError("too many informational answers")

    def _is_sent(self) -> bool:
        """Whether the kernel has the whole request."""
        return self._unsent is None and self._transport.get_write_buffer_size() == 0

    def _finish(self, reply: UpstreamResponse) -> None:
        """The answer is complete: the connection is free again, or closed."""
        # If the request is still being sent (refused early), its rest would precede the next one.
        is_sent = self._is_sent()
        self._forget()
        if reply.keeps and is_sent and not self.is_closed:
            self.resume()
            self._on_rest(self)
        else:
            self.abort()
        reply.wake()

    def eof_received(self) -> bool:
        """The instance sends nothing more; close."""
        self.is_closed = True
        self._end(UpstreamFailure(FailureKind.RESET, _CLOSED))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self.is_closed = True
        self._fast_path.rest = _drop
        detail = "the connection broke" if exc is not None else _CLOSED
        detail = str(exc) if isinstance(exc, SmallRecordsError) else detail
        self._end(UpstreamFailure(FailureKind.RESET, detail), is_clean=exc is None)
        self._on_lost(self)

    def _end(self, failure: UpstreamFailure, *, is_clean: bool = True) -> None:
        reply = self._reply
        if reply is None:
            return
        if is_clean and reply.has_begun and isinstance(reply.framing, UntilClose):
            self._forget()
            reply.framing.is_done = reply.is_over = True
            reply.framing.is_whole = False
            reply.sink(b"")
            reply.wake()
            self.abort()
            return
        self._broke(failure)

    def _broke(self, failure: UpstreamFailure) -> None:
        reply = self._reply
        self._forget()
        self.abort()
        if reply is not None:
            reply.fail(failure)

    def leave(self, reply: UpstreamResponse) -> None:
        """Drop the rest of this answer."""
        if self._reply is reply:
            self._forget()
            self.abort()

    def _forget(self) -> None:
        self._reply = self._unsent = None
        self._fast_path.leave()

    def fast_path(self, reply: UpstreamResponse) -> FastPath | None:
        """The fast path for the pieces of this answer, a stream; None if it is over."""
        if self._reply is not reply:
            return None
        tcp.acknowledge_late(self._transport.get_extra_info("socket"))
        return self._fast_path

    def leave_fast_path(self, reply: UpstreamResponse) -> None:
        """Send every further piece of this answer to its sink."""
        if self._reply is reply:
            self._fast_path.leave()

    def is_heard_within(self, seconds: float) -> bool:
        """Whether its answer has begun and has gone on lately; the kernel knows."""
        reply = self._reply
        if reply is None or not reply.has_begun or self.is_closed:
            return False
        return tcp.is_heard_within(self._transport.get_extra_info("socket"), seconds)

    def give_up(self, failure: UpstreamFailure) -> bool:
        """End its answer, if that has begun: its instance will not go on with it."""
        reply = self._reply
        if reply is None or not reply.has_begun or self.is_closed:
            return False
        self._broke(failure)
        return True

    def hang_up(self, reply: UpstreamResponse) -> bool:
        """Close the sending side; False if the connection could not be read after that."""
        if self._reply is not reply or self.is_closed or not self._transport.can_write_eof():
            return False
        self._unsent = None
        self._transport.write_eof()
        return True

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


def _parsed(head: bytes) -> Head:
    """Parse a head with llhttp; raises FramingError or HttpParserError."""
    seen = _Reader()
    if head.count(b"\n") > HEAD_LINES:
        raise FramingError("the answer's head has too many lines")
    parser = HttpResponseParser(seen)
    try:
        parser.feed_data(head)
    except HttpParserUpgrade as error:
        raise FramingError("switched protocols unasked") from error
    if not seen.is_complete or not head.startswith(b"HTTP/1."):
        raise FramingError(_NOT_HTTP)
    status = parser.get_status_code()
    if status == 101 or status < 100:
        raise FramingError("switched protocols unasked")
    return Head(head, status, seen.fields)
