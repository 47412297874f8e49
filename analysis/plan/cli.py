"""`analyze plan`: every policy on every load, and how it is printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain

from rich.console import Console

from analysis.bench.progress import Steps
from analysis.bench.runner import Experiment, Result, rows_of, workers
from analysis.league.fleet import engines, slower
from analysis.league.profiles import PROFILES
from analysis.league.simulate import PREFILL_THROUGHPUT
from analysis.plan import predictors
from analysis.plan.judge import PLANNERS, Judge, Plant
from analysis.plan.measured import CLAIRVOYANT, Run
from analysis.plan.options import PlanOptions
from analysis.plan.predictors import Judged
from analysis.plan.tables import print_plan, print_predictors
from analysis.plan.traffic import load_of
from replayer.arguments import InputError
from replayer.loads.load import Load
from replayer.terminal import Working


@dataclass(frozen=True, slots=True)
class Task:
    """All policies on one load, drawn by one seed, with one start-up delay."""

    load: str
    seed: int
    startup_s: float


class Judges:
    """Makes what plays a load; the last one is kept, with the fixed fleets that it has played."""

    def __init__(self, options: PlanOptions) -> None:
        self.options = options
        self._last: tuple[tuple[str, int], Judge] | None = None

    def of(self, load: str, seed: int) -> Judge:
        """What plays this load."""
        if self._last is None or self._last[0] != (load, seed):
            self._last = (load, seed), judge_of(self.options, load, seed)
        return self._last[1]


def run_plan(options: PlanOptions, progress: Callable[[int, int], None]) -> list[Run]:
    """Play all of them; runs do not depend on the number of processes."""
    for name in options.loads:  # what is wrong is said before the first run
        load = judge_of(options, name, options.first_seed).load
        options.fixed(load.min_replicas, load.max_replicas)
    tasks = [
        Task(name, seed, startup_s)
        for name in options.loads
        for seed in options.drawn
        for startup_s in options.startups_s
    ]
    here = Judges(options)
    with workers(min(options.jobs, len(tasks)), Judges, options, here) as compute:
        return list(chain.from_iterable(rows_of(compute(run_task, tasks), len(tasks), progress)))


def run_task(judges: Judges, task: Task) -> list[Run]:
    """Play all policies on one load."""
    judge = judges.of(task.load, task.seed)
    return list(_runs(judge, judges.options, task.startup_s))


def _runs(judge: Judge, options: PlanOptions, startup_s: float) -> Iterator[Run]:
    load = judge.load
    sizes = options.fixed(load.min_replicas, load.max_replicas)
    if CLAIRVOYANT in options.policies:
        yield from judge.search(startup_s, options.effort, options.attain).runs()
        sizes = list(range(load.min_replicas, load.max_replicas + 1))  # it has played them
    for replicas in sizes:
        yield judge.static(replicas, startup_s).run
    for policy in options.policies:
        if policy in PLANNERS:
            yield judge.planner(policy, startup_s).run


def judge_of(options: PlanOptions, name: str, seed: int) -> Judge:
    """Make what plays a load: with the SLO, the bounds and the engines that are asked for."""
    load = _bounded(load_of(name, seed, options.traces, options.thin), options)
    profile = PROFILES[options.profile]
    (engine,) = engines(1, options.kv_tokens, load.block_tokens, profile.kinds[0].options)
    longest = max(one.input_tokens + one.output_tokens for one in load.requests)
    if longest > engine.max_model_len:
        raise InputError(
            f"--kv-tokens: must be at least {longest}, the longest prompt of {load.name} with its "
            f"output, not {options.kv_tokens}"
        )
    plant = Plant(
        slower(engine, options.thin) if options.thin > 1 else engine,
        PREFILL_THROUGHPUT / options.thin,
        options.gpus,
        options.spread,
        math.inf if options.grace_s is None else options.grace_s,
        options.timeout_s,
        profile.reports_kv,
        profile.options,
    )
    return Judge(load, plant)


def _bounded(load: Load, options: PlanOptions) -> Load:
    if options.slo is not None:
        load = replace(load, slo_ttft_s=options.slo[0], slo_itl_s=options.slo[1])
    if options.most is None:
        return load
    least = min(load.min_replicas, options.most)
    first = min(load.initial_replicas, options.most)
    return replace(
        load, min_replicas=least, max_replicas=options.most, initial_replicas=max(least, first)
    )


TEXT = "Fleets that scale in virtual time: fixed ones, a search that knows the load, planners."


def judged_predictors(options: PlanOptions, working: Working) -> list[Judged]:
    """Judge predictors by the arrivals of every load, as far ahead as each start-up takes."""
    return [
        predictors.judge(load, predictor, options.interval_s, startup_s)
        for name in options.loads
        for seed in options.drawn
        for load in [load_of(name, seed, options.traces, options.thin)]
        for startup_s in options.startups_s
        for predictor in working.over(options.judged, f"predictors on {name}", len(options.judged))
    ]


def _perform(options: PlanOptions, console: Console) -> Result:
    options.check(tuple(PLANNERS))
    if options.judged:
        with Working("plan", "predictors") as working:
            found = judged_predictors(options, working)
        print_predictors(found, options.interval_s, console)
        return Result({"predictors": [asdict(one) for one in found]})
    runs = run_plan(options, Steps("plan"))
    said = print_plan(runs, options.gpus, console)
    return Result({"runs": [asdict(run) for run in runs], "headroom": said})


PLAN = Experiment(PlanOptions, _perform, text=TEXT)
declare, run = PLAN.declare, PLAN.run
