"""How the replay asks a policy, and the base class of the rules here.

A policy is a class. It is called with a `Context` and its settings, once per run. The replay then
calls `initial_tick_ms()`, and `on_tick(snapshot)` at each time that the policy asked for. The
answer has the wanted replicas in `target_decode` (None leaves them) and `next_tick_ms`. Engines
that do both phases are Dynamo's "decode" pool. `close()` is called where there is one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.planner.engine import Engine
from replayer.loads.load import Load

Snapshot = Mapping[str, Any]
"""What Dynamo tells at a tick: all that a policy may look at."""
Answer = dict[str, Any]


class Policy(Protocol):
    """What the replay calls."""

    def initial_tick_ms(self) -> float: ...

    def on_tick(self, snapshot: Snapshot) -> Answer: ...


@dataclass(frozen=True, slots=True)
class Context:
    """What a policy may know before the run: nothing about the load.

    Times of the SLO are in milliseconds, as in Dynamo's snapshot. `startup_s`: what an operator
    would configure. `engine`: the arguments that the replay gets. `timing`: for presets only, as
    the benchmark that an operator of Dynamo would have run.
    """

    slo_ttft_ms: float
    slo_itl_ms: float
    min_replicas: int
    max_replicas: int
    initial_replicas: int
    startup_s: float
    kv_tokens: int
    max_batched_tokens: int
    max_seqs: int
    prefill_tps: float
    engine: Mapping[str, Any]
    timing: Engine

    @classmethod
    def of(cls, load: Load, engine: Engine, startup_s: float) -> Context:
        """The context of a run."""
        return cls(
            slo_ttft_ms=1000 * load.slo_ttft_s,
            slo_itl_ms=1000 * load.slo_itl_s,
            min_replicas=load.min_replicas,
            max_replicas=load.max_replicas,
            initial_replicas=load.initial_replicas,
            startup_s=startup_s,
            kv_tokens=engine.kv_tokens,
            max_batched_tokens=engine.step_tokens,
            max_seqs=engine.max_seqs,
            prefill_tps=engine.prefill_tps,
            engine=engine.replay_arguments(startup_s),
            timing=engine,
        )

    def bounded(self, replicas: int) -> int:
        """The replicas within the bounds of the fleet."""
        return min(self.max_replicas, max(self.min_replicas, replicas))


@dataclass(frozen=True, slots=True)
class Iteration:
    """An engine's newest iteration; a prompt that waits counts whole, its cached part too."""

    running: int
    queued: int
    kv_tokens: int
    prefill_tokens: int
    queued_prefill_tokens: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Iteration:
        """Read a row of the snapshot."""
        return cls(
            running=row["num_prefill_requests"] + row["num_decode_requests"],
            queued=row["num_queued_prefill"] + row["num_queued_decode"],
            kv_tokens=row["sum_decode_kv_tokens"] + row["sum_prefill_kv_tokens"],
            prefill_tokens=row["sum_prefill_tokens"],
            queued_prefill_tokens=row["sum_queued_prefill_tokens"],
        )


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean since the last tick, and of how many requests; 0 of none."""

    value: float = 0.0
    count: int = 0

    @classmethod
    def together(cls, means: Iterable[Mean]) -> Mean:
        """The mean over all their requests."""
        known = list(means)
        count = sum(one.count for one in known)
        total = sum(one.value * one.count for one in known)
        return cls(total / count, count) if count else cls()


@dataclass(frozen=True, slots=True)
class Traffic:
    """What happened since the last tick. TTFT, ITL and ISL are of requests that completed."""

    isl_tokens: Mean = Mean()
    ttft_ms: Mean = Mean()
    itl_ms: Mean = Mean()
    hit_ratio: Mean = Mean()

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Traffic:
        """Read the snapshot's `traffic`."""

        def mean(value: str, count: str) -> Mean:
            return Mean(row.get(value) or 0.0, row.get(count) or 0)

        return cls(
            isl_tokens=mean("avg_isl", "shape_count"),
            ttft_ms=mean("avg_ttft_ms", "ttft_count"),
            itl_ms=mean("avg_itl_ms", "itl_count"),
            hit_ratio=mean("avg_kv_hit_rate", "hit_rate_count"),
        )


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot as the rules read it. `wanted`: ready ones and those that start."""

    now_s: float
    ready: int
    wanted: int
    engines: Sequence[Iteration]
    traffic: Traffic = Traffic()

    @property
    def running(self) -> int:
        """Requests that the engines compute."""
        return sum(one.running for one in self.engines)

    @property
    def queued(self) -> int:
        """Requests that wait in the engines."""
        return sum(one.queued for one in self.engines)

    @property
    def kv_tokens(self) -> int:
        """KV in use, over all engines."""
        return sum(one.kv_tokens for one in self.engines)

    @property
    def backlog_tokens(self) -> int:
        """Tokens of prompts that are not computed yet."""
        return sum(one.queued_prefill_tokens + one.prefill_tokens for one in self.engines)


class Rule(ABC):
    """A policy that is asked at even intervals; a subclass says how many replicas it wants."""

    interval_s = 15.0

    def __init__(self, context: Context) -> None:
        self.context = context
        self._now_s = 0.0
        # An engine that reports nothing at a tick still has its newest iteration.
        self._newest: dict[str, Iteration] = {}

    @abstractmethod
    def replicas(self, view: View) -> int | None:
        """The replicas wanted; None leaves them."""

    def initial_tick_ms(self) -> float:
        """The time of the first tick."""
        return 1000 * (self._now_s + self.interval_s)

    def on_tick(self, snapshot: Snapshot) -> Answer:
        """Answer the replay."""
        self._now_s += self.interval_s
        view = self._view(snapshot)
        wanted = self.replicas(view)
        target = None if wanted is None else self.context.bounded(wanted)
        return {
            "target_prefill": None,
            "target_decode": None if target == view.wanted else target,
            "next_tick_ms": 1000 * (self._now_s + self.interval_s),
        }

    def _view(self, snapshot: Snapshot) -> View:
        for row in snapshot["decode_fpm_snapshots"]:
            self._newest[str(row["worker_id"])] = Iteration.of(row)
        active = {str(one) for one in snapshot["active_decode_ids"]}
        self._newest = {name: one for name, one in self._newest.items() if name in active}
        return View(
            now_s=self._now_s,
            ready=snapshot["active_decode_count"],
            wanted=snapshot["non_draining_decode_count"],
            engines=tuple(self._newest.values()),
            traffic=Traffic.of(snapshot.get("traffic") or {}),
        )


class Static(Rule):
    """Always the same number."""

    interval_s = 60.0

    def __init__(self, context: Context, replicas: int) -> None:
        super().__init__(context)
        self._replicas = replicas

    def replicas(self, view: View) -> int:
        """That number."""
        return self._replicas


class Schedule(Rule):
    """Follows orders, each a time and the replicas from then on."""

    def __init__(self, context: Context, orders: Sequence[tuple[float, int]]) -> None:
        super().__init__(context)
        self.interval_s = 1.0 if context.startup_s < 10 else 5.0
        self._orders = sorted(orders)

    def replicas(self, view: View) -> int | None:
        """The newest order; None before the first one."""
        given = [n for at_s, n in self._orders if at_s <= view.now_s]
        return given[-1] if given else None
