"""Predictors judged by the arrivals of a load: what their errors cost, and how soon they react.

A load is a row of counts per interval. After each interval a predictor tells the count some
intervals ahead, as far as a new instance takes to come. Too little costs four times as much as too
much (pinball loss at 0.8), over the mean count. A rise is seen once the predicted count is at least
nine tenths of the mean of RISE_S behind the rise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from planner.core.predict import PREDICTORS, Predictor
from replayer.loads.load import Load

TAU = 0.8
"""Share of intervals whose count should be at most the predicted one."""
RISE_S = 180.0
SEEN_RATIO = 0.9


@dataclass(frozen=True, slots=True)
class Judged:
    """One predictor on one load, `ahead` intervals before.

    `react_s`: mean seconds from a rise until it is seen; infinite where one is never seen before
    the next, None without rises.
    """

    predictor: str
    load: str
    seed: int
    ahead: int
    loss: float
    react_s: float | None


def counts(load: Load, interval_s: float) -> list[int]:
    """Requests that arrive in each interval; turns of sessions count where they may begin."""
    found = [0] * max(1, math.ceil(load.end_s / interval_s))
    for one in load.requests:
        found[min(len(found) - 1, int(one.at_s / interval_s))] += 1
    return found


def pinball(actual: float, predicted: float, tau: float = TAU) -> float:
    """The loss of one prediction."""
    short = actual - predicted
    return tau * short if short >= 0 else (tau - 1.0) * short


def predicted(predictor: Predictor, values: Sequence[float], ahead: int) -> list[float]:
    """What it says after each value of the one so many intervals later; 0 before it can."""
    said = []
    for value in values:
        predictor.observe(value)
        said.append(predictor.predict(ahead) or 0.0)
    return said


def loss(values: Sequence[float], said: Sequence[float], ahead: int) -> float:
    """The mean loss over the mean value."""
    losses = [pinball(value, one) for value, one in zip(values[ahead:], said, strict=False)]
    return fmean(losses) / max(1e-9, fmean(values)) if losses else 0.0


def react_s(
    values: Sequence[float], said: Sequence[float], rises_s: Sequence[float], interval_s: float
) -> float | None:
    """Mean seconds from a rise until it is seen."""
    if not rises_s:
        return None
    ends_s = [*rises_s[1:], math.inf]
    return fmean(
        _seen_after_s(values, said, (rise_s, end_s), interval_s)
        for rise_s, end_s in zip(rises_s, ends_s, strict=True)
    )


def _seen_after_s(
    values: Sequence[float], said: Sequence[float], within_s: tuple[float, float], interval_s: float
) -> float:
    rise_s, end_s = within_s
    first = int(rise_s / interval_s)
    level = fmean(values[first : first + max(1, int(RISE_S / interval_s))])
    for at in range(first, len(said)):
        told_s = (at + 1) * interval_s
        if told_s > end_s:
            break
        if said[at] >= SEEN_RATIO * level:
            return max(0.0, told_s - rise_s)
    return math.inf


def judge(load: Load, name: str, interval_s: float, startup_s: float) -> Judged:
    """Judge one of PREDICTORS, as far ahead as an instance ordered now would serve."""
    ahead = max(1, math.ceil((startup_s + interval_s) / interval_s - 1e-9))
    values = counts(load, interval_s)
    said = predicted(PREDICTORS[name](), values, ahead)
    late_s = react_s(values, said, load.rises_s, interval_s)
    return Judged(name, load.name, load.seed, ahead, loss(values, said, ahead), late_s)
