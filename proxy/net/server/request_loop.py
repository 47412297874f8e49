"""Serves all requests of a client's connection in one task.

aiohttp makes a task for each request, to separate context variables; the proxy has none. This saves
two passes of the event loop and a dozen calls, as much as a placement costs. Keep-alive, lingering,
errors and cancellation are as in aiohttp.
"""

from __future__ import annotations

import asyncio

from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from proxy.net.server.aiohttp_adapter import AiohttpConnection, Unreadable, release_task
from proxy.net.server.refusals import RefusedError


class SerialHandler(AiohttpConnection):
    """aiohttp's connection with one task for all of its requests."""

    __slots__ = ()

    async def start(self) -> None:
        """Serve one request after the other until the connection is to be closed."""
        goes_on = True
        while goes_on and not self.has_closed:
            if not self.messages:
                try:
                    self.waiter = self.loop.create_future()
                    await self.waiter
                finally:
                    self.waiter = None
                continue  # the message that woke this task may have been dropped since
            goes_on = await self._serve(*self.next_message())
        if not self.has_closed:
            self.serving_task = None
            if self.transport is not None:
                self.transport.close()

    async def _serve(self, message: RawRequestMessage | Unreadable, payload: StreamReader) -> bool:
        """Answer one message; True if another one may follow on this connection."""
        request, handler = self.request_of(message, payload)
        try:
            response, is_reset = await self.handle_request(request, None, handler)
            if is_reset:
                return False
            self.keeps_alive = bool(response.keep_alive)
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
            release_task(request)
        if not self.keeps_alive or self.is_closing or self.has_closed:
            return False
        self.begin_idle_time()
        return True

    async def _linger(self, payload: StreamReader) -> None:
        """Read the rest of a body, for a while, so that its client can read the answer."""
        end_s = self.loop.time() + self.lingering_s
        try:
            while not (payload.is_eof() or self.has_closed) and self.loop.time() < end_s:
                async with asyncio.timeout_at(end_s):
                    await payload.readany()
        except (TimeoutError, RefusedError):  # the rest of a body that was refused may break, too
            pass
        if not payload.is_eof() and not self.has_closed:
            self.close()
