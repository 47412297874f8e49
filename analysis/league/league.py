"""The league: every policy on the same trace, fleet, loads and seeds, in virtual time.

Rows are computed by worker processes that share nothing; each row depends on its task alone, so
the result does not depend on their number.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.league.fleet import EngineFleet, Scale, engines
from analysis.league.perturbations import PERTURBATIONS
from analysis.league.scale import REGIMES, Bench
from analysis.league.simulate import Task, run_task
from analysis.rivals.registry import BASELINE, RIVALS
from replayer.arguments import InputError
from replayer.virtual.arrivals import LoadRules
from replayer.virtual.load import Source, load_source

GC_OBJECTS = 200_000


class LeagueError(InputError):
    """The league cannot be run as asked; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class LeagueOptions:
    """The options of a league; times in virtual seconds."""

    trace: Path
    instances: int = 8
    loads: tuple[float, ...] = (0.5, 0.8, 1.0)
    policies: tuple[str, ...] = tuple(RIVALS)
    seeds: int = 3
    first_seed: int = 0
    regimes: tuple[str, ...] = tuple(REGIMES)
    perturbations: tuple[str, ...] = ("none",)
    horizon_s: float = 900.0
    think_cap_s: float = 60.0
    timeout_s: float = 60.0
    jobs: int = 1
    given: Scale | None = None
    """A scale of an earlier run, instead of a search for the scales of `regimes`."""

    def check(self) -> None:
        """Raise LeagueError for an unknown name."""
        for option, names, known in (
            ("policies", self.policies, RIVALS.keys()),
            ("regime", self.regimes, REGIMES.keys()),
            ("perturb", self.perturbations, PERTURBATIONS.keys()),
        ):
            wrong = [name for name in names if name not in known]
            if wrong:
                raise LeagueError(f"--{option}: must be of {', '.join(known)}, not {wrong[0]}")


_source: Source | None = None


def _start_worker(trace: Path) -> None:
    global _source  # noqa: PLW0603 - a worker process reads its trace once
    _source = load_source(trace)
    # A run makes few cycles, and many objects that live to its end: saves a tenth of the time.
    gc.freeze()
    gc.set_threshold(GC_OBJECTS, 50, 100)


def _scale(job: tuple[str, LeagueOptions]) -> Scale:
    regime, options = job
    return REGIMES[regime](_bench(options))


def _bench(options: LeagueOptions) -> Bench:
    if _source is None:
        raise RuntimeError("no trace was read")
    rules = LoadRules(1.0, options.horizon_s, think_cap_s=options.think_cap_s)
    return Bench(_source, options.instances, rules, options.timeout_s)


def _row(task: Task) -> dict[str, Any]:
    if _source is None:
        raise RuntimeError("no trace was read")
    return run_task(_source, task)


@dataclass(frozen=True, slots=True)
class League:
    """The results: one scale per regime, one row of figures per task."""

    scales: list[Scale]
    rows: list[dict[str, Any]]

    def document(self, options: LeagueOptions) -> dict[str, Any]:
        """Return the JSON form; null is infinite or absent."""
        return {
            "trace": options.trace.name,
            "instances": options.instances,
            "horizon_s": options.horizon_s,
            "think_cap_s": options.think_cap_s,
            "timeout_s": options.timeout_s,
            "baseline": BASELINE,
            "regimes": [
                {
                    "regime": one.regime,
                    "saturation_rate": one.rate,
                    "kv_tokens_per_engine": round(one.kv_tokens),
                    "working_set_tokens": round(one.working_set_tokens),
                }
                for one in self.scales
            ],
            "rows": self.rows,
        }


def run_league(options: LeagueOptions, progress: Callable[[int, int], None]) -> League:
    """Find the scales, then compute every row."""
    options.check()
    _start_worker(options.trace)
    # Spawned, not forked: workers share nothing of this process but the arguments.
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, _start_worker, (options.trace,)) as pool:
        scales = (
            [options.given]
            if options.given is not None
            else pool.map(_scale, [(regime, options) for regime in options.regimes], 1)
        )
        tasks = [task for scale in scales for task in _tasks(options, scale)]
        rows = []
        for row in pool.imap(_row, tasks, 1):
            rows.append(row)
            progress(len(rows), len(tasks))
    return League(scales, rows)


def _tasks(options: LeagueOptions, scale: Scale) -> Iterator[Task]:
    if _source is None:
        raise RuntimeError("no trace was read")
    same = engines(options.instances, scale.kv_tokens, _source.block_tokens)
    usual = EngineFleet(same, options.timeout_s, _source.longest_tokens)
    for load in options.loads:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            rules = LoadRules(load * scale.rate, options.horizon_s, seed, options.think_cap_s)
            for perturb in options.perturbations:
                changed, fleet = PERTURBATIONS[perturb](rules, usual)
                for policy in options.policies:
                    yield Task(policy, load, scale.regime, perturb, changed, fleet)
