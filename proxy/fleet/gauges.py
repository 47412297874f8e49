"""Prometheus gauges of the fleet: read from the router and engine reports at each scrape."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.core.accounts.engine_reports import EngineStats
from proxy.core.fleet.health import State
from proxy.core.known.fleet_state import FleetState
from proxy.core.kvcache.published import PublishedBlocks
from proxy.core.latency.model import CALIBRATION_QUANTILES
from proxy.core.thermal.fleet_control import THERMAL_STATES, FleetControl
from proxy.core.types import Load, RejectReason
from proxy.telemetry.metrics import PREFIX, single

_STARTED_S = time.time_ns() / 1e9
_CHECKS = (RejectReason.PREFILL_TOKENS, RejectReason.PREFILL_FRAC, RejectReason.DECODE_BLOCKS)
_TOLD = (RejectReason.UPSTREAM_BUSY, RejectReason.HEAT_CAP)
_TOKEN_GAUGES: tuple[tuple[str, str, Callable[[Load], int]], ...] = (
    ("ongoing_tokens", "Prefill, inbound and decode tokens", lambda x: x.ongoing_tokens),
    (
        "ongoing_prefill_tokens",
        "New tokens of requests before their first token",
        lambda x: x.prefill_tokens,
    ),
    (
        "ongoing_inbound_tokens",
        "Tokens of KV that a peer will transfer here",
        lambda x: x.inbound_tokens,
    ),
    ("ongoing_decode_tokens", "Context of running streams", lambda x: x.decode_tokens),
    ("pinned_tokens", "Tokens of KV held for a peer", lambda x: x.pinned_tokens),
)
_ENGINE_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float | None]], ...] = (
    (
        "kv_cache_usage_ratio",
        "KV in use on the fullest data-parallel rank, as the engine reports",
        lambda s: s.kv_used_ratio,
    ),
    (
        "prefix_cache_hit_ratio",
        "Share of looked-up tokens found in the instance's own cache, since its start",
        lambda s: s.hit_ratio,
    ),
    (
        "external_prefix_cache_hit_ratio",
        "Share of looked-up tokens found at a peer or in a shared store, since its start",
        lambda s: s.external_hit_ratio,
    ),
    (
        "combined_prefix_cache_hit_ratio",
        "Sum of the own and the external prefix cache hit ratio",
        lambda s: s.combined_hit_ratio,
    ),
)
_ENGINE_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float | None]], ...] = (
    (
        "prefix_cache_queries",
        "Prompt tokens looked up, as the engine counts",
        lambda s: s.looked_up_tokens,
    ),
    (
        "prefix_cache_hits",
        "Tokens found in the instance's own cache, as the engine counts",
        lambda s: s.local_hit_tokens,
    ),
    (
        "external_prefix_cache_hits",
        "Tokens from a peer or a shared store, as the engine counts",
        lambda s: s.external_hit_tokens,
    ),
)

_PUBLISHED_COUNTERS: tuple[tuple[str, str, Callable[[PublishedBlocks], int]], ...] = (
    ("kv_event_batches", "Batches of KV events received", lambda b: b.batches),
    ("kv_event_stored_blocks", "Blocks that the engine stored", lambda b: b.stored_blocks),
    ("kv_event_removed_blocks", "Blocks that the engine evicted", lambda b: b.removed_blocks),
    ("kv_event_gaps", "Gaps in the sequence numbers of batches", lambda b: b.gaps),
    (
        "kv_event_lost_gaps",
        "Gaps that no replay could close; the known blocks were dropped",
        lambda b: b.lost_gaps,
    ),
    ("kv_event_restarts", "Engine restarts seen in its batches", lambda b: b.restarts),
    ("kv_event_malformed", "Batches that could not be read", lambda b: b.malformed),
    (
        "kv_event_skipped",
        "Events of other tiers, other KV cache groups, or an unknown type",
        lambda b: b.skipped_events,
    ),
)


class FleetCollector(Collector):
    """Gauges read from what is known and the last engine reports at scrape time."""

    def __init__(
        self, known: FleetState, stats: dict[str, EngineStats], heat: FleetControl | None = None
    ) -> None:
        """`heat`: None where no instance can be limited for its heat."""
        self._known = known
        self._stats = stats
        self._heat = heat
        self.now_s = 0.0

    def at(self, now_s: float) -> None:
        """Set the time of the next `collect`."""
        self.now_s = now_s

    def collect(self) -> Iterator[Metric]:
        """All families."""
        names = [member.instance.name for member in self._known.fleet.members()]
        loads = {name: self._known.ledger.load(name) for name in names}
        own = {name: self._known.ledger.own(name) for name in names}
        yield from self._tokens(own)
        yield self._in_flight(own)
        yield self._health(names)
        yield self._breaker()
        panic = self._known.fleet.is_panicking()
        configured, known = self._known.kv_peers()
        text = "Prefill servers by the options"
        yield single("kv_peers_configured", text, configured)
        text = "Prefill servers whose engine id is known, so that an offload is possible"
        yield single("kv_peers_known", text, known)
        yield single(
            "panic", "1 while ejected instances are used because too few others are up", panic
        )
        yield self._busy(names)
        yield self._thresholds()
        yield from self._compared(loads)
        yield self._learned(names)
        yield self._calibration()
        yield from self._kv(names)
        yield from self._engine(names)
        yield self._frozen(names)
        yield self._doubted(names)
        yield from self._published()
        if self._heat is not None:
            yield from _thermal(self._heat, loads)
        yield single(
            "accounting_drift", "Counters less live leases; must be 0", self._known.ledger.drift()
        )
        yield single("live_leases", "Requests that hold a lease", self._known.ledger.live)
        homes = sum(state.cache.sessions for state in self._known.fleet.states)
        yield single("sessions", "Sessions with a home", homes)
        yield single("prefix_blocks", "Blocks in the index", self._known.prefixes.total_blocks)
        # Names that every exporter has. prometheus_client's own collector would also list the
        # descriptors, which takes milliseconds if there are many.
        yield CounterMetricFamily("process_cpu_seconds", "CPU time", value=time.process_time())
        yield GaugeMetricFamily("process_start_time_seconds", "Start, unix time", value=_STARTED_S)

    def _tokens(self, loads: dict[str, Load]) -> Iterator[Metric]:
        for name, text, read in _TOKEN_GAUGES:
            family = _gauge(name, text, "upstream")
            for upstream, load in loads.items():
                family.add_metric([upstream], read(load))
            yield family

    def _in_flight(self, loads: dict[str, Load]) -> Metric:
        family = _gauge("in_flight", "Requests by phase", "upstream", "phase")
        for upstream, load in loads.items():
            family.add_metric([upstream, "prefill"], load.prefill_requests)
            family.add_metric([upstream, "inbound"], load.inbound_requests)
            family.add_metric([upstream, "decode"], load.decode_requests)
            family.add_metric([upstream, "pinned"], load.pinned_requests)
        return family

    def _health(self, names: list[str]) -> Metric:
        family = _gauge("instance_healthy", "1 when the instance may be chosen", "upstream")
        for name in names:
            family.add_metric([name], self._known.fleet.is_up(name))
        return family

    def _breaker(self) -> Metric:
        text = "0 healthy, 1 suspect, 2 ejected, 3 probing, 4 asleep, 5 paused"
        family = _gauge("breaker_state", text, "upstream")
        for member in self._known.fleet.members():
            state = member.health.state(self.now_s)
            family.add_metric([member.instance.name], list(State).index(state))
        return family

    def _learned(self, names: list[str]) -> Metric:
        family = _gauge(
            "learned_prefill_tps",
            "Learned tokens/s of a prefill of 8192 tokens, none cached",
            "upstream",
        )
        for name in names:
            family.add_metric([name], self._known.latency.prefill_tps(name))
        return family

    def _calibration(self) -> Metric:
        text = "Predicted / measured TTFT of the last answers, by whether the request queued"
        labels = ("route_class", "queued", "quantile")
        family = _gauge("ttft_prediction_ratio", text, *labels)
        for (route_class, queued), ratios in sorted(self._known.latency.calibration.by.items()):
            for quantile in CALIBRATION_QUANTILES:
                if (ratio := ratios.quantile(quantile)) is not None:
                    values = [route_class, str(queued).lower(), str(quantile)]
                    family.add_metric(values, ratio)
        return family

    def _kv(self, names: list[str]) -> Iterator[Metric]:
        """The KV cache as decisions see it."""
        text = (
            "KV cache size used in decisions: reported, learned, or assumed from another instance"
        )
        sizes = _gauge("kv_cache_assumed_tokens", text, "upstream")
        text = "KV of running sessions, plus KV of idle ones times their chance to return"
        live = _gauge("live_kv_tokens", text, "upstream")
        sessions = self._known.sessions
        for name in names:
            state = self._known.fleet.states.of(name)
            if state.assumed_kv_tokens is not None:
                sizes.add_metric([name], state.assumed_kv_tokens)
            live.add_metric([name], sessions.live(state.cache).tokens(sessions.curve, self.now_s))
        yield from (sizes, live)

    def _busy(self, names: list[str]) -> Metric:
        text = "1 when the instance is above this threshold; model *: the default thresholds"
        family = _gauge("instance_busy", text, "upstream", "check", "model")
        for name in names:
            for model, busy in self._known.busy_by_model(name, self.now_s).items():
                over = busy.checks if busy is not None else ()
                for check in (*_CHECKS, *_TOLD):
                    family.add_metric([name, check, model], check in over)
        return family

    def _thresholds(self) -> Metric:
        """Thresholds in force, also of models that inherit them, to draw beside loads."""
        text = "Limit in force: share of KV blocks, or prefill tokens of one data-parallel rank"
        family = _gauge("busy_threshold", text, "check", "model")
        gate = self._known.gate
        for model, limits in gate.configured().items():
            for check, limit in gate.limits_by_check(limits).items():
                family.add_metric([check, model], limit)
        return family

    def _compared(self, loads: dict[str, Load]) -> Iterator[Metric]:
        """The values that the thresholds are compared with, set or not."""
        gate = self._known.gate
        text = (
            "Share of KV blocks in use, compared with the threshold: own count, or least used rank"
        )
        ratios = _gauge("kv_blocks_ratio", text, "upstream", "source")
        sizes = _gauge("kv_cache_size_tokens", "KV cache, as the engine reports", "upstream")
        ranks = _gauge("engine_ranks", "Data-parallel ranks, as the engine reports", "upstream")
        text = "1 while active_decode_blocks_threshold is set but the KV cache size is unknown"
        without = _gauge("threshold_without_effect", text, "upstream")
        for name, load in loads.items():
            own, reported = gate.kv_ratios(name, load, self.now_s)
            for source, ratio in (("own", own), ("reported", reported)):
                if ratio is not None:
                    ratios.add_metric([name, source], ratio)
            if (size := gate.kv_tokens(name)) is not None:
                sizes.add_metric([name], size)
            ranks.add_metric([name], gate.ranks(name))
            without.add_metric([name], self._known.lacks_kv_size(name))
        yield from (ratios, sizes, ranks, without)

    def _engine(self, names: list[str]) -> Iterator[Metric]:
        """The engines' reports; a counter restarts at 0 with its engine."""
        reports = [(name, self._stats[name]) for name in names if name in self._stats]
        for rows, make in ((_ENGINE_GAUGES, _gauge), (_ENGINE_COUNTERS, _counter)):
            for name, text, read in rows:
                family = make(name, text, "upstream")
                for upstream, report in reports:
                    if (value := read(report)) is not None:
                        family.add_metric([upstream], value)
                yield family

    def _frozen(self, names: list[str]) -> Metric:
        text = "1 while an engine's /metrics are ignored: unchanged although it serves"
        family = _gauge("engine_report_frozen", text, "upstream")
        for name in names:
            family.add_metric([name], self._known.gate.is_frozen(name))
        return family

    def _doubted(self, names: list[str]) -> Metric:
        text = "1 while an engine's usage is ignored: it disagrees with the other engines"
        family = _gauge("engine_usage_doubted", text, "upstream")
        for name in names:
            family.add_metric([name], self._known.is_usage_doubted(name))
        return family

    def _published(self) -> Iterator[Metric]:
        """The engines' KV events, of the instances whose events are followed."""
        rows = [
            ([name, str(rank)], blocks)
            for name, ranks in self._known.published.all().items()
            for rank, blocks in ranks.items()
        ]
        labels = ("upstream", "rank")
        live = _gauge("kv_events_live", "1 while the engine's KV events arrive", *labels)
        whole = _gauge(
            "kv_events_whole", "1 while all cached blocks of the rank are known", *labels
        )
        text = "0 while an engine reports fewer cached tokens than its KV events"
        believed = _gauge("kv_events_believed", text, "upstream")
        held = _gauge("kv_event_blocks", "Blocks in the prefix cache, by KV events", *labels)
        age = _gauge("kv_events_age_seconds", "Time since the last batch of KV events", *labels)
        lag = _gauge("kv_events_lag_seconds", "Age of a batch of KV events at its arrival", *labels)
        for name in self._known.published.all():
            believed.add_metric([name], self._known.published.is_believed(name))
        for values, blocks in rows:
            live.add_metric(values, blocks.is_live)
            whole.add_metric(values, blocks.is_live and blocks.is_whole)
            held.add_metric(values, blocks.copies)
            if blocks.heard_s is not None:
                age.add_metric(values, max(0.0, self.now_s - blocks.heard_s))
            if blocks.lag_s is not None:
                lag.add_metric(values, blocks.lag_s)
        yield from (live, whole, believed, held, age, lag)
        for name, text, read in _PUBLISHED_COUNTERS:
            family = _counter(name, text, *labels)
            for values, blocks in rows:
                family.add_metric(values, read(blocks))
            yield family


def _thermal(heat: FleetControl, loads: dict[str, Load]) -> Iterator[Metric]:
    """Gauges of thermal control, per instance."""
    state = _gauge(
        "thermal_state", "1 for the current state of thermal control", "upstream", "state"
    )
    headroom = _gauge("thermal_headroom_celsius", "Predicted degrees below the target", "upstream")
    cap = _gauge("thermal_cap", "Most requests in flight; +Inf: no cap", "upstream")
    running = _gauge("thermal_running", "Requests in flight, bounded by the cap", "upstream")
    watts = _gauge("thermal_watts_per_seq", "Learned watts per additional sequence", "upstream")
    turns = _counter("thermal_oscillations", "Direction changes of the cap", "upstream")
    for name, load in loads.items():
        status = heat.status(name)
        for one in THERMAL_STATES:
            state.add_metric([name, one], status.state == one)
        if status.headroom_celsius is not None:
            headroom.add_metric([name], status.headroom_celsius)
        cap.add_metric([name], math.inf if status.limits.cap is None else status.limits.cap)
        running.add_metric([name], load.running_requests)
        watts.add_metric([name], status.watts_per_seq)
        turns.add_metric([name], status.oscillations)
    yield from (state, headroom, cap, running, watts, turns)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
