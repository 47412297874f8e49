"""A decision in plain words: what was done, what would have been better, and why one could know."""

from __future__ import annotations

from analysis.regret_actions import Action, View
from analysis.regret_probe import Decision

IDLE_S = 0.05
"""A shorter queue is none."""


def explain(seed: int, decision: Decision) -> str:
    """One line."""
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


def _done(decision: Decision, action: Action) -> str:
    views = {one.name: one for one in decision.views}
    kind = action.kind(decision.home)
    d = views[action.decode]
    if action.prefill is None:
        where = {"colocate": "colocated at home on", "rehome": "moved to", "place": "placed on"}
        return f"{where[kind]} {_state(d)}"
    p = views[action.prefill]
    to = f"for home {d.name}" if d.name == decision.home else f"and handed to {d.name}"
    who = f"home {_state(p)}" if p.name == decision.home else _state(p)
    return f"{kind}, computed by {who}, {to} ({d.streams} streams)"


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
