"""Drain: the end of a proxy after a signal, or after another process has taken over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from aiohttp import web

from proxy.config.in_force import OptionsInForce
from proxy.net.server.handshakes import HANDSHAKE_S
from proxy.state.detached import DetachedTasks
from proxy.state.in_flight import InFlight
from proxy.state.queue import WaitingRoom

ACCEPT_WHILE_DRAINING_S = 5.0
"""A draining proxy still accepts connections for this long, until load balancers notice."""
KEPT_S = 1.0
"""An idle kept connection stays open for this long in a drain: closed at once, it could cut off a
client that is just sending."""
CUT_S = 1.0
"""Time for cut requests to send their error events."""
ACCEPTED_S = 0.2
"""A connection that was just accepted is counted after this time; with TLS, after its handshake."""
_LOOK_S = 0.1
_log = logging.getLogger(__name__)


class Drain:
    """Ends one proxy: closes its listeners, waits for requests, cuts what is left.

    `stop` is the event that a signal sets.
    """

    def __init__(
        self,
        options: OptionsInForce,
        in_flight: InFlight,
        waiting: WaitingRoom,
        detached: DetachedTasks,
        runners: Sequence[web.AppRunner],
        stop: asyncio.Event,
    ) -> None:
        self._options = options
        self._in_flight, self._waiting, self._detached = in_flight, waiting, detached
        self._runners = runners
        self._stop = stop

    async def drain(self) -> None:
        """Turn readiness off, accept a little longer, and give running requests time to finish."""
        limit_s = self._options.settings.drain_seconds
        self._in_flight.is_leaving = self._in_flight.is_draining = True
        self._waiting.close()
        _log.info("draining: %d requests in flight", self._in_flight.count)
        accept_s = min(ACCEPT_WHILE_DRAINING_S, limit_s / 2)
        if await self._idle_within(accept_s) and await self._left_within(min(KEPT_S, accept_s)):
            return
        await _stop_accepting(self._runners[:1])
        if self._stop.is_set() or not await self._idle_within(limit_s - accept_s):
            await self._cut("second signal" if self._stop.is_set() else f"after {limit_s:g} s")

    async def hand_over(self) -> None:
        """Stop accepting, and serve the connected clients until they have left.

        Nothing is refused: readiness stays on, since another process serves the address, and
        requests in the queue keep waiting. A kept connection is not closed while its client may be
        sending: it ends with its next answer or after its idle time. A signal turns this into a
        drain.
        """
        in_flight, settings = self._in_flight, self._options.settings
        in_flight.is_leaving = True
        await _stop_accepting(self._runners)
        _log.info("handed over: %d requests, %d connections", in_flight.count, self._connected())
        least_s = HANDSHAKE_S if settings.tls_cert else ACCEPTED_S
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.handover_seconds):
                await self._signal_within(least_s)
                while self._has_work() and not self._stop.is_set():
                    await self._signal_within(_LOOK_S)
        if self._stop.is_set():
            self._stop.clear()
            await self.drain()
        elif in_flight.count:
            await self._cut(f"{settings.handover_seconds:g} s after a hot restart")

    def _has_work(self) -> bool:
        """Whether there are connections, requests, or detached tasks such as KV releases."""
        return bool(self._connected() or self._in_flight.count or self._detached.live)

    def _connected(self) -> int:
        return sum(len(r.server.connections) for r in self._runners if r.server is not None)

    async def _cut(self, why: str) -> None:
        _log.warning("drain: %d requests cut (%s)", self._in_flight.count, why)
        self._stop.clear()
        self._in_flight.cut()
        await self._idle_within(CUT_S)

    async def _left_within(self, seconds: float) -> bool:
        """Wait for kept connections to close; False if one of them has sent a request."""
        end_s = asyncio.get_running_loop().time() + seconds
        while self._connected() and not self._stop.is_set():
            left_s = end_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                break
            await self._signal_within(min(_LOOK_S, left_s))
        return not self._in_flight.count

    async def _signal_within(self, seconds: float) -> None:
        """Wait for a signal, at most for this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    async def _idle_within(self, seconds: float) -> bool:
        """Wait for the last request to end; False after this time or at a signal."""
        idle = self._in_flight.idle
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await first_of(idle, self._stop)
                return idle.is_set()
        return False


def closing(in_flight: InFlight) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """An `on_response_prepare` handler: a leaving proxy's answers close kept connections."""

    async def say_close(request: web.Request, response: web.StreamResponse) -> None:
        del request
        if in_flight.is_leaving:
            response.headers["Connection"] = "close"
            response.force_close()

    return say_close


async def first_of(*events: asyncio.Event) -> None:
    """Wait for any of these events."""
    async with asyncio.TaskGroup() as group:
        waits = [group.create_task(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


async def _stop_accepting(runners: Sequence[web.AppRunner]) -> None:
    for runner in runners:
        for site in list(runner.sites):
            await site.stop()
