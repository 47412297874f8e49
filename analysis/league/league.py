"""The league: every policy on the same trace, fleet, loads and seeds, in virtual time.

Worker processes compute the rows. A row depends only on its task, so the result does not depend on
their number. The tables show means over seeds with bootstrap intervals; `--json` writes the rows.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from analysis.league.perturbations import PERTURBATIONS
from analysis.league.scale import REGIMES, Bench, Scale
from analysis.league.simulate import EngineFleet, Task, engines, run_task
from analysis.rivals.registry import BASELINE, RIVALS
from replayer.virtual.arrivals import LoadRules
from replayer.virtual.load import Source, load_source

GC_OBJECTS = 200_000
RESAMPLES = 1000
INTERVAL_PERCENT = 95


class LeagueError(ValueError):
    """A league that cannot be run as asked; the text is one line for the user."""


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


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Average over seeds, per regime, perturbation, load and policy, best goodput first."""
    groups: dict[tuple[str, str, float, str], list[dict[str, Any]]] = {}
    for row in rows:
        key = row["regime"], row["perturb"], row["load"], row["policy"]
        groups.setdefault(key, []).append(row)
    made = [
        {
            **dict(zip(("regime", "perturb", "load", "policy"), key, strict=True)),
            **{name: mean_and_interval([_get(row, name) for row in part]) for name in FIGURES},
        }
        for key, part in groups.items()
    ]
    made.sort(key=lambda one: (one["regime"], one["perturb"], one["load"], _rank(one)))
    return made


def _rank(one: dict[str, Any]) -> tuple[float, float]:
    return -one["goodput_ratio"][0], one["ttft_s.p90"][0]


def _get(row: dict[str, Any], name: str) -> float:
    value: Any = row
    for part in name.split("."):
        value = value[part]
    return math.inf if value is None else float(value)


def mean_and_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its percentile bootstrap interval; infinite if any value is."""
    found = np.asarray(values, dtype=float)
    if not np.isfinite(found).all():
        return math.inf, float(found.min()), math.inf
    draws = np.random.default_rng(0).choice(found, size=(RESAMPLES, len(found))).mean(axis=1)
    tail = (100 - INTERVAL_PERCENT) / 2
    low, high = np.percentile(draws, [tail, 100 - tail])
    return float(found.mean()), float(low), float(high)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table: figures joined by a slash; `interval` adds that of the first."""

    title: str
    figures: tuple[str, ...]
    factor: float = 1.0
    digits: int = 2
    interval: bool = False


COLUMNS = (
    Column("goodput %", ("goodput_ratio",), 100.0, 1, interval=True),
    Column("TTFT p50/p90/p99 s", ("ttft_s.p50", "ttft_s.p90", "ttft_s.p99")),
    Column("TTFT p90", ("ttft_s.p90",), interval=True),
    Column("mean", ("ttft_s.mean",)),
    Column("TPOT p50/p90 ms", ("tpot_s.p50", "tpot_s.p90"), 1e3, 0),
    Column("E2E p50/p90 s", ("e2e_s.p50", "e2e_s.p90"), 1.0, 1),
    Column("makespan", ("makespan_s",), 1.0, 0),
    Column("failed", ("failures",), 1.0, 1),
    Column("hit %", ("hit_ratio",), 100.0, 1),
    Column("offloads", ("offloads",), 1.0, 0),
    Column("moved GB", ("moved_bytes",), 1e-9, 0),
    Column("set/KV", ("working_set_ratio",)),
)
EXPLAINED = (
    "goodput: share of requests with TTFT <= 2 s + 0.1 ms per token that is new to an infinite "
    "cache of its session, and TPOT <= 50 ms; a failed request is infinitely late; "
    "means over seeds, [95 % bootstrap interval]; set/KV: working set over the fleet's KV"
)
FIGURES = tuple(dict.fromkeys(name for column in COLUMNS for name in column.figures))


def print_league(league: League, console: Console) -> None:
    """Print the scales and a table per regime, perturbation and load."""
    for scale in league.scales:
        console.print(
            f"{scale.regime}: load 1.0 is {scale.rate:.4g} session starts/s "
            f"({BASELINE} keeps up), KV {scale.kv_tokens:,.0f} tokens per engine",
            soft_wrap=True,
        )
    console.print(EXPLAINED, soft_wrap=True, markup=False)
    summary = summarise(league.rows)
    keys = list(dict.fromkeys((o["regime"], o["perturb"], o["load"]) for o in summary))
    for regime, perturb, load in keys:
        title = f"{regime}, load {load:g}" + ("" if perturb == "none" else f", {perturb}")
        shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        shown.add_column("policy", no_wrap=True)
        for column in COLUMNS:
            shown.add_column(column.title, justify="right", no_wrap=True)
        for one in summary:
            if (one["regime"], one["perturb"], one["load"]) == (regime, perturb, load):
                shown.add_row(one["policy"], *(_cell(one, column) for column in COLUMNS))
        console.print(shown)


def _cell(one: dict[str, Any], column: Column) -> str:
    text = "/".join(_shown(one[name][0], column) for name in column.figures)
    mean, low, high = one[column.figures[0]]
    if column.interval and math.isfinite(mean) and high > low:
        text += f" [{_shown(low, column)}-{_shown(high, column)}]"
    return text


def _shown(value: float, column: Column) -> str:
    return f"{value * column.factor:,.{column.digits}f}" if math.isfinite(value) else "inf"
