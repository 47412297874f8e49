"""The figures of a regret: means over seeds with intervals, missed actions, worst decisions.

Mean regret is that of whole runs: (J of the policy - J of the oracle-controlled run) / J of the
oracle-controlled run, over seeds. All policies are compared with one oracle: the rollout over the
policy whose rollout has the lowest J.

A run's J is also a matter of luck. `mean_regret_repeated`: mean over a seed's repetitions instead
of the policy's single run. `standard_error`: its uncertainty by their spread. `above_floor`: the
oracle vs its placebo, seed by seed, that is its gain by better actions rather than by more tries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum, isfinite, sqrt
from statistics import fmean, stdev
from typing import Any

from analysis.bench.stats import figure, mean_and_interval
from analysis.league.fleet import Scale
from analysis.measures import grouped
from analysis.regret.outcomes import JudgedDecision, RegretRun

WORST = 20


@dataclass(frozen=True, slots=True)
class Regret:
    """The results: one run per policy, regime, seed and mode."""

    scales: list[Scale]
    runs: list[RegretRun]

    def found(self, regime: str, mode: str, policy: str) -> list[RegretRun]:
        """Return the runs of a regime, mode and policy, one per seed."""
        key = regime, mode, policy
        return [r for r in self.runs if (r.row["regime"], r.row["mode"], r.row["policy"]) == key]

    def objectives(self, regime: str, mode: str, policy: str) -> list[float]:
        """Return J of these runs, in seconds, by seed."""
        return [run.row["objective_s"] for run in self.found(regime, mode, policy)]


def standard_error(repeated_s: Sequence[Sequence[float]]) -> float | None:
    """Return what chance leaves uncertain in the mean over seeds of J, as a part of J.

    Its parts are the seeds' means over their repetitions. None with one run per seed.
    """
    if any(len(one) < 2 for one in repeated_s):
        return None
    errors = [stdev(one) / fmean(one) / sqrt(len(one)) for one in repeated_s]
    return sqrt(fsum(error * error for error in errors)) / len(errors)


def regret_ratios(objectives_s: Sequence[float], oracle_s: Sequence[float]) -> list[float]:
    """Return J over the oracle's J, minus one, per seed."""
    return [j / best - 1.0 for j, best in zip(objectives_s, oracle_s, strict=True)]


def summarise_regret(regret: Regret, policies: Sequence[str]) -> list[dict[str, Any]]:
    """Average over seeds or decisions, with intervals, per regime and policy."""
    made = []
    for scale in regret.scales:
        regime = scale.regime
        by_policy = {p: regret.objectives(regime, "rollout", p) for p in policies}
        oracle = min(by_policy, key=lambda policy: fmean(by_policy[policy]))
        for policy in policies:
            one = _summary(regret, regime, policy, oracle)
            made.append({"regime": regime, "policy": policy, "oracle": oracle, **one})
    return made


def _summary(regret: Regret, regime: str, policy: str, oracle: str) -> dict[str, Any]:
    objectives_s = regret.objectives(regime, "watch", policy)
    own_s = regret.objectives(regime, "rollout", policy)
    best_s = regret.objectives(regime, "rollout", oracle)
    luck_s = regret.objectives(regime, "placebo", policy)
    watched = regret.found(regime, "watch", policy)
    repeated_s = [[run.row["objective_s"], *run.row["repeated_s"]] for run in watched]
    decisions = [d for run in watched for d in run.decisions]
    return {
        "objective_s": _interval(objectives_s),
        "oracle_objective_s": _interval(best_s),
        "mean_regret": _interval(regret_ratios(objectives_s, best_s)),
        "mean_regret_own_rollout": _interval(regret_ratios(objectives_s, own_s)),
        "noise_floor": _interval(regret_ratios(objectives_s, luck_s)),
        "above_floor": _interval(regret_ratios(luck_s, own_s)),
        "mean_regret_repeated": _interval(regret_ratios(list(map(fmean, repeated_s)), best_s)),
        "standard_error": standard_error(repeated_s),
        "decisions": len(decisions),
        "decision_gap": _interval([d.gap_ratio for d in decisions]),
        "decision_gap_held_out": _interval(
            [gap for d in decisions if (gap := d.held_out_ratio) is not None]
        ),
        "decision_gap_noise_floor": _interval([d.floor_ratio for d in decisions]),
        "ttft_s": _times(watched),
        "ttft_s_own_rollout": _times(regret.found(regime, "rollout", policy)),
        "failures": sum(run.row["failures"] for run in watched),
        "mix": dict(Counter(d.chosen.action.kind(d.home) for d in decisions)),
        "oracle_mix": dict(Counter(d.best.action.kind(d.home) for d in decisions)),
        "missed": missed(decisions),
    }


def sentences(summary: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Say in a line per policy and regime how far it is from the oracle."""
    for one in summary:
        regret, above = one["mean_regret"], one["above_floor"]
        if regret is not None:
            beyond = "" if above is None else f", {above['mean']:+.1%} above the noise floor"
            yield (
                f"{one['policy']}: mean regret {regret['mean']:+.1%} to the oracle{beyond} "
                f"({one['regime']})"
            )


def _interval(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return dict(zip(("mean", "low", "high"), mean_and_interval(values), strict=True))


def _times(runs: Sequence[RegretRun]) -> dict[str, float | None]:
    """Average TTFT percentiles over seeds; None if any seed's is infinite."""
    means = {n: fmean(figure(run.row, f"ttft_s.{n}") for run in runs) for n in ("p50", "p90")}
    return {name: mean if isfinite(mean) else None for name, mean in means.items()}


def missed(decisions: Sequence[JudgedDecision]) -> list[dict[str, Any]]:
    """Group the decisions in which the oracle chose another action, by kinds of both.

    The largest sum of gaps comes first. The held-out gap of a group is biased upwards, because its
    kind was chosen on all futures.
    """
    groups = grouped(
        (one for one in decisions if one.best is not one.chosen),
        lambda one: (one.chosen.action.kind(one.home), one.best.action.kind(one.home)),
    )
    made = [
        {
            "chosen": chosen,
            "best": best,
            "decisions": len(part),
            "gap_s": sum(d.gap_s for d in part),
            "own_ttft_gap_s": fmean(d.own_gap_s for d in part),
            "held_out": _interval([r for d in part if (r := d.held_out_ratio) is not None]),
        }
        for (chosen, best), part in groups.items()
    ]
    return sorted(made, key=lambda one: -one["gap_s"])


def worst(regret: Regret, regime: str, policy: str) -> list[tuple[int, JudgedDecision]]:
    """Return the decisions with the largest gaps in seconds, with their seeds."""
    runs = regret.found(regime, "watch", policy)
    found = [(run.row["seed"], d) for run in runs for d in run.decisions if d.gap_s > 0.0]
    return sorted(found, key=lambda one: -one[1].gap_s)[:WORST]
