"""The regret of a policy against an oracle that tries every action at every HEAVY decision.

Mean regret is that of whole runs: (J of the policy - J of the oracle-controlled run) / J of the
oracle-controlled run, over seeds. All policies are compared with one oracle: the rollout over the
policy whose rollout has the lowest J. Also computed are the noise floor (the same figure for an
oracle that could only postpone by milliseconds) and, per decision, the saving of the best action.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from analysis.league.league import LeagueError, mean_and_interval
from analysis.league.scale import REGIMES, Bench, Scale
from analysis.league.simulate import EngineFleet, engines
from analysis.regret.oracle import JudgedDecision
from analysis.regret.run import MODES, RegretRun, RegretTask, run_regret
from analysis.regret.worker import call
from analysis.rivals.registry import BASELINE, RIVALS
from replayer.virtual.arrivals import LoadRules
from replayer.virtual.load import Source, load_source

WORST = 20
ORACLES = ("rollout",)


class RegretError(LeagueError):
    """A regret that cannot be computed as asked; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class RegretOptions:
    """The options of a regret; times in virtual seconds."""

    trace: Path
    instances: int = 4
    load: float = 0.8
    policies: tuple[str, ...] = ("cost", BASELINE)
    seeds: int = 3
    first_seed: int = 0
    regimes: tuple[str, ...] = tuple(REGIMES)
    decisions: int = 30
    futures: int = 4
    horizon_s: float = 60.0
    load_horizon_s: float = 900.0
    think_cap_s: float = 60.0
    timeout_s: float = 60.0
    jobs: int = 1
    given: Scale | None = None

    def check(self) -> None:
        """Raise RegretError for an unknown name or a number out of range."""
        for option, names, known in (
            ("policies", self.policies, RIVALS.keys()),
            ("regime", self.regimes, REGIMES.keys()),
        ):
            wrong = [name for name in names if name not in known]
            if wrong or not names:
                found = wrong[0] if wrong else "nothing"
                raise RegretError(f"--{option}: must be of {', '.join(known)}, not {found}")
        for option, value, least in (
            ("instances", self.instances, 2),
            ("seeds", self.seeds, 1),
            ("first-seed", self.first_seed, 0),
            ("decisions", self.decisions, 0),
            ("futures", self.futures, 1),
            ("jobs", self.jobs, 1),
        ):
            if value < least:
                raise RegretError(f"--{option}: must be at least {least}, not {value}")


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


def compute_regret(options: RegretOptions, progress: Callable[[int, int], None]) -> Regret:
    """Find the scales, then compute every run; the result does not depend on `jobs`."""
    options.check()
    source = load_source(options.trace)
    with ThreadPoolExecutor(options.jobs) as pool:
        if options.given is not None:
            scales = [options.given]
        else:
            bench = Bench(source, options.instances, _unit_rules(options), options.timeout_s)
            scales = list(pool.map(lambda name: call(REGIMES[name], bench), options.regimes))
        tasks = [task for scale in scales for task in _tasks(options, scale, source)]
        runs = []
        for run in pool.map(lambda task: call(run_regret, source, task), tasks):
            runs.append(run)
            progress(len(runs), len(tasks))
    return Regret(scales, runs)


def _unit_rules(options: RegretOptions) -> LoadRules:
    return LoadRules(1.0, options.load_horizon_s, think_cap_s=options.think_cap_s)


def _tasks(options: RegretOptions, scale: Scale, source: Source) -> Iterator[RegretTask]:
    same = engines(options.instances, scale.kv_tokens, source.block_tokens)
    fleet = EngineFleet(same, options.timeout_s, source.longest_tokens)
    for policy in options.policies:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            rate = options.load * scale.rate
            rules = LoadRules(rate, options.load_horizon_s, seed, options.think_cap_s)
            for mode in MODES:
                yield RegretTask(
                    policy,
                    scale.regime,
                    mode,
                    rules,
                    fleet,
                    options.decisions,
                    options.horizon_s,
                    options.futures,
                )


def regret_ratios(objectives_s: Sequence[float], oracle_s: Sequence[float]) -> list[float]:
    """Return J over the oracle's J, less one, per seed."""
    return [j / best - 1.0 for j, best in zip(objectives_s, oracle_s, strict=True)]


def summarise_regret(regret: Regret, options: RegretOptions) -> list[dict[str, Any]]:
    """Average over seeds or decisions, with intervals, per regime and policy."""
    made = []
    for scale in regret.scales:
        regime = scale.regime
        by_policy = {p: regret.objectives(regime, "rollout", p) for p in options.policies}
        oracle = min(by_policy, key=lambda policy: fmean(by_policy[policy]))
        for policy in options.policies:
            one = _summary(regret, regime, policy, oracle)
            made.append({"regime": regime, "policy": policy, "oracle": oracle, **one})
    return made


def _summary(regret: Regret, regime: str, policy: str, oracle: str) -> dict[str, Any]:
    objectives_s = regret.objectives(regime, "watch", policy)
    own_s = regret.objectives(regime, "rollout", policy)
    best_s = regret.objectives(regime, "rollout", oracle)
    placebo_s = regret.objectives(regime, "placebo", policy)
    decisions = [d for run in regret.found(regime, "watch", policy) for d in run.decisions]
    return {
        "objective_s": _interval(objectives_s),
        "oracle_objective_s": _interval(best_s),
        "mean_regret": _interval(regret_ratios(objectives_s, best_s)),
        "mean_regret_own_rollout": _interval(regret_ratios(objectives_s, own_s)),
        "noise_floor": _interval(regret_ratios(objectives_s, placebo_s)),
        "decisions": len(decisions),
        "decision_gap": _interval([d.gap_ratio for d in decisions]),
        "decision_gap_held_out": _interval(
            [gap for d in decisions if (gap := d.held_out_ratio) is not None]
        ),
        "decision_gap_noise_floor": _interval([d.floor_ratio for d in decisions]),
        "ttft_s": _times(regret.found(regime, "watch", policy)),
        "ttft_s_own_rollout": _times(regret.found(regime, "rollout", policy)),
        "failures": sum(run.row["failures"] for run in regret.found(regime, "watch", policy)),
        "mix": dict(Counter(d.chosen.action.kind(d.home) for d in decisions)),
        "oracle_mix": dict(Counter(d.best.action.kind(d.home) for d in decisions)),
        "missed": missed(decisions),
    }


def _interval(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return dict(zip(("mean", "low", "high"), mean_and_interval(values), strict=True))


def _times(runs: Sequence[RegretRun]) -> dict[str, float | None]:
    """Average TTFT percentiles over seeds; None if any seed's is infinite."""
    found: dict[str, float | None] = {}
    for name in ("p50", "p90"):
        values = [run.row["ttft_s"][name] for run in runs]
        found[name] = None if None in values else fmean(values)
    return found


def missed(decisions: Sequence[JudgedDecision]) -> list[dict[str, Any]]:
    """Group the decisions in which the oracle chose another action, by kinds of both.

    The largest sum of gaps comes first. The held-out gap of a group is biased upwards, because its
    kind was chosen on all futures.
    """
    groups: dict[tuple[str, str], list[JudgedDecision]] = {}
    for one in decisions:
        if one.best is not one.chosen:
            kinds = one.chosen.action.kind(one.home), one.best.action.kind(one.home)
            groups.setdefault(kinds, []).append(one)
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


def document(regret: Regret, options: RegretOptions) -> dict[str, Any]:
    """Return the JSON form; null is infinite, unknown or absent."""
    return {
        "trace": options.trace.name,
        "instances": options.instances,
        "load": options.load,
        "horizon_s": options.horizon_s if options.horizon_s < float("inf") else None,
        "futures": options.futures,
        "load_horizon_s": options.load_horizon_s,
        "objective": "mean e2e + 10 s * share of requests that miss the SLO",
        "regimes": [asdict(scale) for scale in regret.scales],
        "summary": summarise_regret(regret, options),
        "runs": [run.row for run in regret.runs],
        "decisions": [
            {**_where(run), **decision.as_dict()}
            for run in regret.runs
            if run.row["mode"] == "watch"
            for decision in run.decisions
        ],
    }


def _where(run: RegretRun) -> dict[str, Any]:
    return {name: run.row[name] for name in ("regime", "policy", "seed")}
