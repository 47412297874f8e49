"""The response object for aiohttp while the relay bypasses it; and answers that arrive whole."""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11, web

from proxy.net.server.aiohttp_adapter import AiohttpResponse
from proxy.net.upstream.response import UpstreamResponse
from proxy.protocol.framing import Chunked, Length, UntilClose
from proxy.protocol.streams.sse import usage_member

CLOSE = b"Connection: close\r\n"
KEEP_ALIVE = b"Connection: keep-alive\r\n"
CUT_S = 1.0


class ClientResponse(AiohttpResponse):
    """The response object that aiohttp sees while the relay writes past it.

    Its state is that of a response whose head is out (`begin`) and then whole (`note_end`), so that
    keep-alive, pipelined requests and errors are handled as for any other. One that is `cut`
    closes the connection instead.
    """

    def __init__(self, request: web.Request, reply: UpstreamResponse, extra: bytes) -> None:
        """`extra`: our own header lines, each with its end."""
        self._request = request
        self._extra = extra
        self.has_given_way = False
        self._is_1_1 = request.version >= HttpVersion11
        framing = reply.framing
        is_open = isinstance(framing, UntilClose)
        # A stream's length says nothing when events may be added to it.
        is_open = is_open or (reply.is_stream and not isinstance(framing, Chunked))
        self.rechunks = is_open and self._is_1_1
        self.unchunks = isinstance(framing, Chunked) and not self._is_1_1
        self.closes = CLOSE in extra
        ends_with_close = self.unchunks or (is_open and not self._is_1_1)
        keep_alive = request.keep_alive and not ends_with_close and not self.closes
        super().__init__(reply.status, keep_alive=keep_alive)

    def begin(self, reply: UpstreamResponse) -> bytes:
        """The head, for the caller to write: from now on no other answer can be given."""
        parts = [b"HTTP/1.1" if self._is_1_1 else b"HTTP/1.0", reply.head.after_version]
        if self.rechunks or (isinstance(reply.framing, Chunked) and not self.unchunks):
            parts.append(b"Transfer-Encoding: chunked\r\n")
        elif (
            (length := reply.head.length) is not None
            and reply.status != 204
            and not (self.unchunks or reply.is_stream)
        ):
            parts.append(b"Content-Length: %b\r\n" % length)
        if self.keep_alive != self._is_1_1 and not self.closes:
            parts.append(CLOSE if self._is_1_1 else KEEP_ALIVE)
        parts += (self._extra, b"\r\n")
        head = b"".join(parts)
        self.note_head(self._request.writer, len(head))
        return head

    async def taken(self) -> None:
        """Wait until the client has read most of what was written; the caller limits the time."""
        await self._request.writer.drain()

    @property
    def held_bytes(self) -> int:
        """Bytes that the client has not read yet."""
        transport = self._request.transport
        return 0 if transport is None else transport.get_write_buffer_size()

    def give_way(self) -> None:
        """End the connection: what its client has not read is the largest of too much."""
        self.has_given_way = True
        if self._request.transport is not None:
            self._request.transport.abort()

    def cut(self, last_words: bytes | None) -> None:
        """Close after what was written, without the terminal chunk or the missing bytes.

        A client that does not read has `CUT_S` to take the rest of it.
        """
        self.note_end()
        self.force_close()
        transport = self._request.transport
        if transport is not None and last_words and not transport.is_closing():
            transport.write(last_words)
        self._request.protocol.force_close()
        if transport is not None and transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(CUT_S, transport.abort)


AT_ONCE_BYTES = 32768
"""An answer up to this size never fills an empty transport, so there is no wait for the client."""


def is_whole(request: web.Request, reply: UpstreamResponse) -> bool:
    """Whether the answer is complete and can be written to the client at once."""
    if not reply.is_over or reply.is_stream or type(reply.framing) is not Length:
        return False
    transport = request.transport
    if reply.failure is not None or transport is None or transport.get_write_buffer_size():
        return False
    return len(reply.head.after_version) + reply.held_bytes <= AT_ONCE_BYTES


def pass_on(
    request: web.Request, reply: UpstreamResponse, response: ClientResponse
) -> bytes | None:
    """Write a whole answer; returns its `usage_member`."""
    assert request.transport is not None
    body = b"".join(reply.body)
    try:  # noqa: SIM105 - `suppress` takes half a microsecond, and this is every plain request
        request.transport.write(response.begin(reply) + body)
    except RuntimeError:
        pass  # uvloop: the client closed in this turn of the loop; the task is cancelled next
    response.note_end()
    reply.close()
    return usage_member(body)
