"""One run of the league: one row of figures for a policy, a load, a seed and a fleet.

Figures cover the requests due after the first quarter of the horizon, a set that depends on no
policy. Failures, makespan, offloads and bytes cover all. A failed request counts as infinitely late
in every percentile and mean (null in JSON). Goodput: the share of requests with TTFT within 2 s
plus 0.1 ms per new token, new to an infinite cache of the session, and TPOT within 50 ms.
`hit_ratio`: share of the answered prompts' tokens that no engine computed. `hit_error_ratio`: mean
difference of predicted and actual cached share, over prompts computed where they decode (`late`:
without the first 100). `ttft_error`: relative difference of predicted and realised TTFT, without
the first 50. `cut`: streams that ended before their answer did, as their engine died; `moves`: how
often one migrated. `work_done_ratio`: see the function.

A closed loop has no horizon: all its requests count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.bench.finished import goodput_ratio, of_virtual, summary, times
from analysis.league.fleet import EngineFleet
from analysis.rivals.registry import RIVALS, Rival
from proxy.core.known.fleet_state import FleetState
from proxy.core.latency.slo import Slo
from proxy.core.placement.decision import Decide
from proxy.core.routing.router import Router
from proxy.core.thermal.readings import HeatLimits
from proxy.core.types import RouterConfig
from replayer.virtual.arrivals import LoadRules, Planned, SlotRules, plan, plan_slots
from replayer.virtual.fleet import simulate
from replayer.virtual.load import Source
from replayer.virtual.requests import VirtualOptions, VirtualRow, VirtualRun

WARM_UP_RATIO = 0.25
LATE_HITS, LATE_TTFT = 100, 50
"""Requests from which on predictions should hold: the models have seen that many."""
PREFILL_THROUGHPUT = 20_000.0
FIGURES = ("p50", "p90", "mean")


@dataclass(frozen=True, slots=True)
class Task:
    """One row to compute. `rules` carry rate, horizon and seed, or the slots of a closed loop."""

    policy: str
    load: float
    regime: str
    perturb: str
    rules: LoadRules | SlotRules
    fleet: EngineFleet


def run_task(source: Source, task: Task, slo: Slo | None = None) -> dict[str, Any]:
    """Simulate a task and return its row; `slo`: another one than the load's for goodput."""
    rules = task.rules
    planned = plan(source, rules) if isinstance(rules, LoadRules) else plan_slots(source, rules)
    run = run_policy(task.policy, planned, task.fleet, source.block_tokens)
    return {
        "policy": task.policy,
        "load": task.load,
        "seed": rules.seed,
        "regime": task.regime,
        "perturb": task.perturb,
        **figures(run, planned, rules, task.fleet.kv_tokens, slo),
    }


def run_policy(
    policy: str,
    planned: Sequence[Planned],
    fleet: EngineFleet,
    block_tokens: int,
    until_s: float = math.inf,
) -> VirtualRun:
    """Run the load under one of RIVALS, to its end or until a time."""
    return run_rival(RIVALS[policy], planned, fleet, block_tokens, until_s)


def run_rival(
    rival: Rival,
    planned: Sequence[Planned],
    fleet: EngineFleet,
    block_tokens: int,
    until_s: float = math.inf,
) -> VirtualRun:
    """Run the load under a rule that need not be in RIVALS; each replica has a rule of its own."""
    config, options = setting(rival, fleet, block_tokens, until_s)

    def make() -> tuple[Router, Sequence[object]]:
        decide = make_rule(rival, fleet)
        known = FleetState(config)
        if fleet.cap is not None:
            for number in range(len(fleet.engines)):
                known.heat.limit(f"e{number}", HeatLimits(cap=fleet.cap))
        return Router(known, decide=decide), [] if decide is None else [decide]

    (router, observers), *others = [make() for _ in range(fleet.replicas.count)]
    return simulate(planned, router, options, observers, others)


def make_rule(rival: Rival, fleet: EngineFleet) -> Decide | None:
    """Make the rival's rule for one run; None if the router decides by its own options."""
    first = fleet.engines[0]
    return rival.make(first.num_blocks * first.block_size)


def setting(
    rival: Rival, fleet: EngineFleet, block_tokens: int, until_s: float = math.inf
) -> tuple[RouterConfig, VirtualOptions]:
    """Return the router's and the virtual fleet's options for a rival's run."""
    config = RouterConfig(
        **{"prefill_throughput": PREFILL_THROUGHPUT, **fleet.options, **rival.options}
    )
    options = VirtualOptions(
        engines=fleet.engines,
        block_tokens=block_tokens,
        timeout_s=fleet.timeout_s,
        estimate_factor=fleet.estimate_factor,
        until_s=until_s,
        way=fleet.way,
        joins_s=fleet.joins_s,
        reports_kv=fleet.reports_kv,
        losses=fleet.losses,
        migration_limit=fleet.migration_limit,
        heat=fleet.heat,
        replicas=fleet.replicas,
        retry=fleet.retry,
        queue=fleet.queue,
    )
    return config, options


def figures(
    run: VirtualRun,
    planned: Sequence[Planned],
    rules: LoadRules | SlotRules,
    kv_tokens: int,
    slo: Slo | None = None,
) -> dict[str, Any]:
    """Compute a row's figures; times in seconds. Goodput is by `slo`, or by that of the load."""
    is_open = isinstance(rules, LoadRules)
    horizon_s = rules.horizon_s if isinstance(rules, LoadRules) else run.makespan_s
    warm_s = WARM_UP_RATIO * horizon_s if is_open else 0.0
    rows = [row for row, one in zip(run.rows, planned, strict=True) if one.due_s >= warm_s]
    judged = [of_virtual(row, slo or rules.slo) for row in rows]
    prompt = sum(row.prompt_tokens for row in run.rows if row.ttft_s is not None)
    computed = sum(row.computed_tokens for row in run.rows if row.ttft_s is not None)
    by_arrival = sorted(run.rows, key=lambda row: row.arrival_s)
    return {
        "requests": len(rows),
        "requests_run": len(run.rows),
        "failures": sum(row.outcome != "ok" for row in run.rows),
        "rejects": sum(row.rejects for row in run.rows),
        "goodput_ratio": goodput_ratio(judged) or 0.0,
        "ttft_s": times(judged, "ttft_s", "p50", "p90", "p99", "mean"),
        "tpot_s": times(judged, "tpot_s", *FIGURES, answered=True),
        "e2e_s": times(judged, "e2e_s", *FIGURES),
        "makespan_s": run.makespan_s,
        "hit_ratio": 1.0 - computed / max(1, prompt),
        "hit_error_ratio": hit_error_ratio(run.rows),
        "hit_error_late_ratio": hit_error_ratio(by_arrival[LATE_HITS:]),
        "ttft_error": ttft_error(by_arrival[LATE_TTFT:]),
        "offloads": sum(row.prefill is not None for row in run.rows),
        "fallbacks": sum(row.fallback is not None for row in run.rows),
        "hedges": sum(row.hedge is not None for row in run.rows),
        "cut": sum(row.outcome == "failed" and row.ttft_s is not None for row in run.rows),
        "moves": sum(row.moves for row in run.rows),
        "moved_bytes": run.moved_bytes,
        "preemptions": run.preemptions,
        "evicted_blocks": run.evicted_blocks,
        "drift": run.drift,
        "rate": rules.rate if isinstance(rules, LoadRules) else rules.units / run.makespan_s,
        "work_tokens": sum(one.turn.work_tokens for one in planned),
        "work_done_ratio": work_done_ratio(run.rows, planned, horizon_s) if is_open else None,
        "working_set_ratio": working_set_tokens(run.rows, horizon_s) / kv_tokens,
    }


def hit_error_ratio(rows: Sequence[VirtualRow]) -> float | None:
    """Return the mean distance of predicted and realised hits, as parts of prompts; None without.

    Of the prompts with a first token that were computed where they decode.
    """
    found = [
        abs(row.estimated_hit_ratio - row.cached_tokens / row.prompt_tokens)
        for row in rows
        if row.ttft_s is not None and row.prefill is None
    ]
    return math.fsum(found) / len(found) if found else None


def ttft_error(rows: Sequence[VirtualRow]) -> dict[str, float | None]:
    """Return the distribution of the distance of predicted and realised TTFT, as a part of this.

    Of requests that were answered where they were first placed.
    """
    found = [
        abs(row.predicted_ttft_s / row.ttft_s - 1.0)
        for row in rows
        if row.ttft_s and row.predicted_ttft_s is not None and not (row.rejects or row.retries)
    ]
    return summary(found, *FIGURES)


def work_done_ratio(
    rows: Sequence[VirtualRow], planned: Sequence[Planned], horizon_s: float
) -> float:
    """Return the share of a load's work that was done by the horizon.

    Work is new tokens plus output tokens. A turn that was never sent, as the one before it was
    late, is work that was not done.
    """
    done = sum(
        row.new_tokens + row.output_tokens
        for row in rows
        if row.end_s is not None and row.end_s <= horizon_s
    )
    return done / max(1, sum(one.turn.work_tokens for one in planned))


def working_set_tokens(rows: Sequence[VirtualRow], horizon_s: float) -> float:
    """Return the tokens in the contexts of active sessions, mean over the horizon's second half.

    A session's context is its last prompt's; it counts until the session's last request ends.
    """
    start_s = horizon_s / 2
    last: dict[str, VirtualRow] = {}
    total = 0.0

    def add(row: VirtualRow, until_s: float) -> float:
        overlap_s = min(until_s, horizon_s) - max(row.arrival_s, start_s)
        return max(0.0, overlap_s) * row.prompt_tokens

    for row in sorted(rows, key=lambda r: r.arrival_s):
        before = last.get(row.session_id)
        if before is not None:
            total += add(before, row.arrival_s)
        last[row.session_id] = row
    total += sum(add(row, row.end_s or row.arrival_s) for row in last.values())
    return total / (horizon_s - start_s)
