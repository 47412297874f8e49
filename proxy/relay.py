"""An instance's answer on its way to the client: bytes as they came, under back-pressure.

Up to the first event nothing is promised to the client, so an instance can still be replaced
unseen. After it, a failure is said inside the stream, and the connection closes without the
terminal chunk, so that no client takes a cut answer for a whole one.

Bytes go round aiohttp's writer: a piece is scanned and written to the client's transport in the
call that read it from the instance. aiohttp still owns the client's connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import HttpVersion11, web

from proxy.answer import Reply
from proxy.core.framing import Chunked, UntilClose, wrap
from proxy.core.sse import Scanner
from proxy.deadline import IdleLimit

GROW_EVENTS = 16
"""Output is charged in steps of this many events."""
LAST_CHUNK = b"0\r\n\r\n"
CLOSE = b"Connection: close\r\n"
KEEP_ALIVE = b"Connection: keep-alive\r\n"
CUT_S = 1.0


class StreamCutError(Exception):
    """The answer ended before its end; `detail` says how."""

    def __init__(self, detail: str, *, timed_out: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.timed_out = timed_out


class StalledClientError(ConnectionResetError):
    """The client holds its connection and reads nothing: as good as gone."""


class RelayResponse(web.StreamResponse):
    """What aiohttp sees of an answer whose bytes go round it.

    Its state is that of a response whose head is out (`begin`) and then whole (`end`), so that
    keep-alive, pipelined requests and errors are handled as for any other. One that is `cut`
    closes the connection instead.
    """

    def __init__(self, request: web.Request, reply: Reply, extra: bytes) -> None:
        """`extra`: our own header lines, each with its end."""
        super().__init__(status=reply.status, reason="")
        self._request = request
        self._extra = extra
        self._is_1_1 = request.version >= HttpVersion11
        framing = reply.framing
        is_open = isinstance(framing, UntilClose)
        self.rechunks = is_open and self._is_1_1
        self.unchunks = isinstance(framing, Chunked) and not self._is_1_1
        self.closes = CLOSE in extra
        ends_with_close = self.unchunks or (is_open and not self._is_1_1)
        self._keep_alive = request.keep_alive and not ends_with_close and not self.closes

    def begin(self, reply: Reply) -> bytes:
        """The head, for the caller to write: from now on no other answer can be given."""
        parts = [b"HTTP/1.1" if self._is_1_1 else b"HTTP/1.0", reply.head.after_version]
        if self.rechunks or (isinstance(reply.framing, Chunked) and not self.unchunks):
            parts.append(b"Transfer-Encoding: chunked\r\n")
        elif (length := reply.head.length) is not None and not self.unchunks:
            parts.append(b"Content-Length: %b\r\n" % length)
        if self._keep_alive != self._is_1_1 and not self.closes:
            parts.append(CLOSE if self._is_1_1 else KEEP_ALIVE)
        parts += (self._extra, b"\r\n")
        head = b"".join(parts)
        self._payload_writer = self._request.writer
        self._payload_writer.output_size = len(head)
        return head

    async def taken(self) -> None:
        """Wait until the client has taken most of what was written; bounded by the caller."""
        await self._request.writer.drain()

    def end(self) -> None:
        """Everything is written."""
        self._eof_sent = True

    def cut(self, last_words: bytes | None) -> None:
        """Close after what was written, without the terminal chunk or the missing bytes.

        A client that does not read has `CUT_S` to take the rest of it.
        """
        self._eof_sent = True
        self._keep_alive = False
        transport = self._request.transport
        if transport is not None and last_words and not transport.is_closing():
            transport.write(last_words)
        self._request.protocol.force_close()
        if transport is not None and transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(CUT_S, transport.abort)


class Relay:
    """One answer's way to its client; the sink of its reply."""

    __slots__ = (
        "_client",
        "_feed",
        "_frame",
        "_framing",
        "_is_end_kept",
        "_kept",
        "_mark",
        "_on_mark",
        "_reframes",
        "_write",
        "is_paused",
        "reply",
        "response",
        "scanner",
        "transport",
    )

    def __init__(
        self,
        request: web.Request,
        reply: Reply,
        response: RelayResponse,
        scanner: Scanner,
        on_mark: Callable[[], int],
    ) -> None:
        """`on_mark` is called when a piece was scanned, before the client gets it.

        It says at how many events it wants to be called again.
        """
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client left")
        self._client = request.protocol
        self.transport = transport
        self._write = transport.write
        self.reply, self.response, self.scanner = reply, response, scanner
        self._framing = reply.framing
        self._frame = reply.framing.feed
        self._feed = scanner.feed
        self._reframes = response.rechunks or response.unchunks
        self._on_mark = on_mark
        self._mark = 0
        self._kept = b""
        self.is_paused = self._is_end_kept = False

    def begin(self) -> None:
        """Write the head, and what is already there of the body."""
        body = b"".join(self.reply.body)
        self.reply.body.clear()
        wire = self.reply.pour(self._piece)
        self._pass(self.response.begin(self.reply), wire, body)
        if not self.is_paused:
            self.reply.resume()

    def _piece(self, wire: bytes) -> None:
        """A piece was read from the instance: the hot path. Raises FramingError."""
        body = self._frame(wire)
        if self._framing.at_end or self._reframes:
            if self._framing.at_end:
                wire = self.reply.ended(wire)
            self._pass(b"", wire, body)
            return
        self._feed(body)
        if self.scanner.events >= self._mark:
            self._mark = self._on_mark()
        try:
            self._write(wire)
        except RuntimeError:
            self._is_gone()
        if self._client.writing_paused:
            self._hold()

    def _is_gone(self) -> None:
        """The client's connection was closed in this turn of the loop (so says uvloop).

        aiohttp cancels the task in the next one; until then there is nobody to read for.
        """
        self.reply.pause()

    def _pass(self, head: bytes, wire: bytes, body: bytes) -> None:
        """Every other piece: the first, the last, and what has to be framed anew."""
        self._feed(body)
        if self.scanner.events >= self._mark:
            self._mark = self._on_mark()
        if data := head + self._framed(wire, body):
            try:
                self._write(data)
            except RuntimeError:
                self._is_gone()
        if self._client.writing_paused:
            self._hold()

    def _framed(self, wire: bytes, body: bytes) -> bytes:
        """A piece as the client gets it. The end is kept back until the answer proves whole."""
        framing, response = self._framing, self.response
        is_whole = framing.is_done and not self._is_broken_off
        if response.unchunks:
            return body
        if response.rechunks:
            return (wrap(body) if body else b"") + (LAST_CHUNK if is_whole else b"")
        if not framing.at_end:
            return wire
        if is_whole:
            return self._kept + wire
        at = max(0, framing.last_at)
        if not self._kept:
            self._is_end_kept = framing.last_at >= 0
        self._kept += wire[at:]
        return wire[:at]

    @property
    def _is_broken_off(self) -> bool:
        """Whether a stream, now at its end, has not said that it is complete."""
        return self.reply.is_stream and not self.scanner.is_done

    def _hold(self) -> None:
        """The client takes no more: pause its instance, and nobody else's."""
        self.is_paused = True
        self.reply.pause()
        self.reply.wake()

    def progress(self) -> object:
        """Another value whenever something has moved on either side."""
        return self.scanner.size, self.transport.get_write_buffer_size()

    def last_words(self, event: bytes) -> bytes | None:
        """Wire bytes for an event after a cut; None where it could not be told from the answer."""
        if self.response.unchunks:
            return event
        if self.response.rechunks or self._is_end_kept:
            return wrap(event)
        return self._framing.amid(event)

    async def run(self, idle_timeout_s: float) -> None:
        """Pass the body on until its end; raises StreamCutError when either side stops moving."""
        self.begin()
        reply = self.reply
        if not reply.is_over or self.is_paused:
            await self._run(idle_timeout_s)
        if reply.failure is not None:
            raise StreamCutError(f"upstream: {reply.failure.detail}")
        if self._is_broken_off:
            raise StreamCutError("upstream: the stream ended without its end marker")
        self.response.end()

    async def _run(self, idle_timeout_s: float) -> None:
        try:
            with IdleLimit(idle_timeout_s, self.progress):
                while self.is_paused or not self.reply.is_over:
                    if self.is_paused:
                        await self.response.taken()
                        self.is_paused = False
                        self.reply.resume()
                    else:
                        await self.reply.moved()
        except TimeoutError as error:
            late = f"for {idle_timeout_s:g} s (--idle-timeout)"
            if self.is_paused:
                raise StalledClientError(f"the client took nothing {late}") from error
            raise StreamCutError(f"upstream: silent {late}", timed_out=True) from error
