"""The tables of a result: every system's figures per fleet and load, and the targets."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.measures import grouped
from bench.cost.tables import Grid
from bench.routing.measured import BUSY_LIMIT, Figures, Result, Run
from bench.routing.report.verdict import Verdict, verdicts

HEADERS = (
    *("system", "seeds", "lost", "hit", "TTFT mean s", "p50", "p90", "p99", "TPOT p90 ms"),
    *("makespan s", "machine busy"),
)
TARGET_HEADERS = (
    *("fleet, load", "figure", "relative to", "seeds", "median (90 %)", "at most", "met"),
    "all seeds together (90 %)",
)


def grids(result: Result) -> list[Grid]:
    """A table per fleet and load, and that of the targets, if any is for these runs."""
    cells = [_cell(result, shape, load) for shape, load in result.cells()]
    asked = targets(result)
    return [*cells, asked] if asked.rows else cells


def _cell(result: Result, shape: str, load: str) -> Grid:
    groups = grouped(result.of(shape, load), lambda run: run.name)
    rows = [_row(name, runs) for name, runs in groups.items()]
    return Grid(f"{shape}, {load} load", HEADERS, rows)


def _row(name: str, runs: Sequence[Run]) -> list[str]:
    """Medians over the seeds; `!` where a run needed more of the machine than it should."""
    known = [run.figures for run in runs]
    figures = [one for one in known if one is not None]
    lost = f"{sum(run.lost for run in runs)}/{sum(run.sent for run in runs)}"
    return [name, str(len(runs)), lost, *_medians(figures), _busy(runs)]


def _medians(figures: Sequence[Figures]) -> list[str]:
    if not figures:
        return [""] * 7
    one = Figures.middle(figures)
    times_s = one.ttft_mean_s, one.ttft_p50_s, one.ttft_p90_s, one.ttft_p99_s
    took = "" if one.makespan_s is None else f"{one.makespan_s:.0f}"
    shown = (f"{time_s:.2f}" for time_s in times_s)
    return [f"{one.hit_ratio:.3f}", *shown, f"{one.tpot_p90_s * 1e3:.1f}", took]


def _busy(runs: Sequence[Run]) -> str:
    shares = [run.busy_ratio for run in runs if run.busy_ratio is not None]
    if not shares:
        return ""
    return f"{max(shares):.0%}" + (" !" if max(shares) > BUSY_LIMIT else "")


def targets(result: Result) -> Grid:
    """What is asked for, what was measured, and whether that meets it."""
    rows = [_target_row(verdict) for verdict in verdicts(result)]
    return Grid("Targets", TARGET_HEADERS, rows)


def _target_row(verdict: Verdict) -> list[str]:
    target, ratio = verdict.target, verdict.ratio
    met = {True: "yes", False: "no", None: "not measured"}[verdict.is_met]
    return [
        f"{verdict.shape}, {verdict.load}",
        f"{target.figure.name}, {target.mode}",
        verdict.against,
        "" if ratio is None else str(ratio.seeds),
        "" if ratio is None else _interval(ratio.middle, ratio.low, ratio.high),
        f"{target.limit:g}",
        met,
        "" if ratio is None else _interval(*ratio.together),
    ]


def _interval(middle: float, low: float, high: float) -> str:
    """Without the interval where that is nothing: of one run as a whole."""
    ends = f"{low:.2f}", f"{high:.2f}"
    return f"{middle:.2f}" + ("" if ends[0] == ends[1] else f" ({ends[0]}–{ends[1]})")


def faults(result: Result) -> list[str]:
    """The runs that failed as a whole or lost requests, a line each."""
    found = []
    for run in result.runs:
        place = f"{run.shape}, {run.load}, seed {run.seed}, {run.name}"
        if run.fault:
            found.append(f"{place}: {run.fault}")
        elif run.lost and not run.is_bound:
            found.append(f"{place}: {run.lost} of {run.sent} requests lost")
    return found


def line(run: Run) -> str:
    """One run in one line."""
    place = f"[{run.shape} {run.load} {run.seed}] {run.name:26}"
    if run.fault or run.figures is None:
        return f"{place} {run.fault or 'nothing answered'}"
    one = run.figures
    busy = "" if run.busy_ratio is None else f"  machine {_busy([run])}"
    took = "" if one.makespan_s is None else f"  makespan {one.makespan_s:.0f} s"
    return (
        f"{place} hit {one.hit_ratio:.3f}  TTFT mean {one.ttft_mean_s:.2f}"
        f" p50 {one.ttft_p50_s:.2f} p90 {one.ttft_p90_s:.2f} p99 {one.ttft_p99_s:.2f} s"
        f"  TPOT p90 {one.tpot_p90_s * 1e3:.1f} ms"
        f"{took}  lost {run.lost}/{run.sent}{busy}"
    )
