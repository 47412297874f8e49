"""The planner as a scaling policy of Dynamo's discrete-event replay, which is a judge of planners.

It runs inside of the replay's own environment, so it needs no more than numpy and scipy. A snapshot
has each engine's last iteration, not a mean over the interval, and traffic since the last call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Protocol

from planner.core.builtin import Builtin, limits_of
from planner.core.perf.capacity import Slo
from planner.core.rules import DownRule, ReserveRules, Rules, Strategy
from planner.core.types import COMPONENT, Capabilities, Context, Engine, Replicas, Traffic


class Site(Protocol):
    """What a policy may know before the run; nothing of the load."""

    slo_ttft_ms: float
    slo_itl_ms: float
    min_replicas: int
    max_replicas: int
    initial_replicas: int
    kv_tokens: int
    max_batched_tokens: int
    max_seqs: int


class Policy:
    """One run of the planner's core. `settings`: fields of `Rules`."""

    def __init__(self, site: Site, **settings: Any) -> None:
        self._site = site
        rules = replace(
            Rules(slo=Slo(site.slo_ttft_ms / 1000, site.slo_itl_ms / 1000)),
            min_endpoint=site.min_replicas,
            **_known(settings),
        )
        limits = limits_of(1, site.min_replicas, site.max_replicas)
        self.builtin = Builtin(rules, limits)
        self._rules, self._ticks = rules, 0
        self._interval_s = self.builtin.interval_s
        self._target = site.initial_replicas
        self._traffic: list[tuple[float, Mapping[str, Any]]] = []

    def initial_tick_ms(self) -> float:
        """When it wants to be asked first."""
        return 1000.0 * self._interval_s

    def on_tick(self, snapshot: Mapping[str, Any]) -> dict[str, Any]:
        """The replicas that it wants."""
        self._ticks += 1
        now_s = self._ticks * self._interval_s
        context = self._context(snapshot, now_s)
        outcome = self.builtin.tick(context)
        wanted = outcome.targets[COMPONENT]
        changed = wanted if wanted != snapshot["non_draining_decode_count"] else None
        self._target = wanted
        next_ms = 1000.0 * (now_s + self._interval_s)
        return {"target_prefill": None, "target_decode": changed, "next_tick_ms": next_ms}

    def _context(self, snapshot: Mapping[str, Any], now_s: float) -> Context:
        site = self._site
        ready = snapshot["active_decode_count"]
        pending = snapshot["starting_decode_count"] + snapshot["draining_decode_count"]
        engines = tuple(_engine(told) for told in snapshot["decode_fpm_snapshots"])
        of = Capabilities(1, site.max_batched_tokens, site.max_seqs, site.kv_tokens)
        return Context(
            self._ticks,
            now_s,
            {COMPONENT: Replicas(ready, self._target, pending)},
            {COMPONENT: of},
            self._window(snapshot, now_s),
            {COMPONENT: engines},
            baseline={COMPONENT: self._target},
            recent=_together([told]) if (told := snapshot.get("traffic")) else None,
        )

    def _window(self, snapshot: Mapping[str, Any], now_s: float) -> Traffic | None:
        """Traffic of the last throughput interval."""
        told = snapshot.get("traffic")
        if told:
            self._traffic.append((now_s, told))
        since_s = now_s - self._rules.throughput_interval_s
        self._traffic = [(at_s, told) for at_s, told in self._traffic if at_s > since_s]
        return _together([told for _, told in self._traffic])


def _together(parts: list[Mapping[str, Any]]) -> Traffic | None:
    """The traffic of some calls together."""
    if not parts:
        return None
    return Traffic(
        sum(told["duration_s"] for told in parts),
        sum(told["num_req"] for told in parts),
        _mean(parts, "avg_isl", "shape_count"),
        _mean(parts, "avg_osl", "shape_count"),
        _mean(parts, "avg_kv_hit_rate", "hit_rate_count"),
        _mean(parts, "avg_accept_length", "accept_length_forward_count"),
        ended=sum(told.get("shape_count") or 0 for told in parts),
    )


def _mean(parts: list[Mapping[str, Any]], value: str, count: str) -> float | None:
    total = sum(told.get(count) or 0 for told in parts)
    if not total:
        return None
    return float(sum((told.get(value) or 0.0) * (told.get(count) or 0) for told in parts) / total)


def _engine(told: Mapping[str, Any]) -> Engine:
    wall_s = told["wall_time"]
    return Engine(
        str(told["worker_id"]),
        wall_s if wall_s > 0 else None,
        told["sum_prefill_tokens"],
        told["num_decode_requests"],
        told["sum_decode_kv_tokens"],
        told["sum_queued_prefill_tokens"],
        told["sum_queued_decode_kv_tokens"],
    )


def _known(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `Rules`; ValueError for any other."""
    found = _of(Rules, settings)
    if "down_rule" in found:
        found["down_rule"] = DownRule(found["down_rule"])
    if "strategy" in found:
        found["strategy"] = Strategy(found["strategy"])
    if "reserve" in found:
        found["reserve"] = ReserveRules(**_of(ReserveRules, found["reserve"]))
    return found


def _of(kind: type[Rules | ReserveRules], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose names are fields of a class; ValueError for any other."""
    names = {field.name for field in fields(kind)}
    if unknown := settings.keys() - names:
        raise ValueError(f"settings: {', '.join(sorted(unknown))}: not known")
    return dict(settings)
