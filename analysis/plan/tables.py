"""The tables of `analyze plan`: first what there is to win, then a row per policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.console import Console

from analysis.bench.tables import number, say, table
from analysis.plan.measured import CLAIRVOYANT, STATIC, UNWARNED, Run
from analysis.plan.predictors import Judged
from analysis.plan.score import Reference, is_static

COLUMNS = (
    *("policy", "attainment %", "TTFT %", "ITL %", "GPU h", "mean replicas"),
    *("x clairvoyant", "same attainment", "changes", "started", "on drained", "missed there"),
    *("streams broken", "cached k tokens lost"),
)
EXPLAINED = (
    "attainment: TTFT and ITL (mean of the request) both within the SLO, of all requests. GPU h: "
    "from order to leave. x clairvoyant: GPU hours over those of its cheapest schedule at the "
    "target; 'same attainment': over the cheapest schedule known that attains as much. unwarned: "
    "that schedule, each order given when it is needed. on drained: requests on instances that "
    "began to drain, and how many of them missed the SLO. Means over seeds."
)
Group = tuple[str, float]
"""Load and start-up delay."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """What foresight saves: of the cheapest fixed fleet at the clairvoyant's attainment."""

    best: Run
    fixed: Run | None

    @property
    def saved_ratio(self) -> float | None:
        """Part of the fixed fleet's GPU hours; None where no fixed fleet attains as much."""
        return None if self.fixed is None else 1.0 - self.best.gpu_h / self.fixed.gpu_h


def headroom(runs: Iterable[Run]) -> Headroom | None:
    """Of the runs of one seed; None without a clairvoyant."""
    found = list(runs)
    best = next((run for run in found if run.is_best), None)
    if best is None:
        return None
    fixed = [run for run in found if is_static(run)]
    enough = [run for run in fixed if run.attainment_ratio >= best.attainment_ratio]
    return Headroom(best, min(enough, key=lambda run: run.gpu_h, default=None))


def groups(runs: Iterable[Run]) -> dict[Group, list[Run]]:
    """The runs by load and start-up delay, in their order."""
    found: dict[Group, list[Run]] = {}
    for run in runs:
        found.setdefault((run.load, run.startup_s), []).append(run)
    return found


def print_plan(runs: Sequence[Run], gpus: int, console: Console) -> list[str]:
    """Print the tables; returns a sentence per load and delay."""
    found = groups(runs)
    said = [line for group, some in found.items() for line in headroom_lines(group, some)]
    for line in said:
        say(console, line)
    for (load, startup_s), some in found.items():
        made = table(f"{load}, start-up {startup_s:g} s ({some[0].requests} requests)", COLUMNS)
        for name, same in by_policy(some).items():
            made.add_row(name.replace(":", "-"), *cells(same, _references(some), gpus))
        console.print(made)
    say(console, EXPLAINED)
    return said


def headroom_lines(group: Group, runs: Sequence[Run]) -> list[str]:
    """What there is to win on a load, one line per seed."""
    load, startup_s = group
    lines = []
    for seed, some in _by_seed(runs).items():
        found = headroom(some)
        if found is None:
            continue
        best, fixed, saved = found.best, found.fixed, found.saved_ratio
        head = f"headroom of {load}, start-up {startup_s:g} s, seed {seed}:"
        kept = f"{100 * best.attainment_ratio:.1f} % kept"
        clear = f"{best.gpu_h:.2f} GPU h with foresight"
        if fixed is None or saved is None:
            lines.append(f"{head} {kept} costs {clear}; no fixed fleet keeps as much")
            continue
        name = fixed.policy.replace(":", "-")
        lines.append(
            f"{head} {kept} costs {fixed.gpu_h:.2f} GPU h as {name}, {clear}: {100 * saved:.0f} %"
        )
    return lines


def _by_seed(runs: Iterable[Run]) -> dict[int, list[Run]]:
    found: dict[int, list[Run]] = {}
    for run in runs:
        found.setdefault(run.seed, []).append(run)
    return found


def _references(runs: Sequence[Run]) -> dict[int, Reference]:
    found = {seed: Reference.of(some) for seed, some in _by_seed(runs).items()}
    return {seed: one for seed, one in found.items() if one is not None}


def by_policy(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """One row's runs by policy: the clairvoyant's best one, planners, then fixed fleets."""
    shown = [run for run in runs if run.policy != CLAIRVOYANT or run.is_best]
    found: dict[str, list[Run]] = {}
    for run in sorted(shown, key=_place):
        found.setdefault(run.policy, []).append(run)
    return found


def _place(run: Run) -> tuple[int, int]:
    if is_static(run):
        return 3, int(run.policy.removeprefix(f"{STATIC}:"))
    return {CLAIRVOYANT: 0, UNWARNED: 1}.get(run.policy, 2), 0


def cells(runs: Sequence[Run], references: Mapping[int, Reference], gpus: int) -> list[str]:
    """The figures of a row, means over its runs."""

    def mean(of: Callable[[Run], float]) -> float:
        return fmean(map(of, runs))

    def compared(of: Callable[[Reference, Run], float | None]) -> float | None:
        found = [of(references[run.seed], run) for run in runs if run.seed in references]
        known = [one for one in found if one is not None]
        return fmean(known) if len(known) == len(runs) else None

    return [
        number(mean(lambda run: run.attainment_ratio), 1, 100),
        number(mean(lambda run: run.ttft_ratio), 1, 100),
        number(mean(lambda run: run.itl_ratio), 1, 100),
        number(mean(lambda run: run.gpu_h), 2),
        number(mean(lambda run: run.replicas) / gpus, 2),
        number(compared(lambda reference, run: run.gpu_h / reference.best.gpu_h), 2),
        number(compared(Reference.at_same), 2),
        number(mean(lambda run: run.changes), 0),
        number(mean(lambda run: run.started), 0),
        number(mean(lambda run: run.on_drain), 0),
        number(mean(lambda run: run.lost_on_drain), 0),
        number(mean(lambda run: run.broken), 0),
        number(mean(lambda run: run.lost_tokens), 0, 1e-3),
    ]


PREDICTED = (
    "loss: too little costs 0.8, too much 0.2 for each request, over the mean count of an "
    "interval. sees a rise: seconds until nine tenths of it are predicted. Means over seeds."
)


def print_predictors(found: Sequence[Judged], interval_s: float, console: Console) -> None:
    """Print a table per load: a row per predictor and distance, the least loss first."""
    by_load: dict[str, dict[tuple[str, int], list[Judged]]] = {}
    for one in found:
        by_load.setdefault(one.load, {}).setdefault((one.predictor, one.ahead), []).append(one)
    for load, rows in by_load.items():
        columns = ("predictor", "seconds ahead", "loss", "x the best", "sees a rise s")
        made = table(f"{load}, intervals of {interval_s:g} s", columns)
        mean = {key: fmean(one.loss for one in some) for key, some in rows.items()}
        for key in sorted(rows, key=lambda key: (key[1], mean[key])):
            best = min(value for (_, ahead), value in mean.items() if ahead == key[1])
            late_s = [one.react_s for one in rows[key] if one.react_s is not None]
            made.add_row(
                key[0],
                number(key[1] * interval_s, 0),
                number(mean[key], 3),
                number(mean[key] / best if best else None, 2),
                number(fmean(late_s) if late_s else None, 0),
            )
        console.print(made)
    say(console, PREDICTED)
