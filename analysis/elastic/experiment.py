"""The founding experiment: offload rules in a closed loop of sessions, in virtual time.

Every rule serves the same sessions in the same slots on the same placement: a session stays where
it began. So two rows of a load differ by the offloads alone. `cost` also places by its own prices.
Loads are numbers of sessions at a time. A client gives up when no first token has come within its
time limit.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from analysis.bench.finished import Finished, goodput_ratio, of_virtual, times
from analysis.bench.options import flag, named
from analysis.bench.runner import rows_of, workers
from analysis.elastic.readings import BASELINE, READINGS, RULES
from analysis.league.profiles import PROFILES
from analysis.league.simulate import run_rival
from proxy.core.latency.slo import Slo
from proxy.core.types import RouteClass
from replayer.arguments import (
    InputError,
    count,
    names,
    not_negative,
    positive,
    positive_count,
)
from replayer.engine.types import EngineOptions
from replayer.virtual.arrivals import SlotRules, plan_slots
from replayer.virtual.load import Source, load_source
from replayer.virtual.requests import VirtualRow

PERCENTS = ("p50", "p90")
COMPARED = (BASELINE, "always", "seed-heuristic", "seed-cost", "cost")
UNITS_PER_SLOT = 4
"""Sessions per slot, at least; a load also has every session of the trace once, at least."""


class ElasticError(InputError):
    """The experiment cannot be run as asked; the text is one line for the user."""


SAMPLE = Path(str(files("replayer") / "data" / "agentic_sample.trace.jsonl.gz"))


def _sessions(text: str) -> tuple[int, ...]:
    values = tuple(positive_count(part) for part in names(text))
    if not values:
        raise argparse.ArgumentTypeError("must be integers >= 1, comma separated")
    return values


@dataclass(frozen=True, slots=True)
class ElasticOptions:
    """The options of the experiment; `sessions` is its loads, times are virtual seconds."""

    trace: Path = flag(Path, "trace file with sessions", SAMPLE, name="")
    profile: str = flag(str, f"one of the league's: {', '.join(PROFILES)}", "h100")
    instances: int = flag(positive_count, "engines", 4)
    sessions: tuple[int, ...] = flag(
        _sessions, "loads: sessions at a time, comma separated", (2, 8, 32)
    )
    rules: tuple[str, ...] = flag(
        names,
        f"names of the league's policies, or of {', '.join(READINGS)}, comma separated",
        COMPARED,
    )
    seeds: int = flag(positive_count, "runs per rule and load", 3)
    first_seed: int = flag(count, "lowest of the seeds, which are consecutive", 0)
    think_cap_s: float = flag(not_negative, "longest pause between two turns, seconds", 10.0)
    timeout_s: float = flag(
        positive, "seconds to the first token after which a request fails", 60.0
    )
    tpot_slo_s: float = flag(positive, "TPOT target of the router and of goodput, seconds", 0.05)
    kv_tokens: int = flag(
        positive_count,
        "KV of an engine",
        EngineOptions().num_blocks * EngineOptions().block_size,
    )
    jobs: int = flag(positive_count, "worker processes", 1, shown=os.cpu_count() or 1)
    runs: Sequence[Path] | None = flag(
        Path,
        "a finished run of replay --mode sessions, instead of virtual ones; may be repeated",
        None,
        name="run",
        action="append",
        metavar="DIR",
    )
    json: Path | None = flag(Path, "file for all rows", None)

    def check(self) -> None:
        """Raise ElasticError for an unknown name, or a fleet in which nothing can be offloaded."""
        named("profile", (self.profile,), PROFILES, ElasticError)
        named("rules", self.rules or ("nothing",), RULES, ElasticError)
        if self.instances < 2:
            raise ElasticError(f"--instances: must be at least 2, not {self.instances}")


@dataclass(frozen=True, slots=True)
class Task:
    """The runs of all rules on one load: a number of sessions at a time, and a seed."""

    sessions: int
    seed: int


def read_sessions(options: ElasticOptions) -> Source:
    """Read the trace in blocks of the profile's size."""
    return load_source(options.trace, PROFILES[options.profile].block_tokens)


def check_source(source: Source, options: ElasticOptions) -> None:
    """Raise ElasticError for a trace without sessions, or with prompts beyond an engine's KV."""
    if not source.replicable:
        raise ElasticError(f"{options.trace}: must have sessions (session_id)")
    if source.longest_tokens > options.kv_tokens:
        raise ElasticError(
            f"--kv-tokens: must be at least {source.longest_tokens}, the longest prompt with its "
            f"output, not {options.kv_tokens}"
        )


def run_task(source: Source, options: ElasticOptions, task: Task) -> list[dict[str, Any]]:
    """Simulate every rule on a load and return their rows."""
    units = max(len(source.units), UNITS_PER_SLOT * task.sessions)
    planned = plan_slots(source, SlotRules(task.sessions, units, task.seed, options.think_cap_s))
    usual = PROFILES[options.profile].fleet(
        source, options.instances, options.kv_tokens, options.timeout_s
    )
    fleet = replace(usual, options={**usual.options, "tpot_slo_s": options.tpot_slo_s})
    slo = Slo(tpot_s=options.tpot_slo_s)
    runs = {
        rule: run_rival(RULES[rule], planned, fleet, source.block_tokens) for rule in options.rules
    }
    at_home = runs[BASELINE].rows if BASELINE in runs else None
    rows = []
    for rule, run in runs.items():
        answered = [row for row in run.rows if row.ttft_s is not None]
        computed = sum(row.computed_tokens for row in answered)
        rows.append(
            {
                "rule": rule,
                "sessions": task.sessions,
                "seed": task.seed,
                **figures([of_virtual(row, slo) for row in run.rows]),
                "makespan_s": run.makespan_s,
                "hit_ratio": 1.0 - computed / max(1, sum(row.prompt_tokens for row in answered)),
                "fallbacks": sum(row.fallback is not None for row in run.rows),
                "drift": run.drift,
                "beside_home": None if at_home is None else beside_home(run.rows, at_home),
            }
        )
    return rows


def beside_home(rows: Sequence[VirtualRow], at_home: Sequence[VirtualRow]) -> dict[str, Any]:
    """Compare the offloaded requests with the same ones computed at home, and the others' TTFT.

    Sums over the requests that have a first token in both runs: `ttft_s` and `computed_tokens` of
    the offloaded ones, with those at home, and what all other requests wait longer.
    """
    both = [
        (one, home)
        for one, home in zip(rows, at_home, strict=True)
        if one.ttft_s is not None and home.ttft_s is not None
    ]
    offloaded = [pair for pair in both if pair[0].route_class == RouteClass.HEAVY_P2P]
    later_s = [(one.ttft_s or 0.0) - (home.ttft_s or 0.0) for one, home in both]
    moved_s = [(one.ttft_s or 0.0) - (home.ttft_s or 0.0) for one, home in offloaded]
    return {
        "offloaded": len(offloaded),
        "ttft_s": math.fsum(one.ttft_s or 0.0 for one, _home in offloaded),
        "ttft_at_home_s": math.fsum(home.ttft_s or 0.0 for _one, home in offloaded),
        "computed_tokens": sum(one.computed_tokens for one, _home in offloaded),
        "computed_tokens_at_home": sum(home.computed_tokens for _one, home in offloaded),
        "others": len(both) - len(offloaded),
        "others_later_s": math.fsum(later_s) - math.fsum(moved_s),
    }


def figures(rows: Sequence[Finished]) -> dict[str, Any]:
    """Compute a run's figures; times in seconds.

    A failed request is infinitely late in TTFT and E2E, which is None here. `ttft_ok_s` is of the
    requests that succeeded, as the founding text reports it. `heavy_reasons`: the reasons of the
    HEAVY requests that were computed where they decode, with their numbers.
    """
    offloaded = sum(row.route_class == RouteClass.HEAVY_P2P for row in rows)
    stayed = [row.reason for row in rows if row.route_class == RouteClass.HEAVY_COLO]
    return {
        "requests": len(rows),
        "success_ratio": sum(row.ok for row in rows) / max(1, len(rows)),
        "goodput_ratio": goodput_ratio(rows),
        "ttft_s": times(rows, "ttft_s", *PERCENTS),
        "ttft_ok_s": times(rows, "ttft_s", *PERCENTS, answered=True),
        "tpot_s": times(rows, "tpot_s", *PERCENTS, answered=True),
        "e2e_s": times(rows, "e2e_s", *PERCENTS),
        "heavy": offloaded + len(stayed),
        "heavy_offloaded": offloaded,
        "heavy_reasons": dict(Counter(stayed).most_common()),
    }


def _rows(run: tuple[Source, ElasticOptions], task: Task) -> list[dict[str, Any]]:
    return run_task(*run, task)


def _read_run(options: ElasticOptions) -> tuple[Source, ElasticOptions]:
    return read_sessions(options), options


def run_elastic(
    options: ElasticOptions, progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Run every rule at every load and seed; rows do not depend on the number of processes."""
    options.check()
    source = read_sessions(options)
    check_source(source, options)
    tasks = [
        Task(sessions, seed)
        for sessions in options.sessions
        for seed in range(options.first_seed, options.first_seed + options.seeds)
    ]
    with workers(options.jobs, _read_run, options, (source, options)) as compute:
        rows = rows_of(compute(_rows, tasks), len(tasks), progress)
    return list(chain.from_iterable(rows))
