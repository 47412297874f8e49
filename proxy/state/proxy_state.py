"""ProxyState: makes all owners of state that outlives a request."""

from __future__ import annotations

import asyncio
import os
from socket import gethostname

from proxy.config.in_force import OptionsInForce, router_config
from proxy.config.options import Settings
from proxy.config.sources import ConfigError
from proxy.core.admission.memory import Watermark
from proxy.core.admission.queue import QueueLimits
from proxy.core.known.fleet_state import FleetState
from proxy.core.latency.slo import Slo
from proxy.core.routing.router import Router
from proxy.core.thermal.fleet_control import FleetControl
from proxy.core.thermal.victims import MoveBudget
from proxy.fleet.gauges import FleetCollector
from proxy.fleet.instances import Instances
from proxy.fleet.membership import OPTIONS, Membership
from proxy.fleet.sensors.readings import GpuCollector, GpuReadings
from proxy.fleet.thermal_plugin import ThermalPlugins
from proxy.net import tls
from proxy.net.timeouts import Clock
from proxy.net.upstream.pool import ConnectOptions
from proxy.protocol.names.session_names import SessionNames
from proxy.protocol.prompt.facts import TokenEstimator
from proxy.protocol.streams.trail import trail_bytes
from proxy.state.access import Access, bearer
from proxy.state.detached import DetachedTasks
from proxy.state.held_for_clients import HeldBodies, LongHeads, Unread, heads_bytes, room_bytes
from proxy.state.in_flight import InFlight
from proxy.state.overload import OverloadWatch
from proxy.state.queue import WaitingRoom
from proxy.state.replicas import Replicas
from proxy.state.thermal import TICK_S, ThermalControl
from proxy.state.thermal_caps import EngineCaps
from proxy.telemetry.access_log import AccessLog
from proxy.telemetry.metrics import Exposition, Metrics
from proxy.telemetry.request_log import RequestLog
from proxy.telemetry.requests import RequestTelemetry
from proxy.telemetry.samples import Samples
from proxy.telemetry.tracing.sink import Sends, Tracing

OTEL = ("opentelemetry", "requests")
NEEDS_OTEL = "needs packages of OpenTelemetry: pip install 'cache-proxy[otel]'"


class ProxyState:
    """The owners of all state that outlives a request. Closed with `close`.

    Each part of the proxy takes only the owners that it uses.
    """

    replicas: Replicas | None = None
    """What is shared with other proxies; None where nothing is."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        metrics: Metrics,
        request_log: RequestLog,
        connect_options: ConnectOptions | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        """Raises ConfigError if the file of `--thermal` is wrong; OSError as `start` does."""
        self.clock, self.metrics, self.options = clock, metrics, OptionsInForce(settings)
        self.known = known = FleetState(router_config(settings, limit_bytes))
        self.router = router = Router(known)
        self.instances = Instances(
            known,
            clock,
            connect_options or ConnectOptions(),
            metrics.replays.inc,
            metrics.kv_transfer.forget,
        )
        is_json, drop = settings.access_log == "json", metrics.log_dropped.inc
        access_log = AccessLog(settings.access_log_at, drop, is_json=is_json)
        now_s, samples = clock.now_s, Samples(settings.samples, clock.unix_now())
        self.telemetry = RequestTelemetry(metrics, request_log, now_s, access_log, samples)
        self.access = Access(settings, lambda: metrics.denied.labels("client").inc())
        self.in_flight = InFlight()
        self.gpus = GpuReadings()
        control, plan = FleetControl(), None
        if settings.thermal is not None:
            from proxy.config.thermal import read_plan  # controllers that no other start needs

            plan = read_plan(settings.thermal)
            control = plan.control()
        self.thermal = ThermalControl(control, router, self.in_flight, clock, metrics, self.gpus)
        self.thermal.evictions.may_abort = settings.thermal_may_abort
        if plan is not None:
            self.thermal.evictions.budget = MoveBudget(plan.options.fleet_bytes_per_s)
        self.estimator = TokenEstimator(known.bytes_per_token.of, known.bytes_per_token.media)
        self.memory, self.detached = Watermark(None), DetachedTasks()
        self.bodies, self.unread, self.heads = HeldBodies(now_s), Unread(now_s), LongHeads(now_s)
        heat = control if settings.limits_heat else None
        self.gpus.needed_every_s = TICK_S if heat is not None else self.gpus.needed_every_s
        gauges = self.collector = FleetCollector(known, self.instances.reports, heat)
        self.exposition = Exposition(metrics.registry, clock, gauges.at)
        for collector in (gauges, GpuCollector(self.gpus, clock.now_s)):
            metrics.registry.register(collector)
        metrics.show_memory(self.memory, lambda: self.bodies.held_bytes)
        limits = QueueLimits(
            settings.max_queue, settings.max_queue_bytes, settings.max_queue_seconds
        )
        weights = {share.tenant: share.weight for share in settings.tenant_weights}
        self.waiting = WaitingRoom(router, clock, metrics, limits, weights)
        self.overload = OverloadWatch(self.telemetry.overload, known, self.waiting.waiting, clock)
        self.thermal.waiting = lambda: len(self.waiting.waiting.queue)
        self.thermal_plugins = ThermalPlugins(
            self.instances.upstream, lambda: bearer(self.options.settings.thermal_token)
        )
        self.engine_caps = EngineCaps(self.thermal_plugins, known, control, clock)
        self.members = Membership(self.instances, self.options, self.waiting.look_again)
        self.use(settings)
        self.members.want(OPTIONS, settings.instances)

    @classmethod
    def start(cls, settings: Settings, limit_bytes: int | None = None) -> ProxyState:
        """Build everything from the options; OSError if a log cannot be opened.

        Raises ConfigError if a package is missing, and as `__init__` does.

        `limit_bytes`: the process's memory limit, None: no limit.
        """
        sends = None if settings.otlp_endpoint is None else _sends_to(settings.otlp_endpoint)
        metrics = Metrics()
        log = RequestLog(settings.request_log, metrics.log_dropped.inc)
        connect = ConnectOptions(tls.own_for_instances(settings), bearer(settings.instance_api_key))
        state = cls(settings, Clock(), metrics, log, connect, limit_bytes)
        if sends is not None:
            told = settings.trace_ratio, metrics.traces_dropped.inc, state.clock.now_s
            state.telemetry.trace_by(Tracing(sends, *told))
        state.memory.limit_bytes = limit_bytes
        state.bodies.room.max_bytes = room_bytes(limit_bytes, settings.max_body_bytes)
        state.in_flight.trails.most_bytes = trail_bytes(limit_bytes)
        state.heads.room.max_bytes = heads_bytes(limit_bytes)
        return state

    def use(self, settings: Settings) -> None:
        """Apply reloaded options; parts built from options that need a restart stay."""
        self.options.use(settings)
        self.access.use(settings)
        self.estimator.names = SessionNames(settings.session_headers or None)
        self.telemetry.request_log.candidates = settings.log_candidates
        if self.telemetry.tracing is not None:
            self.telemetry.tracing.ratio = settings.trace_ratio
        self.metrics.slo = Slo(ttft_s=settings.ttft_slo, tpot_s=settings.tpot_slo)

    async def close(self) -> None:
        """Close connections and the logs."""
        if self.replicas is not None:
            await self.replicas.close()
        await self.instances.close()
        for log in self.telemetry.logs:
            await asyncio.to_thread(log.close)
        if self.telemetry.tracing is not None:
            await asyncio.to_thread(self.telemetry.tracing.close)


def _sends_to(endpoint: str) -> Sends:
    """The way to the collector of traces; raises ConfigError without the extra `otel`."""
    try:
        from proxy.telemetry.tracing.otlp import Otlp  # 20 MB that only this option needs
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OTEL:
            raise
        raise ConfigError(f"otlp_endpoint: {NEEDS_OTEL}") from error
    return Otlp(endpoint, f"{gethostname()}:{os.getpid()}").send
