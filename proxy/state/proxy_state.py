"""What the handlers share: the router, the connections, the counters, and the clock."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque

from multidict import CIMultiDictProxy

from proxy.config.options import Settings
from proxy.config.values import InstanceSpec
from proxy.core.admission.memory import Level, Watermark
from proxy.core.admission.queue import QueueLimits
from proxy.core.config import RouterConfig
from proxy.core.connectors import CONNECTORS
from proxy.core.connectors.base import Connector
from proxy.core.latency.slo import Slo
from proxy.core.routing.request_flow import LegCaps
from proxy.core.routing.router import Router
from proxy.core.types import RequestFacts, Thresholds
from proxy.fleet.gauges import FleetCollector
from proxy.fleet.instances import Instances
from proxy.net import tls
from proxy.net.timeouts import Clock
from proxy.net.upstream.pool import ConnectOptions
from proxy.protocol.errors import UnauthorizedError
from proxy.protocol.request_facts import TokenEstimator
from proxy.state.access import Access, Grant, bearer
from proxy.state.detached import DetachedTasks
from proxy.state.in_flight import InFlight
from proxy.state.queue import WaitingRoom
from proxy.telemetry.log import FailureLog
from proxy.telemetry.metrics import Exposition, Metrics
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.request_log import RequestLog

DECISIONS_KEPT = 200
"""For a look; the request log has them all. With what it could have done each is 3 kB and more."""


def router_config(settings: Settings) -> RouterConfig:
    """The core's part of the options."""
    return RouterConfig(
        prefill_throughput=settings.prefill_throughput,
        warm_threshold=settings.warm_threshold,
        heavy_threshold=settings.heavy_threshold,
        placement=settings.placement,
        offload_policy=settings.offload_policy,
        shadow_policy=settings.shadow_policy,
        offload_non_cached_tokens=settings.offload_non_cached_tokens,
        kv_connector=settings.kv_connector,
        kv_transfer_time_s=settings.kv_transfer_time,
        tpot_slo_s=settings.tpot_slo,
        prefill_timeout_s=settings.prefill_timeout,
        kv_pin_timeout_s=settings.kv_pin_timeout,
        hedge=settings.hedge,
        session_ttl_s=settings.session_ttl,
        max_sessions=settings.max_sessions,
        prefix_cache_bytes=settings.prefix_cache_bytes,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        slow_start_s=settings.slow_start,
        thresholds=Thresholds(
            settings.active_decode_blocks_threshold,
            settings.active_prefill_tokens_threshold,
            settings.active_prefill_tokens_threshold_frac,
        ),
    )


def instance_tls(settings: Settings) -> ssl.SSLContext | None:
    """None where the options say nothing of it: then it is made when an https instance comes."""
    own = (settings.instance_ca, settings.instance_cert)
    return tls.for_instances(settings) if any(own) else None


class ProxyState:
    """The owners of all that outlives a request, made together. Closed with `close`.

    A part of the proxy takes the owners that it uses; what they are made of is in their own files.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        router: Router,
        metrics: Metrics,
        request_log: RequestLog,
        ways: ConnectOptions | None = None,
    ) -> None:
        self.clock, self.router = clock, router
        self.metrics, self.request_log = metrics, request_log
        self.ways = ways = ways or ConnectOptions()
        self.instances = Instances(
            router, clock, ways, metrics.replays.inc, metrics.kv_transfer.forget
        )
        self.in_flight = InFlight()
        self.aftermath = DetachedTasks()
        self.estimator = TokenEstimator()
        self.memory = Watermark(None)
        self.failures = FailureLog()
        self.decisions: deque[RequestRecord] = deque(maxlen=DECISIONS_KEPT)
        self.collector = FleetCollector(router, self.instances.reports)
        self.exposition = Exposition(metrics.registry, clock, self.collector.at)
        metrics.registry.register(self.collector)
        metrics.show_memory(self.memory)
        limits = QueueLimits(
            settings.max_queue, settings.max_queue_bytes, settings.max_queue_seconds
        )
        weights = {share.tenant: share.weight for share in settings.tenant_weights}
        self.waiting = WaitingRoom(router, clock, metrics, limits, weights)
        self.own_ports: set[int] = set()
        self.last_reload: dict[str, object] | None = None
        self.settings: Settings
        self.access: Access
        self.leg_caps: LegCaps
        self.shows_route: bool
        """Whether X-Cache-Proxy-* are sent; tenants would learn of each other's prompts by them."""
        self.use(settings)
        for spec in settings.instances:
            self.add(spec)

    @classmethod
    def start(cls, settings: Settings, limit_bytes: int | None = None) -> ProxyState:
        """Build everything from the options; OSError when the request log cannot be opened.

        `limit_bytes`: what the process may use of memory, None: no limit.
        """
        metrics = Metrics()
        log = RequestLog(settings.request_log, metrics.log_dropped.inc)
        ways = ConnectOptions(instance_tls(settings), bearer(settings.instance_api_key))
        state = cls(settings, Clock(), Router(router_config(settings)), metrics, log, ways)
        state.memory.limit_bytes = limit_bytes
        return state

    def use(self, settings: Settings) -> None:
        """From now on these are the options; what was built from the old ones stays."""
        self.settings = settings
        self.request_log.candidates = settings.log_candidates
        self.metrics.slo = Slo(ttft_s=settings.ttft_slo, tpot_s=settings.tpot_slo)
        self.leg_caps = LegCaps(
            settings.ttft_timeout, settings.prefill_timeout, settings.transfer_timeout
        )
        self.access = Access(settings)
        self.shows_route = settings.response_headers and settings.cache_salt_secret is None

    @property
    def connector(self) -> Connector:
        """The KV connector in use."""
        return CONNECTORS[self.settings.kv_connector]

    def add(self, spec: InstanceSpec) -> None:
        """Bring an instance in."""
        self.instances.add(spec, self.settings.connect_timeout)

    def grant(self, headers: CIMultiDictProxy[str]) -> Grant:
        """What a request's key gets it; raises UnauthorizedError, and counts it."""
        try:
            return self.access.grant(headers)
        except UnauthorizedError:
            self.metrics.denied.labels("client").inc()
            raise

    def reloaded(self, result: str) -> None:
        """The options were read again: applied, unchanged, or refused and the old ones kept."""
        self.metrics.reloads.labels(result).inc()
        self.last_reload = {"result": result, "t": self.clock.unix_now()}

    @property
    def wants_keepalive(self) -> bool:
        """Whether a client's connection may stay open after its answer."""
        return not self.in_flight.is_leaving and self.memory.level is Level.NORMAL

    def is_too_heavy_now(self, facts: RequestFacts) -> bool:
        """Whether memory is too short for this one: HEAVY wherever it would run."""
        return (
            self.memory.level >= Level.NO_HEAVY
            and self.router.least_new_tokens(facts) >= self.settings.heavy_threshold
        )

    async def close(self) -> None:
        """Close connections and the log."""
        await self.instances.close()
        await asyncio.to_thread(self.request_log.close)
