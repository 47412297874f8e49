"""The planner's Prometheus metrics, from the snapshot of a tick."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from planner.core.pipeline import How
from planner.core.propose.load import LoadDecision
from planner.core.propose.throughput import ThroughputDecision
from planner.scalers.base import Failure
from planner.telemetry.snapshot import Snapshot, TickOutcome

PREFIX = "cache_planner_"
PREDICTED = {
    "requests": "next_num_req",
    "isl_tokens": "next_isl",
    "osl_tokens": "next_osl",
    "hit_ratio": "hit_ratio",
}
SEEN = {
    "requests": "requests",
    "isl_tokens": "isl_tokens",
    "osl_tokens": "osl_tokens",
    "hit_ratio": "hit_ratio",
}

PARTS = ("level", "reserve", "backlog")
"""Of a need."""


class Metrics:
    """All series, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ticks = self._counter("ticks", "Ticks by how they ended", "outcome")
        for outcome in TickOutcome:
            self._ticks.labels(outcome)
        self._tick_s = Histogram(
            f"{PREFIX}tick_seconds", "Duration of a tick", registry=self.registry
        )
        self._target = self._gauge("target_replicas", "Replicas wanted", "component")
        self._ready = self._gauge("ready_replicas", "Replicas that serve", "component")
        self._pending = self._gauge(
            "pending_replicas", "Replicas ordered and not ready, or leaving", "component"
        )
        self._absent = self._gauge(
            "absent_replicas", "Replicas that were ordered and never came", "component"
        )
        self._unread = self._gauge("unread_engines", "Engines that are up and were not read")
        self._granted = self._gauge(
            "granted_replicas", "Replicas that a budget shared by deployments allows", "component"
        )
        self._floor = self._gauge("lower_bound_replicas", "Of throughput scaling", "component")
        self._load = self._gauge(
            "load_decision", "1 for what load scaling decided last", "component", "decision"
        )
        self._throughput = self._gauge(
            "throughput_decision",
            "1 for what throughput scaling decided last",
            *("component", "decision"),
        )
        self._need = self._gauge(
            "need_replicas", "What the strategy reserve adds up, in replicas", "component", "part"
        )
        self._seen = self._gauge("observed", "Figures of the last window of traffic", "figure")
        self._predicted = self._gauge("predicted", "The same for the next window", "figure")
        self._capacity = self._gauge(
            "capacity_requests_per_second", "What one replica carries", "component"
        )
        self._ttft = self._gauge("estimated_ttft_seconds", "Of an average request now", "upstream")
        self._itl = self._gauge("estimated_itl_seconds", "Of an average request now", "upstream")
        self._age = self._gauge("source_age_seconds", "Time since a source was read", "source")
        self._errors = self._counter(
            "scaler_errors", "Calls of the scaler that failed", "scaler", "error"
        )
        self._start_up = self._gauge(
            "start_up_seconds", "From an order to a ready replica, of the last 64", "quantile"
        )
        self._gpu_hours = self._counter("gpu_hours", "GPU hours of ready and pending replicas")
        self._plugin = self._gauge(
            "plugin_state", "1 for what came of a plugin in the last tick", "plugin", "state"
        )
        self._advisory = self._gauge("advisory", "1 while nothing is carried out")

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"{PREFIX}{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}{name}", text, labels, registry=self.registry)

    def is_advisory(self, *, advisory: bool) -> None:
        """Whether decisions are only looked at."""
        self._advisory.set(advisory)

    def granted(self, targets: Mapping[str, int]) -> None:
        """What a shared budget allows."""
        for component, count in targets.items():
            self._granted.labels(component).set(count)

    def failed(self, scaler: str, failure: Failure) -> None:
        """A call of the scaler has failed."""
        self._errors.labels(scaler, failure).inc()

    def ages(self, ages_s: Mapping[str, float | None]) -> None:
        """The ages of the sources; one that was never read has none."""
        for source, age_s in ages_s.items():
            if age_s is not None:
                self._age.labels(source).set(age_s)

    def start_ups(self, seconds: list[float]) -> None:
        """What orders have taken until something was ready."""
        ordered = sorted(seconds)
        for share in (0.5, 0.9):
            if ordered:
                at = min(len(ordered) - 1, int(share * len(ordered)))
                self._start_up.labels(f"{share:g}").set(ordered[at])

    def absent(self, absent: Mapping[str, int]) -> None:
        """What never came."""
        self._absent.clear()
        for component, count in absent.items():
            self._absent.labels(component).set(count)

    def unread(self, count: int) -> None:
        """Engines that are up and were not read."""
        self._unread.set(count)

    def plugins(self, states: Mapping[str, How]) -> None:
        """What came of each plugin; one that is gone has no series."""
        self._plugin.clear()
        for name, last in states.items():
            for how in How:
                self._plugin.labels(name, how).set(how is last)

    def tick(self, snapshot: Snapshot, gpu_hours: float) -> None:
        """Show a tick; `gpu_hours`: since the one before."""
        self._ticks.labels(snapshot.outcome).inc()
        self._tick_s.observe(snapshot.duration_s)
        self._gpu_hours.inc(gpu_hours)
        for component, count in snapshot.targets.items():
            self._target.labels(component).set(count)
        if snapshot.seen is not None:
            self._see(snapshot.seen)
        if snapshot.decided is not None:
            self._decide(snapshot.decided)

    def _see(self, seen: Mapping[str, Any]) -> None:
        for component, one in seen["replicas"].items():
            self._ready.labels(component).set(one["ready"])
            self._pending.labels(component).set(one["pending"])
        for figure, name in SEEN.items():
            value = (seen["traffic"] or {}).get(name)
            if value is not None:
                self._seen.labels(figure).set(value)
        # Instances come and go: only those of this tick have a series.
        self._ttft.clear()
        self._itl.clear()
        for engine in (engine for engines in seen["engines"].values() for engine in engines):
            if "ttft_s" in engine:
                self._ttft.labels(engine["name"]).set(engine["ttft_s"])
                self._itl.labels(engine["name"]).set(engine["itl_s"])

    def _decide(self, decided: Mapping[str, Any]) -> None:
        for component, count in decided["floors"].items():
            self._floor.labels(component).set(count)
        for component, one in decided["capacities"].items():
            self._capacity.labels(component).set(one["rate"])
        for component, need in decided["needs"].items():
            for part in PARTS:
                self._need.labels(component, part).set(need[part])
        _one_of(self._load, LoadDecision, decided["load"])
        _one_of(self._throughput, ThroughputDecision, decided["throughput"])
        for figure, name in PREDICTED.items():
            value = decided["prediction"].get(name)
            if value is not None:
                self._predicted.labels(figure).set(value)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)


def _one_of(gauge: Gauge, kind: type[StrEnum], said: Mapping[str, str]) -> None:
    """1 for what was decided of each component, 0 for the rest of a closed set."""
    for component, last in said.items():
        for decision in kind:
            gauge.labels(component, decision).set(decision == last)
