"""Wiring: routes, start, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import signal

from aiohttp import web

from proxy import background
from proxy.admin import Admin, error_response
from proxy.config import Settings
from proxy.handler import Exchange
from proxy.service import Service
from proxy.thresholds import BusyThreshold

BACKLOG = 4096
KEEPALIVE_S = 75.0
ACCEPT_WHILE_DRAINING_S = 5.0
"""How long a draining proxy still takes what a load balancer sends before it notices."""
LINGER_S = 2.0
"""How long the rest of a refused body is read, so that the client gets to see the refusal."""
CUT_S = 1.0
"""For the last words of requests that are cut."""
CANCEL_AFTER_S = 0.1
"""The drain has had its time: what still runs is cancelled, not waited for (0: for ever)."""
_log = logging.getLogger(__name__)


class Server:
    """One listening proxy: `start`, then `stop`; `run` does both around a signal."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.service: Service
        self._runner: web.AppRunner
        self._site: web.TCPSite
        self._stop = asyncio.Event()

    @property
    def url(self) -> str:
        """Where the proxy listens; the port is the kernel's choice when 0 was asked for."""
        host, port = self._runner.addresses[0][:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def start(self) -> None:
        """Listen. Raises OSError when the port or the request log cannot be had."""
        settings = self._settings
        self.service = Service.start(settings)
        self._runner = web.AppRunner(
            application(self.service),
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            auto_decompress=False,
            shutdown_timeout=CANCEL_AFTER_S,
            lingering_time=LINGER_S,
        )
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, settings.host, settings.port, backlog=BACKLOG)
        try:
            await self._site.start()
        except OSError:
            await self.close()
            raise

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        try:
            async with asyncio.TaskGroup() as group:
                periodic = group.create_task(background.run(self.service), name="background")
                await self._stop.wait()
                self._stop.clear()
                await self.drain()
                periodic.cancel()
        finally:
            await self.close()

    def _on_signal(self) -> None:
        self._stop.set()

    async def drain(self) -> None:
        """Readiness off at once; accept a little longer; let what runs finish, up to the limit."""
        service, limit_s = self.service, self._settings.drain_seconds
        service.is_draining = True
        _log.info("draining: %d requests in flight", service.in_flight)
        accept_s = min(ACCEPT_WHILE_DRAINING_S, limit_s / 2)
        if await self._idle_within(accept_s):
            return
        await self._site.stop()
        if self._stop.is_set() or not await self._idle_within(limit_s - accept_s):
            why = "second signal" if self._stop.is_set() else f"after {limit_s:g} s"
            _log.warning("drain: %d requests cut (%s)", service.in_flight, why)
            self._stop.clear()
            service.cut()
            await self._idle_within(CUT_S)

    async def _idle_within(self, seconds: float) -> bool:
        """Wait for the last request; false when the time is over or a signal comes first."""
        idle = self.service.idle
        try:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                waits = [group.create_task(e.wait()) for e in (idle, self._stop)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
        except TimeoutError:
            return False
        return idle.is_set()

    async def close(self) -> None:
        """Stop listening, cancel what is left, close connections and the log."""
        await self._runner.cleanup()
        await self.service.close()


def application(service: Service) -> web.Application:
    """The routes. No middleware: every request would pay for it."""
    app = web.Application(client_max_size=service.settings.max_body_bytes)

    async def relay(request: web.Request) -> web.StreamResponse:
        return await Exchange(service, request).run()

    admin, thresholds = Admin(service), BusyThreshold(service)
    app.add_routes(
        [
            web.get("/live", admin.live),
            web.get("/ready", admin.ready),
            web.get("/health", admin.health),
            web.get("/metrics", admin.metrics),
            web.get("/instances", admin.instances),
            web.post("/instances", admin.add_instance),
            web.delete("/instances/{name}", admin.remove_instance),
            web.post("/sessions/{id}/end", admin.end_session),
            web.get("/busy_threshold", thresholds.get),
            web.post("/busy_threshold", thresholds.post),
            web.delete("/busy_threshold", thresholds.delete),
            web.get("/v1/models", admin.models),
            web.route("*", "/v1/{tail:.+}", relay),
            web.post("/tokenize", relay),
            web.post("/detokenize", relay),
            web.route("*", "/{tail:.*}", _not_found),
        ]
    )
    return app


async def _not_found(request: web.Request) -> web.Response:
    """An allow-list: an engine's other paths (sleep, reset, abort) are not for clients."""
    del request
    return error_response(404, "no such path, or not with this method")
