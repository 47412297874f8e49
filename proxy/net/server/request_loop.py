"""aiohttp's connection, serving its requests in the one task that it has anyway.

aiohttp makes a task for each request, so that context variables are apart; nothing here has any.
Two passes of the event loop and a dozen calls are saved, which is as much as a placement costs.
Everything else is as aiohttp does it: keep-alive, lingering, errors, cancellation.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.http_writer import StreamWriter
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import ERROR, RequestHandler, _ErrInfo


class SerialHandler(RequestHandler):
    """One client's connection."""

    __slots__ = ()

    async def start(self) -> None:
        """Serve one request after the other until the connection is to be closed."""
        goes_on = True
        while goes_on and not self._force_close:
            if not self._messages:
                try:
                    self._waiter = self._loop.create_future()
                    await self._waiter
                finally:
                    self._waiter = None
                continue  # woken, and then given up: there may be none
            goes_on = await self._serve(*self._taken())
        if not self._force_close:
            self._task_handler = None
            if self.transport is not None:
                self.transport.close()

    def _taken(self) -> tuple[Any, StreamReader]:
        """The next message of the queue, whose parser may go on."""
        taken = self._messages.popleft()
        if self._parser is not None:
            self._parser.message_consumed()
        if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
            self._resume_reading_if_drained()
        return taken

    async def _serve(self, message: Any, payload: StreamReader) -> bool:
        """Answer one message; whether another one may follow on this connection."""
        handler = self._request_handler
        if isinstance(message, _ErrInfo):
            handler, message = self._make_error_handler(message), ERROR
        assert handler is not None
        request = self._request_of(message, payload)
        try:
            response, is_reset = await self._handle_request(request, None, handler)
            if is_reset:
                return False
            self._keepalive = bool(response.keep_alive)
            if not payload.is_eof():
                await self._linger(payload)
        except ConnectionError:
            return False
        except asyncio.CancelledError:
            self.force_close()
            raise
        except Exception as error:  # noqa: BLE001 - a defect; aiohttp's own last resort
            self.log_exception("Unhandled exception", exc_info=error)
            self.force_close()
        finally:
            request._task = None  # type: ignore[assignment]  # else a cycle
        return self._stays()

    def _request_of(self, message: Any, payload: StreamReader) -> web.BaseRequest:
        assert self._manager is not None
        assert self._request_factory is not None
        self._manager.requests_count += 1
        task = self._task_handler or asyncio.current_task(self._loop)
        assert task is not None
        writer = StreamWriter(self, self._loop)
        return self._request_factory(message, payload, self, writer, task)

    def _stays(self) -> bool:
        """Whether the connection is kept; then its idle time begins."""
        if not self._keepalive or self._close or self._force_close:
            return False
        self._next_keepalive_close_time = close_s = self._loop.time() + self._keepalive_timeout
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(close_s, self._process_keepalive)
        return True

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """What aiohttp does with an answer; nothing where its bytes have gone round it."""
        if resp._eof_sent and not self._upgraded:
            return resp, False
        return await super().finish_response(request, resp, start_time)

    async def _linger(self, payload: StreamReader) -> None:
        """Read what is left of a body, for a while, so that its client gets to see the answer."""
        end_s = self._loop.time() + self._lingering_time
        try:
            while not (payload.is_eof() or self._force_close) and self._loop.time() < end_s:
                async with asyncio.timeout_at(end_s):
                    await payload.readany()
        except TimeoutError:
            pass
        if not payload.is_eof() and not self._force_close:
            self.close()
