"""The league's table: means of rows over seeds, with bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from rich.console import Console

from analysis.bench.stats import figure, mean_and_interval
from analysis.bench.tables import number, table
from analysis.league.fleet import Scale
from analysis.measures import grouped
from analysis.rivals.registry import BASELINE

CELL = ("regime", "perturb", "load")


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Average over seeds, per regime, perturbation, load and policy, best goodput first."""
    made = [
        {
            **dict(zip((*CELL, "policy"), key, strict=True)),
            **{n: mean_and_interval([figure(row, n, math.inf) for row in part]) for n in FIGURES},
        }
        for key, part in grouped(rows, itemgetter(*CELL, "policy")).items()
    ]
    made.sort(key=lambda one: (one["regime"], one["perturb"], one["load"], _order(one)))
    return made


def _order(one: dict[str, Any]) -> tuple[float, float]:
    return -one["goodput_ratio"][0], one["ttft_s.p90"][0]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table: figures joined by a slash; `interval`: the first has one."""

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
    Column("failed/cut/moved", ("failures", "cut", "moves"), 1.0, 1),
    Column("hit %", ("hit_ratio",), 100.0, 1),
    Column("off by", ("hit_error_ratio",), 100.0, 1),
    Column("offloads", ("offloads",), 1.0, 0),
    Column("moved GB", ("moved_bytes",), 1e-9, 0),
    Column("set/KV", ("working_set_ratio",)),
)
EXPLAINED = (
    "goodput: share of requests with TTFT <= 2 s + 0.1 ms per token that is new to an infinite "
    "cache of its session, and TPOT <= 50 ms; a failed request is infinitely late; "
    "means over seeds, [95 % bootstrap interval]; off by: mean error of a prompt's predicted hit; "
    "cut: streams that ended before their answer; moved: migrations of streams; "
    "set/KV: working set over the fleet's KV"
)
FIGURES = tuple(dict.fromkeys(name for column in COLUMNS for name in column.figures))


def print_league(
    scales: Sequence[Scale],
    rows: Sequence[dict[str, Any]],
    doubts: Mapping[tuple[str, str, float], str],
    console: Console,
) -> None:
    """Print the scales and a table per regime, perturbation and load, with what speaks against it.

    `doubts` of a load are by regime, perturbation and load.
    """
    for scale in scales:
        console.print(
            f"{scale.regime}: load 1.0 is {scale.rate:.4g} session starts/s "
            f"({BASELINE} keeps up), KV {scale.kv_tokens:,.0f} tokens per engine",
            soft_wrap=True,
        )
        if scale.doubt:
            console.print(f"! {scale.regime}: {scale.doubt}", soft_wrap=True, markup=False)
    console.print(EXPLAINED, soft_wrap=True, markup=False)
    for (regime, perturb, load), part in grouped(summarise(rows), itemgetter(*CELL)).items():
        title = f"{regime}, load {load:g}" + ("" if perturb == "none" else f", {perturb}")
        if doubt := doubts.get((regime, perturb, load)):
            title += f" ! {doubt}"
        shown = table(title, ["policy", *(column.title for column in COLUMNS)])
        for one in part:
            shown.add_row(one["policy"], *(_cell(one, column) for column in COLUMNS))
        console.print(shown)


def _cell(one: dict[str, Any], column: Column) -> str:
    text = "/".join(number(one[name][0], column.digits, column.factor) for name in column.figures)
    mean, low, high = one[column.figures[0]]
    if column.interval and math.isfinite(mean) and high > low:
        text += (
            " [" + "-".join(number(one, column.digits, column.factor) for one in (low, high)) + "]"
        )
    return text
