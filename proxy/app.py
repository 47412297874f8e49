"""Wiring: build the parts, map paths to handlers, start, drain, stop.

An unknown path gets a 404, a known path with another method a 405.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from hashlib import blake2b
from textwrap import dedent
from typing import Any, BinaryIO

from aiohttp import hdrs, web

from proxy import __version__
from proxy.admin.auth import Denials, Handler, audited
from proxy.admin.batch import BATCH, Batch
from proxy.admin.busy_threshold import BusyThreshold
from proxy.admin.endpoints import FleetPaths, HealthPaths, ModelsPath
from proxy.admin.live_page import LivePage
from proxy.admin.page.snapshot import Look
from proxy.admin.replicas import ReplicasPath
from proxy.admin.samples import SamplesPath
from proxy.config.in_force import OptionsInForce
from proxy.config.options import Settings
from proxy.config.sources import ConfigError
from proxy.core.admission.memory import Level
from proxy.core.kvcache.sessions import nobody
from proxy.fleet import probes
from proxy.fleet.discovery.discovery import Discovery, DiscoveryCollector
from proxy.fleet.discovery.registry import Around, sources
from proxy.fleet.kv_events import KvEvents
from proxy.fleet.probes import Probes
from proxy.fleet.sensors import registry
from proxy.fleet.sensors.sampling import Sampling
from proxy.net import tcp, tls
from proxy.net.bus import BUSES
from proxy.net.bus.form import BatchForm
from proxy.net.server import cors, handshakes
from proxy.net.server.connection import ConnectionFactory, Rules, Runner
from proxy.net.server.listener import (
    ConnectionLimit,
    GuardedSite,
    Site,
    admin_cap,
    client_cap,
    no_listener,
)
from proxy.net.server.refusals import RefusalLog
from proxy.net.server.responses import REQUEST_ID, SERVER, error_response, request_id
from proxy.process import background, signals, snapshot
from proxy.process.drain import Drain, closing, first_of
from proxy.process.hot_restart import HotRestart, InheritedSockets
from proxy.process.memory import cgroup_limit
from proxy.process.reload import Reloader
from proxy.protocol.endpoints import (
    BESIDE_V1,
    MODELS,
    OFFLOADABLE,
    endpoint_of,
    is_relayed,
    why_not_relayed,
)
from proxy.protocol.names.session_names import tenant_of
from proxy.protocol.prompt.facts import SEED_BYTES
from proxy.request.attempts import LegOwners
from proxy.request.exchange import Exchange, RequestOwners
from proxy.request.kv_release import KvReleases
from proxy.request.large_bodies import LargeBodies
from proxy.state.proxy_state import ProxyState
from proxy.state.replicas import Replicas
from proxy.telemetry.request_log import MayFail


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    """Set our Server header, where aiohttp would set its own, and an id on an answer without."""
    response.headers["Server"] = SERVER
    if REQUEST_ID not in response.headers:
        response.headers[REQUEST_ID] = request_id(request.headers)


def _only(methods: Iterable[str]) -> Handler:
    """Handler that answers 405 to all other methods."""
    allowed = ", ".join(methods)

    async def refuse(request: web.Request) -> web.Response:
        message = f"method: {request.method} is not allowed for this path; allowed: {allowed}"
        return error_response(405, message, {"Allow": allowed}, request.path)

    return refuse


async def _not_found(request: web.Request) -> web.Response:
    """Answer 404: paths are an allow-list, without an engine's sleep, reset or abort."""
    return error_response(404, why_not_relayed(request.path), path=request.path)


_MODEL = f"{MODELS}/{{id:.+}}"
LOOKS = ("GET", "HEAD")
"""Methods of what can only be looked at."""
_ABOUT = dedent(
    f"""\
    cache-proxy {__version__}: one OpenAI-compatible API in front of several vLLM servers.

    clients     base URL http://THIS-HOST:PORT/v1
                POST /v1/chat/completions, /v1/responses, /v1/messages and others
                GET /v1/models
    state       GET /health (of every instance) /ready /live; /metrics for Prometheus
    operators   GET /ui, a page to look at (on the admin port, where there is one)
                GET /instances /decisions /busy_threshold (there, too)
    options     cache-proxy --help; docs/ of the project has the rest
    """
)


async def _about(request: web.Request) -> web.Response:
    """One page of text: what this is, and where things are."""
    del request
    return web.Response(text=_ABOUT)


def _to_pages(
    options: OptionsInForce,
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Hook that lets pages of allowed origins read the proxy's own answers on clients' paths."""

    async def let_in(request: web.Request, response: web.StreamResponse) -> None:
        settings = options.settings
        if allowed := settings.cors_allowed_origins:
            path = request.path
            if path.startswith("/v1/") or is_relayed(path, settings.extra_paths):
                response.headers.update(cors.fields(request.headers.get("Origin"), allowed))

    return let_in


class Routes:
    """The paths of the listeners, and their handlers."""

    def __init__(
        self,
        state: ProxyState,
        reloader: Reloader,
        discovery: Discovery,
        large_bodies: LargeBodies,
        is_replaced: Callable[[], bool],
    ) -> None:
        instances, options = state.instances, state.options
        self._state, self._is_replaced = state, is_replaced
        parts: list[MayFail] = list(state.telemetry.logs)
        if state.replicas is not None:
            parts.append(state.replicas)
        self._health = HealthPaths(
            instances,
            state.in_flight,
            state.exposition,
            state.overload,
            (*parts, discovery),
            lambda: reloader.last,
        )
        self._fleet = FleetPaths(
            instances,
            options,
            state.members,
            state.telemetry.last,
            state.router.view_of,
            state.thermal,
        )
        waiting, overload = state.waiting, state.overload
        look = Look(instances, state.telemetry, waiting, state.in_flight, overload, parts)
        self.page = LivePage(
            look.snapshot,
            state.in_flight,
            state.clock.now_s,
            state.telemetry.last,
            state.router.view_of,
        )
        self._thresholds = BusyThreshold(state.known, options, state.clock)
        self._batch = Batch(state.thermal, state.known, options, state.clock)
        self._samples = SamplesPath(state.telemetry.samples)
        self._replicas = ReplicasPath(state.replicas)
        self._models = ModelsPath(instances, state.access)
        legs = LegOwners(
            state.clock,
            options,
            instances,
            state.detached,
            KvReleases(instances.upstream, state.detached),
            state.metrics,
        )
        self._requests = RequestOwners(
            state.clock,
            options,
            state.access,
            large_bodies,
            state.memory,
            state.bodies,
            state.unread,
            state.estimator,
            state.router,
            state.known,
            state.waiting,
            state.in_flight,
            instances,
            state.telemetry,
            legs,
        )

    def application(self, *, admin: bool = True, public: bool = True) -> web.Application:
        """The routes of one listener. No middleware, since it would cost every request."""
        app = web.Application(client_max_size=self._state.options.settings.max_body_bytes)
        app.on_response_prepare.append(_sign)
        app.on_response_prepare.append(closing(self._state.in_flight))
        app.add_routes(self._looks())
        if admin:
            app.add_routes(self._admin())
        if public:
            app.on_response_prepare.append(_to_pages(self._state.options))
            app.add_routes(self._relayed())
        app.add_routes([web.route("*", "/{tail:.*}", self.elsewhere if public else _not_found)])
        return app

    def _looks(self) -> list[web.RouteDef]:
        """The paths for load balancers and Prometheus, on every listener."""
        health = self._health
        rows = (
            ("/live", health.live),
            ("/ready", health.ready),
            ("/health", health.health),
            ("/metrics", health.metrics),
            ("/", _about),
        )
        looks = [web.get(path, handler) for path, handler in rows]
        return looks + [web.route("*", path, _only(LOOKS)) for path, _ in rows]

    def _admin(self) -> list[web.RouteDef]:
        """The paths that show or change the fleet, for operators with the token if there is one."""
        fleet, thresholds, options = self._fleet, self._thresholds, self._state.options
        denied = self._state.metrics.denied
        denials = Denials(self._state.clock, lambda: denied.labels("operator").inc())
        rows: dict[str, dict[str, Handler]] = {
            "/instances": {"GET": fleet.instances, "POST": fleet.add_instance},
            "/instances/{name}": {"GET": fleet.instance, "DELETE": fleet.remove_instance},
            "/sessions/{id}/end": {"POST": fleet.end_session},
            "/decisions": {"GET": fleet.decisions},
            "/decisions/{request_id}": {"GET": fleet.decision},
            "/samples": {"GET": self._samples.samples},
            "/replicas": {"GET": self._replicas.replicas},
            "/busy_threshold": {
                "GET": thresholds.get,
                "POST": thresholds.post,
                "DELETE": thresholds.delete,
            },
        }
        if options.settings.enable_admin_api:
            batch = self._batch
            rows[BATCH] = {"GET": batch.get, "POST": batch.post, "DELETE": batch.delete}
        pages: dict[str, dict[str, Handler]] = {
            "/ui": {"GET": self.page.page},
            "/ui/events": {"GET": self.page.events},
            "/ui/decisions/{request_id}": {"GET": self.page.decision},
        }

        def behind_token(handler: Handler, path: str) -> Handler:
            is_page = path in pages
            return audited(options, denials, self._is_replaced, handler, is_page=is_page)

        return [
            web.route(method, path, behind_token(handler, path))
            for path, handlers in (rows | pages).items()
            for method, handler in (handlers | {"*": _only(handlers)}).items()
        ]

    def _relayed(self) -> list[web.RouteDef]:
        return [
            web.get(MODELS, self._models.models),
            web.get(_MODEL, self._models.model),
            *(web.options(path, self.relay) for path in (MODELS, _MODEL)),
            *(web.route("*", path, _only(LOOKS)) for path in (MODELS, _MODEL)),
            web.route("*", "/v1/{tail:.+}", self.relay),
            *(web.route("*", path, self.relay) for path in BESIDE_V1),
        ]

    async def relay(self, request: web.Request) -> web.StreamResponse:
        """Serve a request by an instance."""
        if request.method == "OPTIONS":
            is_list = f"{request.path}/".startswith(f"{MODELS}/")
            methods = LOOKS if is_list else endpoint_of(request.path).methods
            origins = self._state.options.settings.cors_allowed_origins
            return cors.preflight(request, methods, origins)
        return await Exchange(self._requests, request).run()

    async def elsewhere(self, request: web.Request) -> web.StreamResponse:
        """A path without a route of its own: one of `--extra-paths`, or none."""
        if is_relayed(request.path, self._state.options.settings.extra_paths):
            return await self.relay(request)
        return await _not_found(request)

    def take_short_cut(self, server: web.Server) -> None:
        """Bypass aiohttp's router for the frequent paths: it costs as much as a decision."""
        owners, routed = self._requests, server.request_handler

        def handle(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
            is_short = request.raw_path in OFFLOADABLE and hdrs.EXPECT not in request.headers
            if is_short and request.method == "POST" and isinstance(request, web.Request):
                return Exchange(owners, request).run()
            return routed(request)

        server.request_handler = handle


STREAM = "cache-proxy:{{{}}}:1:log"
"""The stream of replicas: the braces keep all of a fleet on one node of a cluster, and the number
is that of the form of its batches."""
BACKLOG = 4096
KEEPALIVE_S = 75.0
IDLE_AT_ONCE = 512
"""Idle connections that end at each look while memory is short."""
LINGER_S = 2.0
"""The rest of a refused request's body is read for this long, so that its client can read the
refusal."""
CANCEL_AFTER_S = 0.1
"""Handlers that still run after the drain are cancelled after this time (0 would wait for ever)."""


class Proxy:
    """One listening proxy: `start`, then `run`, which drains at a signal and closes."""

    def __init__(
        self,
        settings: Settings,
        source: Callable[[], Settings] | None = None,
        inherited: InheritedSockets | None = None,
    ) -> None:
        """`source` reads the options again for a reload; raises ConfigError.

        `inherited`: listening sockets that another process handed down.
        """
        self._settings = settings
        self._source = source or (lambda: settings)
        self.state: ProxyState
        self.reloader: Reloader
        self.own_ports: set[int] = set()
        """Ports of this process's listeners."""
        self._probes: Probes
        self._kv_events: KvEvents
        self._sampling: Sampling
        self._discovery: Discovery
        self._large_bodies: LargeBodies | None = None
        self._routes: Routes
        self._runner: web.AppRunner
        self._rules: Rules
        self._admin_runner: web.AppRunner | None = None
        self._runners: list[web.AppRunner] = []
        self._inherited = inherited or InheritedSockets()
        self._names: list[str] = []
        """The listeners' names for the next process."""
        self._fence: dict[str, Any] = {}
        """What the next process may not open."""
        self._hot_restart = HotRestart(self._listeners, self._leave_snapshot, self._refuse_opening)
        self._stop = asyncio.Event()

    async def _leave_snapshot(self) -> BinaryIO:
        return await snapshot.leave(
            self.state.known,
            self.state.thermal.control,
            self._fence,
            self.state.members.of_operators(),
        )

    async def _refuse_opening(self) -> None:
        self._fence = await self.reloader.refuse_opening()

    @property
    def url(self) -> str:
        """Address of the public listener; with port 0 it has the port that the kernel chose."""
        return self._url(self._runner)

    @property
    def admin_url(self) -> str:
        """Address of the admin paths."""
        return self._url(self._admin_runner or self._runner)

    def _url(self, runner: web.AppRunner) -> str:
        host, port = runner.addresses[0][:2]
        scheme = "https" if self._settings.tls_cert else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def start(self) -> None:
        """Listen. Raises OSError if the port cannot be bound or the request log not be opened.

        Raises ConfigError for unusable certificates and for a sensor's missing package. Raises it
        too if this process would replace a serving one and no instance answers it.
        """
        settings = self._settings
        if (lacking := registry.missing(settings.instances)) is not None:
            raise ConfigError(lacking)
        secure = tls.for_clients(settings)
        limit_bytes = settings.max_memory_bytes or cgroup_limit()
        state = self.state = ProxyState.start(settings, limit_bytes)
        state.members.own_ports = self.own_ports
        state.replicas = _replicas(settings, state)
        self.reloader = Reloader(state, self._source, self._exchange)
        self._probes = Probes(state.instances, state.options)
        self._kv_events = KvEvents(state.instances, state.options)
        self._sampling = Sampling(state.instances, state.options, state.gpus, registry.SENSORS)
        self._large_bodies = LargeBodies(state.detached)
        self._discovery = await self._made_discovery()
        routes = self._routes = Routes(
            state,
            self.reloader,
            self._discovery,
            self._large_bodies,
            lambda: self._hot_restart.is_replacing,
        )
        refused = state.metrics.client_errors
        log = RefusalLog(lambda refusal: refused.labels(refusal).inc())
        self._rules = Rules(
            settings.header_timeout, settings.max_body_bytes, log, state.unread, state.heads
        )
        self._drain = Drain(
            state.options,
            state.in_flight,
            state.waiting,
            state.detached,
            self._runners,
            self._stop,
        )
        if self._inherited.snapshot is not None:
            try:
                await self._take_over(self._inherited.snapshot)
            except ConfigError:
                await self.close()
                raise
        if self._inherited.has_predecessor and not await self._probes.look_round():
            await self.close()
            raise ConfigError(f"no instance has answered in {probes.FIRST_LOOK_S:g} s")
        one_listener = settings.admin_port is None
        app = routes.application(admin=one_listener)
        self._runner = await self._listen(app, settings.host, settings.port, secure)
        assert self._runner.server is not None
        routes.take_short_cut(self._runner.server)
        if settings.admin_port is not None:
            app = routes.application(public=False)
            self._admin_runner = await self._listen(
                app, settings.admin_host, settings.admin_port, secure
            )
        self._inherited.drop()
        self.own_ports.clear()  # what the options say, where sockets are inherited
        self.own_ports |= {at[1] for r in self._runners for at in r.addresses}

    async def _made_discovery(self) -> Discovery:
        """The sources of `--discover`, asked once; raises ConfigError.

        A predecessor's knowledge is taken over later: it is of instances that are there.
        """
        state, settings = self.state, self._settings
        try:
            found = sources(Around(settings, state.instances.connect_options.resolver, os.environ))
        except ConfigError:
            await self.close()
            raise
        refused = state.metrics.discovery_refused
        made = Discovery(
            found,
            state.members,
            state.options,
            state.clock,
            lambda source: refused.labels(source).inc(),
        )
        state.metrics.registry.register(DiscoveryCollector(made.ages_s))
        self.own_ports |= {settings.port, settings.admin_port or settings.port}
        await made.begin()
        return made

    async def _take_over(self, file: BinaryIO) -> None:
        """Know what a predecessor knew; raises ConfigError if the options open what it closed."""
        state, settings = self.state, self._settings
        await state.members.carry_on(snapshot.members_in(file))
        heat, now_s = state.thermal.control, state.clock.now_s()
        whose = nobody if settings.api_key is None else tenant_of
        self.reloader.take_over(
            snapshot.take(state.known, heat, file, now_s, whose, seed_of(settings))
        )
        if settings.limits_heat:
            state.thermal.tick()  # orders hold from the first request on

    async def _listen(
        self, app: web.Application, host: str, port: int, secure: ssl.SSLContext | None
    ) -> web.AppRunner:
        runner = Runner(
            app,
            self._rules,
            tcp_keepalive=False,  # inherited from the listening socket
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            auto_decompress=False,
            shutdown_timeout=CANCEL_AFTER_S,
            lingering_time=LINGER_S,
        )
        await runner.setup()
        self._runners.append(runner)
        listener = "public" if len(self._runners) == 1 else "admin"
        try:
            site = self._site(runner, host, port, secure)
            failed = self.state.metrics.handshakes_failed
            site.on_handshake_failed = lambda end: failed.labels(end).inc()
            site.handshake_bytes = handshakes.most_bytes(self.state.memory.limit_bytes)
            name, site.inherited = await self._inherited.take(listener, host, port)
            self._names.append(name)
            await site.start()
        except OSError as error:
            await self.close()
            raise OSError(error.errno, no_listener(listener, host, port, error)) from error
        for sock in _sockets(runner):
            tcp.watch(sock)
        return runner

    def _listeners(self) -> list[tuple[str, int]]:
        """Name and descriptor of each listening socket."""
        named = zip(self._names, self._runners, strict=True)
        return [(name, sock.fileno()) for name, runner in named for sock in _sockets(runner)]

    def _site(
        self, runner: web.AppRunner, host: str, port: int, secure: ssl.SSLContext | None
    ) -> Site:
        """A listener; the admin's has few places of its own: operators get in beside clients."""
        metrics, is_admin = self.state.metrics, len(self._runners) > 1
        cap = admin_cap() if is_admin else client_cap(self._settings.max_connections)
        limit = ConnectionLimit(cap, metrics.connections_refused.inc, ends_idle=is_admin)
        if not is_admin:
            metrics.open_connections.set_function(lambda: limit.open)
        return GuardedSite(runner, host, port, limit, backlog=BACKLOG, ssl_context=secure)

    async def _exchange(self, secure: ssl.SSLContext) -> None:
        """Accept with another TLS context."""
        for site in [s for runner in self._runners for s in runner.sites]:
            if isinstance(site, Site):
                site.exchange(secure)

    def catch_signals(self) -> None:
        """Handle signals: SIGTERM and SIGINT end `run`, SIGHUP reloads, SIGUSR2 starts a successor.

        SIGUSR1 does nothing: the request log needs no signal to be rotated. Call this before
        the proxy reports that it listens.
        """
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self.reloader.ask)
        loop.add_signal_handler(signal.SIGUSR1, lambda: None)
        loop.add_signal_handler(signal.SIGUSR2, self._hot_restart.ask)
        signals.let_in()

    async def run(
        self,
        on_successor: Callable[[int], None] = lambda pid: None,
        on_failed_restart: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve until a signal comes, then drain; a second signal ends the process at once.

        Also ends when another process has taken over; `on_successor` gets its id.
        `on_failed_restart` is called when one that was to take over did not come up.
        """
        try:
            async with asyncio.TaskGroup() as group:
                periodic = group.create_task(self.run_background(), name="background")
                look_s = self._settings.health_interval
                reloads = group.create_task(self._reload(look_s), name="reload")
                restarts = group.create_task(
                    self._hot_restart.watch(on_successor, on_failed_restart), name="hot-restart"
                )
                await first_of(self._stop, self._hot_restart.is_done)
                reloads.cancel()
                restarts.cancel()
                if self._hot_restart.is_done.is_set():
                    self.state.engine_caps.leave()
                    await self._drain.hand_over()
                else:
                    self._stop.clear()
                    await self.drain()
                periodic.cancel()
        finally:
            await self.close()

    async def _reload(self, look_s: float) -> None:
        await self.reloader.catch_up()
        await self.reloader.watch(look_s)

    async def run_background(self) -> None:
        """Run the periodic tasks until cancelled."""
        state = self.state
        parts: dict[str, background.Runs] = {
            "detached": state.detached,
            "overload": state.overload,
            "members": state.members,
            "probes": self._probes,
            "kv-events": self._kv_events,
            "sensors": self._sampling,
        }
        if self._settings.discover:
            parts["discovery"] = self._discovery
        if self._settings.limits_heat:
            parts["thermal"] = state.thermal
            parts["engine-caps"] = state.engine_caps
        if state.replicas is not None:
            parts["replicas"] = state.replicas
        assert self._large_bodies is not None
        await background.run(parts, state.memory, state.metrics, self._relieve)

    def _relieve(self, level: Level) -> None:
        """Memory is short: idle connections end, then the largest and slowest bodies."""
        for runner in self._runners:
            if isinstance(runner.server, ConnectionFactory):
                runner.server.end_idle(IDLE_AT_ONCE)
        if level >= Level.NO_HEAVY and self._large_bodies is not None:
            self._large_bodies.uploads.shed()

    def _on_signal(self) -> None:
        self._stop.set()

    async def drain(self) -> None:
        """Let running requests finish, up to `--drain-seconds`."""
        await self._drain.drain()

    async def close(self) -> None:
        """Stop listening, cancel what still runs, close connections and the log."""
        for runner in self._runners:
            await runner.cleanup()
        if self._large_bodies is not None:
            await self._large_bodies.close()
        await self.state.close()


def seed_of(settings: Settings) -> int | None:
    """The secret that hashes of prompts begin with, where it has to be that of other proxies."""
    if settings.share is None:
        return None
    key = settings.share_key.get_secret_value() if settings.share_key else ""
    told = f"{settings.share_name}\0{key}".encode()
    return int.from_bytes(blake2b(told, digest_size=SEED_BYTES).digest(), "big")


def _replicas(settings: Settings, state: ProxyState) -> Replicas | None:
    """What is shared with other proxies, by the options; ConfigError where it cannot be."""
    if settings.share is None:
        return None
    try:
        bus = BUSES["redis"](settings.share.get_secret_value(), STREAM.format(settings.share_name))
    except ValueError as error:
        raise ConfigError(f"share: {error}") from error
    key = settings.share_key.get_secret_value().encode() if settings.share_key else b""
    about = f"cache-proxy {__version__} at {socket.gethostname()}:{settings.port}"
    replicas = Replicas(bus, BatchForm(key, about), state.router, state.clock)
    state.metrics.registry.register(replicas)
    return replicas


def _sockets(runner: web.AppRunner) -> list[socket.socket]:
    return [sock for site in runner.sites if isinstance(site, Site) for sock in site.sockets]
