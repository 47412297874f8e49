"""What the figures should be, and whether they are: ours beside the best rival, run by run.

A ratio is the median over the seeds of one run of ours over the best rival's run with the same
seed: the rival whose median is the lowest in that figure, at that load. Beside it stands the ratio
over the requests of all seeds taken together, to which seeds in which one of the two is far behind
count as much as they cost. Both have their intervals from a paired bootstrap: seeds are drawn anew,
and within a seed the sessions, the same for both systems, as requests of one session are not
independent of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from analysis.measures import grouped, percentile
from bench.routing.measured import Answered, Result, Run
from bench.routing.systems import BEFORE, EVENTS, GAUGES, OURS, PLAIN, RIVALS

DRAWS = 1_000
COVERED = (5, 95)
"""Percentiles of the bootstrap that an interval goes from and to."""
Values = Callable[[Answered], float]
Reduce = Callable[["np.ndarray"], float]


def _p90(values: np.ndarray) -> float:
    """The nearest-rank percentile, as in the tables."""
    return percentile(np.sort(values).tolist(), 90)


def _mean(values: np.ndarray) -> float:
    return float(values.mean())


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that is compared. `value` None: of the run as a whole, not of its requests."""

    name: str
    of_run: Callable[[Run], float]
    value: Values | None = None
    reduce: Reduce = _mean


def _made(run: Run, name: str) -> float:
    return float(getattr(run.figures, name))


TTFT_MEAN = Figure("TTFT mean", lambda run: _made(run, "ttft_mean_s"), lambda one: one.ttft_s)
TTFT_P90 = Figure("TTFT p90", lambda run: _made(run, "ttft_p90_s"), lambda one: one.ttft_s, _p90)
TPOT_P90 = Figure("TPOT p90", lambda run: _made(run, "tpot_p90_s"), lambda one: one.tpot_s, _p90)
MAKESPAN = Figure("makespan", lambda run: run.makespan_s or 0.0)


@dataclass(frozen=True, slots=True)
class Target:
    """The most that a figure of ours in a mode may be, relative to the best rival.

    `loads` empty: at each load. `against`: another run by its name, instead of the best rival; the
    target is for results that have it.
    """

    figure: Figure
    limit: float
    mode: str = GAUGES
    loads: tuple[str, ...] = ()
    against: str = ""


TARGETS = (
    Target(TTFT_MEAN, 1.0, loads=("low", "mid")),
    Target(TTFT_MEAN, 0.8, loads=("high",)),
    Target(TTFT_P90, 0.95),
    Target(TPOT_P90, 1.0),
    Target(MAKESPAN, 1.0),
    Target(TTFT_MEAN, 1.08, mode=PLAIN, against=f"{OURS} {GAUGES}"),
    Target(TTFT_MEAN, 1.0, mode=EVENTS, against=f"{OURS} {GAUGES}"),
    *(
        Target(figure, 1.0, mode=mode, against=f"{BEFORE} {mode}")
        for mode in (GAUGES, PLAIN, EVENTS)
        for figure in (TTFT_MEAN, TTFT_P90)
    ),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio over paired runs, with its interval; `seeds` is the number of pairs.

    `middle`, `low`, `high`: the median of the seeds' ratios. `together`: the ratio over the
    requests of all seeds, and its interval.
    """

    middle: float
    low: float
    high: float
    together: tuple[float, float, float]
    seeds: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target at one load of one fleet; `ratio` None: not measured."""

    target: Target
    shape: str
    load: str
    against: str
    ratio: Ratio | None

    @property
    def is_met(self) -> bool | None:
        """Whether the ratio keeps the limit; None: not measured."""
        return None if self.ratio is None else self.ratio.middle <= self.target.limit


def verdicts(result: Result) -> list[Verdict]:
    """Every target that some run of the result is for."""
    found = []
    for shape, load in result.cells():
        runs = result.of(shape, load)
        for target in TARGETS:
            if target.loads and load not in target.loads:
                continue
            mine = _named(runs, f"{OURS} {target.mode}")
            name, others = _others(target, runs)
            if mine and (others or not target.against):
                found.append(Verdict(target, shape, load, name, ratio(target.figure, mine, others)))
    return found


def _others(target: Target, runs: Sequence[Run]) -> tuple[str, list[Run]]:
    """What ours is compared with, by name."""
    if target.against:
        return target.against, _named(runs, target.against)
    return best_rival(runs, target.figure)


def best_rival(runs: Sequence[Run], figure: Figure) -> tuple[str, list[Run]]:
    """The rival with the lowest median of a figure, and its runs; empty if there is none."""
    rivals = (run for run in runs if run.system in RIVALS and run.answered)
    by_name = grouped(rivals, lambda run: run.system)
    if not by_name:
        return "", []
    best = min(by_name, key=lambda name: median(map(figure.of_run, by_name[name])))
    return best, by_name[best]


def _named(runs: Sequence[Run], name: str) -> list[Run]:
    return [run for run in runs if run.name == name and run.answered]


def ratio(
    figure: Figure, mine: Sequence[Run], others: Sequence[Run], draws: int = DRAWS
) -> Ratio | None:
    """Ours over theirs, over the seeds that both have; None if there is none."""
    by_seed = {run.seed: run for run in others}
    pairs = [(run, by_seed[run.seed]) for run in mine if run.seed in by_seed]
    if not pairs:
        return None
    middle = median(figure.of_run(one) / figure.of_run(other) for one, other in pairs)
    random = np.random.default_rng(0)
    samples = [_Sample.of(figure, one, other) for one, other in pairs]
    drawn = [_drawn(figure, samples, random) for _ in range(draws)]
    (low, below), (high, above) = np.percentile(drawn, COVERED, axis=0).tolist()
    together = _together(figure, [one.whole() for one in samples])
    return Ratio(middle, low, high, (together, below, above), len(pairs))


Pair = tuple["np.ndarray", "np.ndarray"]
"""Values of ours and of the other's, of the same sessions."""


def _drawn(
    figure: Figure, samples: Sequence[_Sample], random: np.random.Generator
) -> tuple[float, float]:
    """One bootstrap draw: the median of the seeds' ratios, and the ratio over all requests."""
    chosen = random.integers(len(samples), size=len(samples))
    drawn = [samples[at].drawn(random) for at in chosen]
    return median(_of_pair(figure, one) for one in drawn), _together(figure, drawn)


def _of_pair(figure: Figure, pair: Pair) -> float:
    return float(figure.reduce(pair[0]) / figure.reduce(pair[1]))


def _together(figure: Figure, pairs: Sequence[Pair]) -> float:
    """The ratio over the requests of all pairs; of whole runs that of their sums."""
    mine, others = zip(*pairs, strict=True)
    return _of_pair(figure, (np.concatenate(mine), np.concatenate(others)))


@dataclass(frozen=True, slots=True)
class _Sample:
    """A pair of runs, per session that both have answered; a run as a whole is one value."""

    mine: list[np.ndarray]
    others: list[np.ndarray]

    @classmethod
    def of(cls, figure: Figure, one: Run, other: Run) -> _Sample:
        value = figure.value
        mine, others = ({} if value is None else _by_session(run, value) for run in (one, other))
        sessions = [name for name in mine if name in others]
        if not sessions:
            return cls(*([np.array([figure.of_run(run)])] for run in (one, other)))
        return cls([mine[name] for name in sessions], [others[name] for name in sessions])

    def whole(self) -> Pair:
        """All values of both."""
        return np.concatenate(self.mine), np.concatenate(self.others)

    def drawn(self, random: np.random.Generator) -> Pair:
        """The values of the same sessions of both, drawn with repetition."""
        chosen = random.integers(len(self.mine), size=len(self.mine))
        mine, others = ([side[at] for at in chosen] for side in (self.mine, self.others))
        return np.concatenate(mine), np.concatenate(others)


def _by_session(run: Run, value: Values) -> dict[str, np.ndarray]:
    sessions = grouped(run.answered, lambda one: one.session)
    return {name: np.array([*map(value, part)]) for name, part in sessions.items()}


ORDER_OF_MAGNITUDE = 2.0
"""Ours may be that many times a rival in a small run, whose figures are coarse."""


def gross_faults(result: Result) -> Iterator[str]:
    """What is wrong by an order of magnitude: for a run too small to judge the targets by."""
    for shape, load in result.cells():
        runs = result.of(shape, load)
        _, rivals = best_rival(runs, TTFT_MEAN)
        for mine in (run for run in runs if run.system == OURS):
            for rival in (run for run in rivals if run.seed == mine.seed):
                yield from _gross(mine, rival)


def _gross(mine: Run, rival: Run) -> Iterator[str]:
    one, other = mine.figures, rival.figures
    if one is None or other is None:
        return
    for what, value, limit in (
        ("mean TTFT", one.ttft_mean_s, other.ttft_mean_s * ORDER_OF_MAGNITUDE),
        ("tokens not cached", 1 - one.hit_ratio, (1 - other.hit_ratio) * ORDER_OF_MAGNITUDE),
    ):
        if value > limit:
            yield (
                f"{mine.shape} {mine.load}, {mine.name}: {what} {value:.3g}, more than "
                f"{ORDER_OF_MAGNITUDE:g} times that of {rival.name}"
            )
