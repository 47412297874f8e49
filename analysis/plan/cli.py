"""`analyze plan`: every policy on every load, and how it is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain

from rich.console import Console

from analysis.bench.progress import Steps
from analysis.bench.runner import Experiment, Result, rows_of, workers
from analysis.league.fleet import engines, slower
from analysis.league.profiles import PROFILES
from analysis.league.simulate import PREFILL_THROUGHPUT
from analysis.plan.judge import PLANNERS, Judge, Plant
from analysis.plan.measured import CLAIRVOYANT, Run
from analysis.plan.options import PlanOptions
from analysis.plan.tables import print_plan
from analysis.plan.traffic import load_of
from replayer.arguments import InputError
from replayer.loads.load import Load


@dataclass(frozen=True, slots=True)
class Task:
    """All policies on one load, drawn by one seed."""

    load: str
    seed: int


def run_plan(options: PlanOptions, progress: Callable[[int, int], None]) -> list[Run]:
    """Play all of them; runs do not depend on the number of processes."""
    options.check(tuple(PLANNERS))
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    tasks = [Task(name, seed) for name in options.loads for seed in seeds]
    for name in options.loads:  # what is wrong is said before the first run
        load = judge_of(options, Task(name, seeds[0])).load
        options.fixed(load.min_replicas, load.max_replicas)
    with workers(min(options.jobs, len(tasks)), _itself, options, options) as compute:
        return list(chain.from_iterable(rows_of(compute(run_task, tasks), len(tasks), progress)))


def _itself(options: PlanOptions) -> PlanOptions:
    return options


def run_task(options: PlanOptions, task: Task) -> list[Run]:
    """Play all policies on one load."""
    judge = judge_of(options, task)
    return [run for startup_s in options.startups_s for run in _runs(judge, options, startup_s)]


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


def judge_of(options: PlanOptions, task: Task) -> Judge:
    """Make what plays a load: with the SLO, the bounds and the engines that are asked for."""
    load = _bounded(load_of(task.load, task.seed, options.traces, options.thin), options)
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


def _perform(options: PlanOptions, console: Console) -> Result:
    runs = run_plan(options, Steps("plan"))
    said = print_plan(runs, options.gpus, console)
    return Result({"runs": [asdict(run) for run in runs], "headroom": said})


PLAN = Experiment(PlanOptions, _perform, text=TEXT)
declare, run = PLAN.declare, PLAN.run
