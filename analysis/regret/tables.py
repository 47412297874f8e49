"""The tables of `analyze regret`, and descriptions of the worst decisions.

A description gives the action taken, the better one, and the state of their instances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from analysis.bench.tables import say, table
from analysis.regret.actions import Action, View
from analysis.regret.outcomes import JudgedDecision
from analysis.regret.summary import Regret, summarise_regret, worst
from analysis.rivals.registry import BASELINE

IDLE_S = 0.05
"""A shorter wait is described as no queue."""


def explain(seed: int, decision: JudgedDecision) -> str:
    """Describe a decision in one line."""
    d, best = decision, decision.best
    others_s = d.gap_s - d.own_gap_s
    return (
        f"seed {seed}, {d.at_s:.1f} s, request {d.request} of {d.session_id}, "
        f"{d.prompt_tokens:,} tokens: {_done(d, d.chosen.action)}: TTFT "
        f"{_seconds(d.predicted_ttft_s)} predicted, {_seconds(d.chosen.own_ttft_s)} realised, "
        f"J {d.chosen.objective_s:.2f}. Better: {_done(d, best.action)}: TTFT "
        f"{_seconds(best.own_ttft_s)}, J {best.objective_s:.2f}. Gap {d.gap_s:.1f} s over "
        f"{d.chosen.outcomes[0].requests} requests (own TTFT {d.own_gap_s:+.1f}, "
        f"rest {others_s:+.1f}), {d.gap_ratio:.1%}, noise floor {d.floor_ratio:.1%}"
    )


def _done(decision: JudgedDecision, action: Action) -> str:
    views = {one.name: one for one in decision.views}
    kind = action.kind(decision.home)
    d = views[action.decode]
    if action.prefill is None:
        where = {"colocate": "colocated at home on", "rehome": "moved to", "place": "placed on"}
        return f"{where[kind]} {_state(d)}"
    p = views[action.prefill]
    to = f"for home {d.name}" if d.name == decision.home else f"and handed to {d.name}"
    prefiller = f"home {_state(p)}" if p.name == decision.home else _state(p)
    return f"{kind}, computed by {prefiller}, {to} ({d.streams} streams)"


def _state(one: View) -> str:
    wait_s = max(one.queue_s, one.room_s)
    if wait_s > IDLE_S:
        cause = "of queue" if one.queue_s >= one.room_s else "until KV is free"
        queue = f"behind {wait_s:.1f} s {cause}"
    else:
        queue = "without a queue"
    return (
        f"{one.name} {queue}, {one.new_tokens:,} tokens to compute "
        f"({one.hit_tokens:,} cached), beside {one.streams} streams"
    )


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f} s"


EXPLAINED = (
    "J: mean e2e + 10 s * share of requests that miss the SLO, over whole runs; regret: J over the "
    "oracle's, less one; own: over the rollout of the same policy; noise floor: what an oracle "
    "gains that may only postpone by milliseconds; above floor: what the oracle gains beyond that; "
    "repeated: regret of the mean over a seed's repetitions, which differ by a millisecond of way; "
    "error: the standard error that they leave. Gap: what the best action at one decision would "
    "have saved of what its branch costs; held out: chosen on other futures than judged on. "
    "Means [95 % bootstrap interval]"
)


def print_regret(regret: Regret, policies: Sequence[str], console: Console) -> None:
    """Print all tables."""
    console.print(EXPLAINED, soft_wrap=True, markup=False)
    summary = summarise_regret(regret, policies)
    for scale in regret.scales:
        part = [one for one in summary if one["regime"] == scale.regime]
        console.print(
            f"{scale.regime}: load 1.0 is {scale.rate:.4g} session starts/s, KV "
            f"{scale.kv_tokens:,.0f} tokens per engine; oracle: rollout over {part[0]['oracle']}",
            soft_wrap=True,
            markup=False,
        )
        console.print(_regrets(part))
        console.print(_chance(part))
        console.print(_gains(part))
        for one in part:
            console.print(_misses(one))
            _print_worst(regret, one, console)


def _regrets(part: list[dict[str, Any]]) -> Table:
    made = table(
        "Regret",
        [
            "policy",
            "J s",
            "oracle J s",
            "mean regret %",
            "own %",
            "noise floor %",
            "decisions",
            "gap %",
            "held out %",
            "gap's floor %",
        ],
    )
    for one in part:
        made.add_row(
            one["policy"],
            _interval(one["objective_s"]),
            _interval(one["oracle_objective_s"]),
            _interval(one["mean_regret"], 100.0),
            _interval(one["mean_regret_own_rollout"], 100.0),
            _interval(one["noise_floor"], 100.0),
            str(one["decisions"]),
            _interval(one["decision_gap"], 100.0),
            _interval(one["decision_gap_held_out"], 100.0),
            _interval(one["decision_gap_noise_floor"], 100.0),
        )
    return made


def _chance(part: list[dict[str, Any]]) -> Table:
    """Tabulate what of the regret is left when luck is taken out of it."""
    made = table("Regret beside chance", ["policy", "above floor %", "repeated %", "error %"])
    for one in part:
        error = one["standard_error"]
        made.add_row(
            one["policy"],
            _interval(one["above_floor"], 100.0),
            _interval(one["mean_regret_repeated"], 100.0),
            "-" if error is None else f"{100.0 * error:.2f}",
        )
    return made


def _gains(part: list[dict[str, Any]]) -> Table:
    """Tabulate TTFT without and with the oracle, and its change against the baseline."""
    base = next((one["ttft_s"] for one in part if one["policy"] == BASELINE), None)
    made = table(f"TTFT p50/p90 s, and change against {BASELINE}", ["run", "TTFT", "change %"])
    for one in part:
        for name, key in (("", "ttft_s"), ("rollout over ", "ttft_s_own_rollout")):
            made.add_row(name + one["policy"], _pair(one[key]), _change(one[key], base))
    return made


def _misses(one: dict[str, Any]) -> Table:
    mix = ", ".join(f"{kind} {n}" for kind, n in sorted(one["mix"].items()))
    best = ", ".join(f"{kind} {n}" for kind, n in sorted(one["oracle_mix"].items()))
    made = table(
        f"{one['policy']} did: {mix or 'nothing'}; the oracle: {best or 'nothing'}",
        ["did", "better", "decisions", "sum of gaps s", "own TTFT s", "held out %"],
    )
    for kind in one["missed"]:
        made.add_row(
            kind["chosen"],
            kind["best"],
            str(kind["decisions"]),
            f"{kind['gap_s']:,.0f}",
            f"{kind['own_ttft_gap_s']:+.2f}",
            _interval(kind["held_out"], 100.0),
        )
    return made


def _print_worst(regret: Regret, one: dict[str, Any], console: Console) -> None:
    found = worst(regret, one["regime"], one["policy"])
    console.print(f"{one['policy']}: the {len(found)} worst decisions", markup=False)
    for number, (seed, decision) in enumerate(found, start=1):
        line = f"{number:2}. {explain(seed, decision)}"
        say(console, line)


def _interval(found: dict[str, float] | None, factor: float = 1.0) -> str:
    if found is None:
        return "-"
    mean, low, high = (found[name] * factor for name in ("mean", "low", "high"))
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]" if math.isfinite(mean) else "inf"


def _pair(times: dict[str, float | None]) -> str:
    return "/".join("inf" if v is None else f"{v:.2f}" for v in times.values())


def _change(times: dict[str, float | None], base: dict[str, float | None] | None) -> str:
    if base is None:
        return "-"
    parts = []
    for name, value in times.items():
        other = base[name]
        parts.append("-" if not value or not other else f"{100.0 * (value / other - 1.0):+.0f}")
    return "/".join(parts)
