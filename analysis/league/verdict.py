"""The default policy compared with the best policy of each cell, and with the baseline.

A cell is a regime, perturbation and load. Gaps are ratios of means over seeds, minus one: negative
for less goodput than the best, positive for a longer TTFT or TPOT. Failures are shown beside a
policy's name, since a policy that fails requests can look good on the others.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.console import Console

from analysis.bench.progress import changed
from analysis.bench.stats import cells, change
from analysis.bench.tables import table
from analysis.league.summary import CELL
from analysis.rivals.registry import BASELINE, DEFAULT

Summary = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cell. `goodput` and `ttft_p90`: summaries of the policy that is best in each."""

    ours: Summary
    baseline: Summary
    goodput: Summary
    ttft_p90: Summary

    @property
    def goodput_gap(self) -> float:
        """Goodput of the default over the best, minus one."""
        return _gap(self.ours, self.goodput, "goodput_ratio")

    @property
    def ttft_gap(self) -> float:
        """TTFT p90 of the default over the best, minus one."""
        return _gap(self.ours, self.ttft_p90, "ttft_s.p90")

    def against_baseline(self, name: str) -> float:
        """Return a figure of the default over the baseline's, minus one."""
        return _gap(self.ours, self.baseline, name)


def verdicts(summary: Sequence[Summary]) -> list[Verdict]:
    """Make a verdict per cell in which both the default and the baseline were run."""
    return [
        Verdict(
            cell[DEFAULT],
            cell[BASELINE],
            max(cell.values(), key=lambda one: one["goodput_ratio"][0]),
            min(cell.values(), key=lambda one: one["ttft_s.p90"][0]),
        )
        for cell in cells(summary, CELL, "policy")
        if DEFAULT in cell and BASELINE in cell
    ]


def sentence(summary: Sequence[Summary], policies: Sequence[str]) -> str:
    """Say in one line what the default did, beside the baseline or what else there is; or "".

    Ratios are means over the cells in which both were run.
    """
    ours = DEFAULT if DEFAULT in policies else next(iter(policies), "")
    others = [name for name in policies if name != ours]
    if not others:
        return ""
    other = BASELINE if BASELINE in others else others[0]
    found = cells(summary, CELL, "policy")
    both = [(cell[ours], cell[other]) for cell in found if {ours, other} <= cell.keys()]
    if not both:
        return ""
    ttft, goodput = (
        changed(fmean(_gap(mine, theirs, name) for mine, theirs in both))
        for name in ("ttft_s.p90", "goodput_ratio")
    )
    over = f" (mean of {len(both)} cells)" if len(both) > 1 else ""
    failed = sum(mine["failures"][0] for mine, _theirs in both)
    lost = f", {failed:.1f} requests failed" if failed else ""
    return f"{ours}: TTFT p90 {ttft} to {other}, goodput {goodput}{lost}{over}"


def print_verdicts(
    summary: Sequence[Summary], console: Console, doubted: Container[tuple[str, str, float]] = ()
) -> None:
    """Print a table with a line per verdict, if there is any.

    `doubted`: cells (regime, perturbation, load) that are not at the load they claim.
    """
    found = verdicts(summary)
    if not found:
        return
    shown = table(
        f"{DEFAULT} (the default) to the best of each cell, and to the baseline {BASELINE}",
        [
            *("cell", "goodput %", "best", "gap", "TTFT p90 s", "best", "gap"),
            *(f"{name}\nto baseline" for name in ("TTFT p50", "TTFT p90", "TPOT p90", "makespan")),
            "failed",
        ],
        left=7,
    )
    for one in found:
        shown.add_row(*_cells(one, doubted))
    console.print(shown)


def _cells(one: Verdict, doubted: Container[tuple[str, str, float]]) -> list[str]:
    ours = one.ours
    cell = f"{ours['regime']} {ours['load']:g}"
    if ours["perturb"] != "none":
        cell += f" {ours['perturb']}"
    if (ours["regime"], ours["perturb"], ours["load"]) in doubted:
        cell += " !"
    return [
        cell,
        f"{ours['goodput_ratio'][0] * 100:.1f}",
        _named(one.goodput, f"{one.goodput['goodput_ratio'][0] * 100:.1f}"),
        _percent(one.goodput_gap),
        f"{ours['ttft_s.p90'][0]:.2f}",
        _named(one.ttft_p90, f"{one.ttft_p90['ttft_s.p90'][0]:.2f}"),
        _percent(one.ttft_gap),
        *(
            _percent(one.against_baseline(name))
            for name in ("ttft_s.p50", "ttft_s.p90", "tpot_s.p90", "makespan_s")
        ),
        f"{ours['failures'][0]:.1f}",
    ]


def _named(one: Summary, value: str) -> str:
    failures = one["failures"][0]
    lost = f" ({failures:.1f} failed)" if failures else ""
    return f"{value} {one['policy']}{lost}"


def _percent(gap: float) -> str:
    return f"{gap * 100:+.1f} %" if math.isfinite(gap) else "inf"


def _gap(ours: Summary, other: Summary, name: str) -> float:
    return change(ours[name][0], other[name][0])
