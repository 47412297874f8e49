"""Every Prometheus metric of the proxy. Names are fixed; labels are closed sets, never an id.

Counters and histograms count each request once, from its record. Gauges are read from the router at
each scrape, so the two cannot disagree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Gauge, Info, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from proxy import __version__
from proxy.core import is_compiled
from proxy.core.admission.memory import Watermark
from proxy.core.latency.regression import SHORT_S
from proxy.core.latency.slo import Slo
from proxy.core.types import FailureKind, Fallback, MoveCause, RejectReason
from proxy.net.timeouts import Clock
from proxy.net.tls import HandshakeEnd
from proxy.protocol.request_framing import Refusal
from proxy.telemetry.instruments import Counts, Levels, Spreads
from proxy.telemetry.log import printable
from proxy.telemetry.record import RequestRecord

PREFIX = "cache_proxy"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240)
PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 1)
TOKENS = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
ERROR_TOKENS = (-32768, -8192, -2048, -512, -128, 0, 128, 512, 2048, 8192, 32768)
ERROR_SECONDS = (-30, -10, -3, -1, -0.3, -0.1, 0, 0.1, 0.3, 1, 3, 10, 30)
ERROR_RATIO = (-0.9, -0.75, -0.5, -0.25, -0.1, 0, 0.1, 0.25, 0.5, 1, 2, 5, 10)
LAG_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
NO_CLASS = "none"
"""route_class of a request that was never placed, or that has no prompt to classify."""
NO_CHECK = "none"
"""check of a refusal that no instance's load is behind."""
_CHECKS = (
    *(RejectReason.DECODE_BLOCKS, RejectReason.PREFILL_TOKENS, RejectReason.PREFILL_FRAC),
    *(RejectReason.UPSTREAM_BUSY, RejectReason.HEAT_CAP),
    *(RejectReason.TTFT_SLO, RejectReason.TPOT_SLO),
)
_QUEUES = (RejectReason.QUEUE_FULL, RejectReason.QUEUE_DEADLINE, RejectReason.QUEUE_TIMEOUT)
_BEHIND = {check: (check,) for check in _CHECKS} | dict.fromkeys(_QUEUES, _CHECKS)
"""The checks that may be behind a reason; of any other reason NO_CHECK."""
SCRAPES_RATIO, SHOWN_S = 0.2, 1.0
_HITS = ("reachable", "chosen", "reported")
_KEPT = ("missed", "kept")
"""Label values for a target that was missed and for one that was kept."""


class Metrics:
    """The registry with every counter, histogram and gauge in it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.slo = Slo()
        self._of_requests()
        self._of_times()
        self._of_overload()
        self._name_known_labels()
        build = Info(
            f"{PREFIX}_build", "Version; core: compiled or interpreted", registry=self.registry
        )
        core = "compiled" if is_compiled() else "interpreted"
        build.info({"version": __version__, "core": core})

    def _of_requests(self) -> None:
        count = self._counter
        self.requests = count("requests", "Finished requests", "endpoint", "route_class", "outcome")
        self.issued = count("issued", "Requests that were placed or refused as busy")
        self.rejected = count(
            "rejected",
            "Requests refused as busy, by the check that made the instances busy",
            "reason",
            "check",
        )
        self.hit_tokens = count(
            "hit_tokens", "Prompt tokens predicted to be cached on their instance"
        )
        self.new_tokens = count("new_tokens", "Prompt tokens predicted to be new on their instance")
        self.compared_prompts = count(
            "compared_prompt_tokens",
            "Prompt tokens, as engines count, of the requests of compared_hit_tokens",
        )
        self.compared_hits = count(
            "compared_hit_tokens",
            "Tokens of them cached on the best instance (reachable) and on the chosen one, as"
            " predicted, and as its engine reported; without offloads, migrated streams, failures,"
            " and answers without cached_tokens",
            "which",
        )
        self.decisions = count("offload_decisions", "Placed requests", "decision", "reason")
        self.fallbacks = count("offload_fallbacks", "Offloads that ended colocated", "reason")
        self.hedges = count(
            "hedges", "Late prefill legs that the decode server computed too", "winner"
        )
        self.releases = count(
            "kv_releases", "Releases of KV on prefill servers that will not be fetched", "result"
        )
        self.retries = count("upstream_retries", "Retries, by the failure before", "reason")
        self.poison_requests = count(
            "poison_requests", "Requests that two instances answered with the same server error"
        )
        self.migrations = count(
            "migrations",
            "Stream migrations, by cause and outcome",
            "reason",
            "outcome",
        )
        self.retries_refused = count("retry_budget_refused", "Retries that the budget refused")
        self.replays = count("upstream_replays", "Stale connections replaced by a fresh one")
        self.disconnects = count("client_disconnects", "Clients that disconnected early", "phase")
        self.client_errors = count("client_errors", "Malformed requests refused", "reason")
        self.handshakes_failed = count(
            "tls_handshakes_failed", "TLS handshakes that a client did not finish", "reason"
        )
        self.log_dropped = count("request_log_dropped", "Log lines dropped: queue or disk full")
        self.traces_dropped = count(
            "traces_dropped",
            "Requests whose spans were dropped: queue full, or the collector did not take them",
        )
        self.reloads = count("config_reloads", "Reloads of the options", "result")
        self.discovery_refused = count(
            "discovery_refused", "Addresses that --discover found and the proxy refuses", "source"
        )
        self.denied = count("denied", "Requests without a known key or token", "who")
        self.thermal_evictions = count(
            "thermal_evictions", "Requests evicted from hot instances", "policy", "outcome"
        )
        self.thermal_actions = count(
            "thermal_actions",
            "Changes of a hot instance's limits, by the thermal state behind them",
            "action",
            "reason",
        )
        self.kv_misses = count(
            "offload_kv_misses", "Offloads whose KV never reached the decode server"
        )
        self.shadow = count(
            "shadow_decisions", "Decisions of the shadow policy", "policy", "agrees"
        )

    def _of_times(self) -> None:
        hist = self._histogram
        self.ttft = hist("ttft_seconds", "Receipt to first token", SECONDS, "route_class")
        self.tpot = hist(
            "tpot_seconds", "Time per token after the first", PER_TOKEN_S, "route_class"
        )
        self.e2e = hist("e2e_seconds", "Receipt to last byte", SECONDS, "route_class")
        self.within_slo = self._counter(
            "slo", "Complete streams, by whether they met --ttft-slo and --tpot-slo", "ttft", "tpot"
        )
        self.isl = hist("isl_tokens", "Prompt tokens", TOKENS)
        self.osl = hist("osl_tokens", "Output tokens", TOKENS)
        self.prefill_leg = hist("prefill_leg_seconds", "Prefill leg of an offload", SECONDS)
        self.kv_transfer = hist(
            "kv_transfer_seconds",
            "From sending an offload's decode leg to its first token",
            SECONDS,
            "prefill",
            "decode",
        )
        self.migration_time = hist(
            "migration_seconds",
            "From a stream's loss or thermal eviction to the next instance's first event",
            SECONDS,
            "evicted",
        )
        self.ttft_error = hist(
            "predicted_ttft_error_seconds", "Measured TTFT minus predicted", ERROR_SECONDS
        )
        self.prediction_error = hist(
            "prediction_error_ratio",
            "(measured - predicted) / predicted time, at least 50 ms",
            ERROR_RATIO,
            "what",
        )
        self.hit_error = hist(
            "prefix_hit_prediction_error_tokens",
            "Engine's cached_tokens minus predicted hit tokens, colocated requests",
            ERROR_TOKENS,
        )
        self.loop_lag = hist("loop_lag_seconds", "Delay of the event loop", LAG_S)

    def _of_overload(self) -> None:
        gauge, count, hist = self._gauge, self._counter, self._histogram
        self.retry_after = hist(
            "retry_after_seconds", "Retry-After of busy answers", (1, 2, 5, 10, 20, 30)
        )
        self.queued_requests = gauge("queued_requests", "Requests that wait for a free instance")
        self.backlog = Levels(
            f"{PREFIX}_backlog_seconds",
            "Seconds in which one instance would compute the prompts that wait for this model here,"
            " and those under way on instances that serve it; of instances with several models"
            " each counts all; (others): the most of any model beyond 64 of an instance",
            "model",
        )
        self.registry.register(self.backlog)
        self.queued_bytes = gauge("queued_bytes", "Bytes of the bodies of waiting requests")
        self.held_bytes = gauge("held_bytes", "Bytes of the bodies of requests without an answer")
        self.queue_wait = hist(
            "queue_wait_seconds", "Time in the wait queue, by outcome", SECONDS, "end"
        )
        self.open_connections = gauge("open_connections", "Client connections")
        self.connections_refused = count(
            "connections_refused", "Client connections refused by --max-connections"
        )
        self.memory_used = gauge("memory_used_bytes", "Resident memory, as last measured")
        self.memory_limit = gauge("memory_limit_bytes", "Memory limit; 0: none")
        self.memory_level = gauge("memory_level", "1 no keep-alive, 2 no HEAVY, 3 no requests")

    def _name_known_labels(self) -> None:
        """Start closed label sets at 0: an alert on a rate must not see "no data"."""
        for counter, values in (
            (self.reloads, ("applied", "unchanged", "refused")),
            (self.denied, ("client", "operator")),
            (self.fallbacks, Fallback),
            (self.hedges, ("local", "peer", "none")),
            (self.releases, ("released", "failed", "stranded", "unknown")),
            (self.retries, FailureKind),
            (self.client_errors, Refusal),
            (self.handshakes_failed, HandshakeEnd),
            (self.disconnects, ("upload", "queue", "prefill", "first_token", "decode")),
            (self.compared_hits, _HITS),
            (self.queue_wait, ("admitted", "refused", "gone")),
        ):
            for value in values:
                counter.labels(value)
        self._name_refusals()
        for cause in MoveCause:
            self.migrations.labels(cause, "moved")
        for what in ("ttft", "prefill", "transfer"):
            self.prediction_error.labels(what)
        for ttft in _KEPT:
            for tpot in _KEPT:
                self.within_slo.labels(ttft, tpot)

    def _name_refusals(self) -> None:
        for reason in RejectReason:
            for check in _BEHIND.get(reason, (NO_CHECK,)):
                self.rejected.labels(reason, check)

    def _counter(self, name: str, text: str, *labels: str) -> Counts:
        counts = Counts(f"{PREFIX}_{name}", text, labels)
        self.registry.register(counts)
        return counts

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"{PREFIX}_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Spreads:
        spreads = Spreads(f"{PREFIX}_{name}", text, labels, buckets)
        self.registry.register(spreads)
        return spreads

    def show_memory(self, state: Watermark, held_bytes: Callable[[], int]) -> None:
        """Read the memory gauges from `state` and `held_bytes` at each scrape."""
        self.held_bytes.set_function(held_bytes)
        self.memory_used.set_function(lambda: state.used_bytes)
        self.memory_limit.set_function(lambda: state.limit_bytes or 0)
        self.memory_level.set_function(lambda: state.level)

    def observe(self, record: RequestRecord, endpoint: str) -> None:
        """Count one finished request."""
        route_class = record.route_class or NO_CLASS
        self.requests.labels(endpoint, route_class, record.outcome or NO_CLASS).inc()
        if (ttft_s := record.ttft_s()) is not None:
            self.ttft.labels(route_class).observe(ttft_s)
            if (tpot_s := record.tpot_s()) is not None:
                self.tpot.labels(route_class).observe(tpot_s)
            if record.outcome == "ok":
                self._observe_slo(record, ttft_s, tpot_s)
        if record.outcome == "ok" and (e2e_s := record.e2e_s()) is not None:
            self.e2e.labels(route_class).observe(e2e_s)
        if (isl := record.prompt_tokens or record.isl_tokens) is not None:
            self.isl.observe(isl)
        if record.osl_tokens is not None:
            self.osl.observe(record.osl_tokens)
        self.hit_tokens.inc(record.hit_tokens or 0)
        self.new_tokens.inc(record.new_tokens or 0)
        self._observe_hits(record)
        self._observe_predictions(record)
        if (shadow := record.shadow) is not None:
            agrees = "failed" if shadow.agrees is None else str(shadow.agrees).lower()
            self.shadow.labels(shadow.policy, agrees).inc()

    def _observe_hits(self, record: RequestRecord) -> None:
        if (compared := record.compared_hits()) is not None:
            prompt, *hits = compared
            self.compared_prompts.inc(prompt)
            for which, tokens in zip(_HITS, hits, strict=True):
                self.compared_hits.labels(which).inc(tokens)

    def _observe_slo(self, record: RequestRecord, ttft_s: float, tpot_s: float | None) -> None:
        new = record.new_tokens_prefill if record.prefill_instance else record.new_tokens
        in_time = self.slo.keeps_ttft(ttft_s, new or 0)
        self.within_slo.labels(_KEPT[in_time], _KEPT[self.slo.keeps_tpot(tpot_s)]).inc()

    def _observe_predictions(self, record: RequestRecord) -> None:
        ttft_s = record.ttft_s()
        if ttft_s is not None or record.t_prefill_done is not None:
            self._observe_times(record)
        colocated = record.prefill_instance is None and record.fallback is None
        if colocated and record.cached_tokens is not None and record.hit_tokens is not None:
            self.hit_error.observe(record.cached_tokens - record.hit_tokens)

    def _observe_times(self, record: RequestRecord) -> None:
        ttft_s = record.predictable_ttft_s()
        if ttft_s is not None and record.predicted_ttft_s is not None:
            self.ttft_error.observe(ttft_s - record.predicted_ttft_s)
        for what, predicted_s, seconds in (
            ("ttft", record.predicted_ttft_s, ttft_s),
            ("prefill", record.predicted_prefill_s, record.prefill_s()),
            ("transfer", record.predicted_transfer_s, record.transfer_s()),
        ):
            if predicted_s is not None and seconds is not None:
                error_ratio = (seconds - predicted_s) / max(predicted_s, SHORT_S)
                self.prediction_error.labels(what).observe(error_ratio)


class Taken(CollectorRegistry):
    """A copy of a registry's present values, which a thread can write out later.

    Label values are made printable, as in the log: engines word the names of models.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._families = list(registry.collect())

    def collect(self) -> Iterator[Metric]:
        """All families."""
        for family in self._families:
            family.samples = [_readable(sample) for sample in family.samples]
            yield family


def _readable(sample: Sample) -> Sample:
    if "".join(sample.labels.values()).isprintable():
        return sample
    return sample._replace(labels={n: printable(value) for n, value in sample.labels.items()})


def single(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


class Exposition:
    """The text of `/metrics`, made in at most `SCRAPES_RATIO` of the time, kept for `SHOWN_S`.

    It takes milliseconds to make. So scrapers that come at once share one, also if some of them
    leave, and a thread writes it, so that streams go on. `prepare` is called with the time before
    the gauges are read.
    """

    def __init__(
        self, registry: CollectorRegistry, clock: Clock, prepare: Callable[[float], None]
    ) -> None:
        self._registry, self._clock, self._prepare = registry, clock, prepare
        self._shown: tuple[bytes, float] = (b"", 0.0)
        self._writing: asyncio.Future[bytes] | None = None

    @property
    def is_being_made(self) -> bool:
        """Whether a thread is writing the text."""
        return self._writing is not None

    @property
    def shown_until_s(self) -> float:
        """Time until which scrapers get the last text."""
        return self._shown[1]

    async def text(self) -> bytes:
        """The present text, or one made at most SHOWN_S ago."""
        text, until_s = self._shown
        now_s = self._clock.now_s()
        if self._writing is None:
            if now_s < until_s:
                return text
            self._prepare(now_s)
            taken, loop = Taken(self._registry), asyncio.get_running_loop()
            self._writing = loop.run_in_executor(None, generate_latest, taken)
            self._writing.add_done_callback(partial(self._written, now_s))
        return await asyncio.shield(self._writing)

    def _written(self, began_s: float, writing: asyncio.Future[bytes]) -> None:
        self._writing = None
        if writing.cancelled() or writing.exception() is not None:
            return  # the scrapers that wait for it get the error
        done_s = self._clock.now_s()
        rest_s = (done_s - began_s) * (1 / SCRAPES_RATIO - 1)
        self._shown = writing.result(), done_s + min(rest_s, SHOWN_S)
