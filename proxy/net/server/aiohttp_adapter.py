"""aiohttp's private parts under public names; no other file of the proxy uses them.

aiohttp keeps a client's connection, its parser and its limits. It has no public way to refuse a
parsed message, serve a connection in one task, or write an answer's bytes past its writer. Any
release of aiohttp may rename some of this: `test_aiohttp_adapter.py` lists all of it and names what
is missing.
"""

from __future__ import annotations

import asyncio
import ssl
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.http_writer import StreamWriter
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import ERROR, RequestHandler, _ErrInfo
from multidict import CIMultiDict

Unreadable = _ErrInfo
"""Queued in place of a message that could not be parsed, with the exception."""
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
T = TypeVar("T")
_ERROR = ERROR._replace(version=HttpVersion11)
"""Stands in for a message that is refused. aiohttp's own is answered in HTTP/1.0, in which Upgrade
means nothing."""
_NO_HEADERS = CIMultiDict[str]()
"""Shared by all answers whose head bypasses aiohttp."""


class Slot(Protocol[T]):
    """An attribute of aiohttp's object under another name."""

    def __get__(self, holder: object, kind: type | None = None, /) -> T:
        """Get the attribute."""

    def __set__(self, holder: object, value: T, /) -> None:
        """Set the attribute."""


def _slot(owner: type, name: str) -> Any:
    """The descriptor of a slot: under another name it is as fast, unlike a property."""
    return getattr(owner, name)


def unreadable(status: int, error: Exception) -> Unreadable:
    """The queue entry for a message that is refused."""
    return _ErrInfo(status=status, exc=error, message="")


class AiohttpConnection(RequestHandler):
    """A client's connection as aiohttp has it.

    `messages`: parsed and not served yet, with their bodies. `waiter`: set while the serving task
    waits for a message. `has_closed`: nothing more is written. `is_closing`: closed after the
    message in service. `reading_paused`: by a body that is not read; `buffer_paused`: by a full
    queue.
    """

    __slots__ = ()

    loop: Slot[asyncio.AbstractEventLoop] = _slot(RequestHandler, "_loop")
    messages: Slot[deque[tuple[RawRequestMessage | Unreadable, StreamReader]]] = _slot(
        RequestHandler, "_messages"
    )
    request_count: Slot[int] = _slot(RequestHandler, "_request_count")
    current_request: Slot[web.BaseRequest | None] = _slot(RequestHandler, "_current_request")
    waiter: Slot[asyncio.Future[None] | None] = _slot(RequestHandler, "_waiter")
    serving_task: Slot[asyncio.Task[None] | None] = _slot(RequestHandler, "_task_handler")
    has_closed: Slot[bool] = _slot(RequestHandler, "_force_close")
    is_closing: Slot[bool] = _slot(RequestHandler, "_close")
    keeps_alive: Slot[bool] = _slot(RequestHandler, "_keepalive")
    lingering_s: Slot[float] = _slot(RequestHandler, "_lingering_time")
    reading_paused: Slot[bool] = _slot(RequestHandler, "_reading_paused")
    buffer_paused: Slot[bool] = _slot(RequestHandler, "_buffer_paused")
    pause_transport = RequestHandler._pause_transport_reading
    resume_transport = RequestHandler._resume_transport_reading
    handle_request = RequestHandler._handle_request

    def next_message(self) -> tuple[RawRequestMessage | Unreadable, StreamReader]:
        """Take the next message off the queue; the parser may go on."""
        taken = self.messages.popleft()
        if self._parser is not None:
            self._parser.message_consumed()
        if self.buffer_paused and len(self.messages) <= self._msg_queue_resume_size:
            self._resume_reading_if_drained()
        return taken

    def request_of(
        self, message: RawRequestMessage | Unreadable, payload: StreamReader
    ) -> tuple[web.BaseRequest, Handler]:
        """The request of a message, and its handler."""
        handler = self._request_handler
        if isinstance(message, _ErrInfo):
            handler, message = self._make_error_handler(message), _ERROR
        assert handler is not None
        assert self._manager is not None
        assert self._request_factory is not None
        self._manager.requests_count += 1
        task = self.serving_task or asyncio.current_task(self.loop)
        assert task is not None
        writer = StreamWriter(self, self.loop)
        return self._request_factory(message, payload, self, writer, task), handler

    def begin_idle_time(self) -> None:
        """Start the keep-alive timeout: the connection waits for another request."""
        close_s = self.loop.time() + self._keepalive_timeout
        self._next_keepalive_close_time = close_s
        if self._keepalive_handle is None:
            self._keepalive_handle = self.loop.call_at(close_s, self._process_keepalive)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Finish an answer as aiohttp does; nothing to do if its bytes have bypassed aiohttp."""
        if resp._eof_sent and not self._upgraded:
            return resp, False
        return await super().finish_response(request, resp, start_time)


def taken_whole(content: StreamReader) -> bytes:
    """A body that is there to its end, which nobody has read of.

    Nearly all have come in one piece: it is taken without the calls for any other one.
    """
    pieces = () if content is EMPTY_PAYLOAD else content._buffer
    is_plain = len(pieces) == 1 and content._exception is None and not content._buffer_offset
    if not is_plain or content._protocol._reading_paused:
        return content.read_nowait()
    content._size = 0
    return content._buffer.popleft()


def unread_bytes(content: StreamReader) -> int:
    """Bytes of a body that have come and that nobody has read."""
    return 0 if content is EMPTY_PAYLOAD else content._size


def release_task(request: web.BaseRequest) -> None:
    """Break the reference cycle between a request and the task that served it."""
    request._task = None  # type: ignore[assignment]


class AiohttpServer(web.Server):
    """Makes the connections of one listener, in place of aiohttp's own server `made`."""

    def __init__(self, made: web.Server) -> None:
        super().__init__(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
        )
        self.loop = made._loop
        self.options = made._kwargs
        """Arguments of each connection's constructor."""

    @property
    def open_connections(self) -> int:
        """Connections that are being served."""
        return len(self._connections)

    def make_room(self, *, ends_idle: bool) -> bool:
        """Close a connection that is silent, or idle if `ends_idle`; False if there is none."""
        del ends_idle
        return False


class AiohttpRunner(web.AppRunner):
    """Runs an application with a server that `exchange_server` puts in place of aiohttp's own."""

    __slots__ = ()

    @abstractmethod
    def exchange_server(self, made: web.Server) -> web.Server:
        """The server to use instead of aiohttp's."""

    async def _make_server(self) -> web.Server:
        return self.exchange_server(await super()._make_server())


class AiohttpSite(web.TCPSite):
    """A site whose listening socket is made by the subclass; `server` accepts on it."""

    runner: Slot[web.AppRunner] = _slot(web.TCPSite, "_runner")
    server: Slot[asyncio.AbstractServer | None] = _slot(web.TCPSite, "_server")
    ssl_context: Slot[ssl.SSLContext | None] = _slot(web.TCPSite, "_ssl_context")
    host: Slot[str] = _slot(web.TCPSite, "_host")
    wanted_port: Slot[int] = _slot(web.TCPSite, "_port")
    backlog: Slot[int] = _slot(web.TCPSite, "_backlog")

    async def register(self) -> None:
        """Add the site to its runner, without listening."""
        await super(web.TCPSite, self).start()


class AiohttpResponse(web.StreamResponse):
    """A response whose bytes bypass aiohttp; its owner tells aiohttp how much was sent."""

    def __init__(self, status: int, *, keep_alive: bool) -> None:
        # What aiohttp's own `__init__` sets, without its three calls: every request makes one.
        self._state = {}
        self._headers = _NO_HEADERS
        self._status, self._reason = status, ""
        self._keep_alive = keep_alive

    def note_head(self, writer: AbstractStreamWriter, size: int) -> None:
        """The head of `size` bytes was sent; tell aiohttp's writer of the request."""
        self._payload_writer = writer
        writer.output_size = size

    def note_end(self) -> None:
        """The last byte was sent."""
        self._eof_sent = True
