"""What the handlers share: the router, the connections, the counters, and the clock."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

from multidict import CIMultiDictProxy
from prometheus_client import generate_latest

from proxy.config.options import Settings
from proxy.config.values import InstanceSpec
from proxy.core.admission.engine_reports import EngineKv, EngineStats
from proxy.core.admission.memory import Level, Watermark
from proxy.core.admission.queue import QueueLimits
from proxy.core.config import RouterConfig
from proxy.core.connectors import CONNECTORS
from proxy.core.connectors.base import Connector
from proxy.core.fleet.retries import Budget
from proxy.core.latency.slo import Slo
from proxy.core.routing.request_flow import LegCaps
from proxy.core.routing.router import Router
from proxy.core.types import FailureKind, Instance, RequestFacts, Thresholds
from proxy.fleet.gauges import FleetCollector
from proxy.fleet.instances import Watcher
from proxy.net import tls
from proxy.net.timeouts import Clock, Limit
from proxy.net.upstream.client import Upstream
from proxy.net.upstream.pool import ConnectOptions
from proxy.protocol.errors import UnauthorizedError, UpstreamFailure
from proxy.protocol.request_facts import TokenEstimator
from proxy.state.access import Access, Grant, bearer
from proxy.state.detached import DetachedTasks
from proxy.state.queue import WaitingRoom
from proxy.telemetry.log import FailureLog
from proxy.telemetry.metrics import Metrics, Taken
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.request_log import RequestLog

DECISIONS_KEPT = 200
"""For a look; the request log has them all. With what it could have done each is 3 kB and more."""
SCRAPES_RATIO, SHOWN_S = 0.2, 1.0


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


@dataclass(slots=True)
class ProxyState:
    """One proxy. Made inside a running loop, closed with `close`."""

    settings: Settings
    clock: Clock
    router: Router
    metrics: Metrics
    request_log: RequestLog
    ways: ConnectOptions = field(default_factory=ConnectOptions)
    estimator: TokenEstimator = field(default_factory=TokenEstimator)
    upstreams: dict[str, Upstream] = field(default_factory=dict)
    stats: dict[str, EngineStats] = field(default_factory=dict)
    aftermath: DetachedTasks = field(default_factory=DetachedTasks)
    is_draining: bool = False
    is_leaving: bool = False
    """Kept connections end with their next answer; also where another process has taken over."""
    is_cutting: bool = False
    scopes: set[Limit] = field(default_factory=set)
    decisions: deque[RequestRecord] = field(default_factory=lambda: deque(maxlen=DECISIONS_KEPT))
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    budget: Budget = field(default_factory=Budget)
    failures: FailureLog = field(default_factory=FailureLog)
    collector: FleetCollector = field(init=False)
    access: Access = field(init=False)
    leg_caps: LegCaps = field(init=False)
    shows_route: bool = field(init=False)
    """Whether X-Cache-Proxy-* are sent; between tenants they would tell of each other's prompts."""
    own_ports: set[int] = field(default_factory=set)
    last_reload: dict[str, object] | None = None
    _shown: tuple[bytes, float] = (b"", 0.0)
    _writing: asyncio.Future[bytes] | None = None
    watcher: Watcher = field(init=False)
    waiting: WaitingRoom = field(init=False)
    memory: Watermark = field(default_factory=lambda: Watermark(None))

    def __post_init__(self) -> None:
        self.idle.set()
        self.watcher = Watcher(self.router, self.upstreams, self.clock)
        self.collector = FleetCollector(self.router, self.stats)
        self.metrics.registry.register(self.collector)
        options = self.settings
        self.use(options)
        limits = QueueLimits(options.max_queue, options.max_queue_bytes, options.max_queue_seconds)
        weights = {share.tenant: share.weight for share in options.tenant_weights}
        self.metrics.show_memory(self.memory)
        self.waiting = WaitingRoom(self.router, self.clock, self.metrics, limits, weights)
        for spec in self.settings.instances:
            self.add(spec)

    @classmethod
    def start(cls, settings: Settings, limit_bytes: int | None = None) -> ProxyState:
        """Build everything from the options; OSError when the request log cannot be opened.

        `limit_bytes`: what the process may use of memory, None: no limit.
        """
        metrics = Metrics()
        log = RequestLog(settings.request_log, metrics.log_dropped.inc)
        ways = ConnectOptions(instance_tls(settings), bearer(settings.instance_api_key))
        service = cls(settings, Clock(), Router(router_config(settings)), metrics, log, ways)
        service.memory.limit_bytes = limit_bytes
        return service

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
        instance = Instance(spec.name, spec.url, spec.bootstrap_url)
        self.router.add(instance)
        timeout_s, count = self.settings.connect_timeout, self.metrics.replays.inc
        self.upstreams[spec.name] = Upstream(instance, timeout_s, count, self.ways)

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

    async def remove(self, name: str) -> None:
        """Take an instance out and close its connections."""
        self.router.remove(name)
        self.metrics.kv_transfer.forget(name)
        self.stats.pop(name, None)
        if (upstream := self.upstreams.pop(name, None)) is not None:
            self._forget_names()
            upstream.went_down()
            await upstream.close()

    def _forget_names(self) -> None:
        instances = [upstream.instance for upstream in self.upstreams.values()]
        urls = [url for i in instances for url in (i.url, i.bootstrap_url) if url]
        self.ways.resolver.keep({urlsplit(url).hostname or "" for url in urls})

    def has_drained(self, name: str) -> bool:
        """Whether an instance that is on its way out has nothing left to do."""
        member = self.router.fleet.get(name)
        return member is not None and member.is_draining and self.router.ledger.load(name).is_idle

    def upstream(self, name: str) -> Upstream:
        """An instance's connections; raises UpstreamFailure when it was removed meanwhile."""
        found = self.upstreams.get(name)
        if found is None:
            raise UpstreamFailure(FailureKind.CONNECT, "the instance was removed")
        return found

    @property
    def is_serving(self) -> bool:
        """Whether an instance that has answered is there to be used."""
        return any(m.health.was_seen for m in self.router.fleet.usable())

    @property
    def wants_keepalive(self) -> bool:
        """Whether a client's connection may stay open after its answer."""
        return not self.is_leaving and self.memory.level is Level.NORMAL

    def is_too_heavy_now(self, facts: RequestFacts) -> bool:
        """Whether memory is too short for this one: HEAVY wherever it would run."""
        return (
            self.memory.level >= Level.NO_HEAVY
            and self.router.least_new_tokens(facts) >= self.settings.heavy_threshold
        )

    @property
    def in_flight(self) -> int:
        """Requests that have begun and are not over."""
        return len(self.scopes)

    def enter(self, scope: Limit) -> None:
        """A request begins; `scope` is its total timeout."""
        if not self.scopes:
            self.idle.clear()
        self.scopes.add(scope)
        self.budget.active = len(self.scopes)

    def leave(self, scope: Limit) -> None:
        """A request is over."""
        self.scopes.discard(scope)
        self.budget.active = len(self.scopes)
        if not self.scopes:
            self.idle.set()

    def cut(self) -> None:
        """End every request now: each says so to its client."""
        self.is_cutting = True
        now_s = asyncio.get_running_loop().time()
        for scope in list(self.scopes):
            scope.reschedule(now_s)

    def observe_stats(self, name: str, stats: EngineStats, mark: int | None = None) -> None:
        """Take in an engine's report; `mark` is equal for equal ones."""
        if name in self.upstreams:
            self.stats[name] = stats
            kv = EngineKv(stats.kv_total_tokens, stats.kv_used_ratio)
            self.watcher.observe_start(name, stats.start_s)
            self.router.gate.observe_engine(name, kv, self.clock.now_s(), mark)

    async def exposition(self) -> bytes:
        """The text of `/metrics`, made in `SCRAPES_RATIO` of the time at most, kept for `SHOWN_S`.

        It takes milliseconds: who asks in a storm shares one, also with those who have left, and a
        thread writes it out, so that streams move meanwhile.
        """
        text, until_s = self._shown
        now_s = self.clock.now_s()
        if self._writing is None:
            if now_s < until_s:
                return text
            self.collector.now_s = now_s
            taken, loop = Taken(self.metrics.registry), asyncio.get_running_loop()
            self._writing = loop.run_in_executor(None, generate_latest, taken)
            self._writing.add_done_callback(partial(self._written, now_s))
        return await asyncio.shield(self._writing)

    def _written(self, began_s: float, writing: asyncio.Future[bytes]) -> None:
        self._writing = None
        if writing.cancelled() or writing.exception() is not None:
            return  # who waits for it is told
        done_s = self.clock.now_s()
        rest_s = (done_s - began_s) * (1 / SCRAPES_RATIO - 1)
        self._shown = writing.result(), done_s + min(rest_s, SHOWN_S)

    async def close(self) -> None:
        """Close connections and the log."""
        for upstream in self.upstreams.values():
            await upstream.close()
        await asyncio.to_thread(self.request_log.close)
