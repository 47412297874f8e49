"""The tables of a result: each rule beside the clairvoyant, per load and start-up delay.

score = GPU hours / the clairvoyant's + 5 x (the clairvoyant's attainment - attainment, if positive)

1.00 is the clairvoyant; a point of attainment counts as much as 5 % of the GPU hours. Of a rule
with several settings the one with the least score is shown, per load and delay. With several seeds
each run is compared with the clairvoyant of its own seed, and the means are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from analysis.plan.measured import CLAIRVOYANT, STATIC, Run
from analysis.plan.score import Reference, is_static
from bench.cost.tables import Grid
from bench.planner.results import Result
from replayer.loads import LOADS

HEADERS = (
    *("rule (best setting)", "attainment %", "GPU h", "x clairvoyant"),
    *("x clairvoyant, same attainment", "score", "replicas", "good requests per GPU h"),
    *("out of SLO s", "after rises s", "changes", "missed on drained", "runs"),
)
SUMMARY_HEADERS = ("rule", "score", "attainment %", "x clairvoyant GPU h", "loads")


@dataclass(frozen=True, slots=True)
class Line:
    """A rule with one setting in one group: its runs, one per seed."""

    runs: Sequence[Run]
    references: Mapping[int, Reference]

    @property
    def rule(self) -> str:
        """Its name; all fixed fleets are one rule with a setting each."""
        return STATIC if is_static(self.runs[0]) else self.runs[0].policy

    @property
    def name(self) -> str:
        """Its name with the setting."""
        first = self.runs[0]
        return first.policy if first.settings == "{}" else f"{first.policy} {first.settings}"

    def mean(self, value: Callable[[Run], float]) -> float:
        """A figure's mean over the seeds."""
        return fmean(map(value, self.runs))

    def compared(self, value: Callable[[Reference, Run], float | None]) -> float | None:
        """The mean of a comparison; None where one is missing."""
        found = [
            value(self.references[run.seed], run) if run.seed in self.references else None
            for run in self.runs
        ]
        known = [one for one in found if one is not None]
        return fmean(known) if len(known) == len(found) else None

    @property
    def score(self) -> float | None:
        """Its score; None without a clairvoyant."""
        return self.compared(Reference.score)

    @property
    def over(self) -> float | None:
        """GPU hours over the clairvoyant's."""
        return self.compared(lambda reference, run: run.gpu_h / reference.best.gpu_h)

    @property
    def rank(self) -> tuple[float, float]:
        """Best first: by the score, or by the attainment where there is none."""
        return (self.score or 0.0, -self.mean(lambda run: run.attainment_ratio))


Key = tuple[str, float]
"""Load and start-up delay."""


def groups(runs: Iterable[Run]) -> dict[Key, list[Run]]:
    """The runs of each load and delay, in the order of the loads."""
    found: dict[Key, list[Run]] = {}
    for run in runs:
        found.setdefault((run.load, run.startup_s), []).append(run)
    return {key: found[key] for key in sorted(found, key=_place)}


def _place(key: Key) -> tuple[int, str, float]:
    name, startup_s = key
    return (LOADS.index(name) if name in LOADS else len(LOADS), name, startup_s)


def lines(runs: Sequence[Run]) -> list[Line]:
    """The best setting of each rule in one group, best rule first."""
    by_seed: dict[int, list[Run]] = {}
    by_setting: dict[tuple[str, str], dict[int, Run]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, []).append(run)
        if run.policy != CLAIRVOYANT or run.is_best:
            by_setting.setdefault((run.policy, run.settings), {})[run.seed] = run
    found = {seed: Reference.of(some) for seed, some in by_seed.items()}
    references = {seed: one for seed, one in found.items() if one is not None}
    best: dict[str, Line] = {}
    for some in by_setting.values():
        line = Line(tuple(some.values()), references)
        if line.rule not in best or line.rank < best[line.rule].rank:
            best[line.rule] = line
    return sorted(best.values(), key=lambda line: line.rank)


def grids(result: Result) -> list[Grid]:
    """A table per load and delay, and one over all of them."""
    found = {key: lines(runs) for key, runs in groups(result.runs).items()}
    tables = [_grid(key, some) for key, some in found.items()]
    return [*tables, summary(found)] if len(found) > 1 else tables


def _grid(key: Key, some: Sequence[Line]) -> Grid:
    name, startup_s = key
    title = f"{name}, start-up {startup_s:g} s ({some[0].runs[0].requests} requests)"
    return Grid(title, HEADERS, [_row(line) for line in some])


def _row(line: Line) -> list[str]:
    on_drain = line.mean(lambda run: run.on_drain)
    lost = line.mean(lambda run: run.lost_on_drain)
    return [
        line.name,
        f"{100 * line.mean(lambda run: run.attainment_ratio):.1f}",
        f"{line.mean(lambda run: run.gpu_h):.2f}",
        _ratio(line.over),
        _ratio(line.compared(Reference.at_same)),
        _ratio(line.score),
        f"{line.mean(lambda run: run.replicas):.2f}",
        f"{line.mean(lambda run: run.good_per_gpu_h):.0f}",
        f"{line.mean(lambda run: run.out_s):.0f}",
        f"{line.mean(lambda run: run.out_after_rises_s):.0f}",
        f"{line.mean(lambda run: run.changes):.0f}",
        f"{lost:.0f}/{on_drain:.0f}",
        str(len(line.runs)),
    ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def summary(found: Mapping[Key, Sequence[Line]]) -> Grid:
    """Median (worst) of each rule over the loads and delays that have a clairvoyant."""
    by_rule: dict[str, list[Line]] = {}
    for some in found.values():
        for line in some:
            if line.score is not None:
                by_rule.setdefault(line.rule, []).append(line)
    ranked = sorted(by_rule.items(), key=lambda one: median(_scores(one[1])))
    rows = [_summary_row(rule, some) for rule, some in ranked]
    return Grid("All loads, median (worst)", SUMMARY_HEADERS, rows)


def _scores(some: Sequence[Line]) -> list[float]:
    return [line.score or 0.0 for line in some]


def _summary_row(rule: str, some: Sequence[Line]) -> list[str]:
    attained = [100 * line.mean(lambda run: run.attainment_ratio) for line in some]
    over = [line.over or 0.0 for line in some]
    scores = _scores(some)
    return [
        "static (best N)" if rule == STATIC else rule,
        f"{median(scores):.2f} ({max(scores):.2f})",
        f"{median(attained):.1f} ({min(attained):.1f})",
        f"{median(over):.2f} ({max(over):.2f})",
        str(len(some)),
    ]


def left_out(result: Result) -> list[str]:
    """What the tables lack, a line each."""
    return [f"left out: {name}: {why}" for name, why in result.left_out.items()]


def markdown(result: Result) -> str:
    """The tables for a page."""
    parts = [f"### {grid.title}\n\n{grid.markdown()}" for grid in grids(result)]
    return "\n\n".join([*parts, *left_out(result)])


def line_of(run: Run) -> str:
    """One run in one line."""
    settings = "" if run.settings == "{}" else f" {run.settings}"
    return (
        f"[{run.load} {run.seed} {run.startup_s:g} s] {run.policy + settings:44}"
        f" {100 * run.attainment_ratio:6.2f} %"
        f" (TTFT {100 * run.ttft_ratio:5.1f} ITL {100 * run.itl_ratio:5.1f})"
        f" {run.gpu_h:6.3f} GPU h {run.replicas:5.2f} replicas"
        f"  out {run.out_s:4.0f} s {run.changes:3} changes"
    )
