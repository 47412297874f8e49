"""An ensemble: other predictors run in its shadow, and the one that has cost least speaks."""

from __future__ import annotations

from collections import deque

import numpy as np

from planner.core.predict.base import Constant, Predictor
from planner.core.predict.kalman import Kalman
from planner.core.predict.smoothing import Holt, Seasonal

EXPERTS: tuple[type[Predictor], ...] = (Constant, Holt, Kalman, Seasonal)
MARGINS = (None, 0.55, 0.65, 0.75)
"""What stands above an expert: nothing, or such a quantile of its own errors."""
TAU = 0.8
"""Too little costs four times as much as too much."""
ERRORS, LEAST_ERRORS = 128, 8
"""Errors of an expert that are remembered, and how many a margin needs."""
KEPT = 0.98
"""Share of the losses so far that counts one interval later."""
HEAD_START = 0.03
"""Part of a value by which the last value is ahead of all others: they have to earn their turn."""
REMEMBERED = 1024
MOST_DISTANCES = 4


def pinball(actual: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """The losses of predictions."""
    short = actual - predicted
    return np.where(short >= 0.0, TAU * short, (TAU - 1.0) * short)


class Ensemble(Predictor):
    """Says what the best expert of late says, at the distance that is asked for.

    A candidate is an expert with one of the margins. Losses are discounted, and the least one wins:
    to follow the leader (Cesa-Bianchi and Lugosi, Prediction, Learning, and Games, 2006, section
    2.11). What it says depends on the values alone, not on when it was asked.
    """

    def __init__(self, *, log: bool = False) -> None:
        super().__init__()  # losses are of plain values: only the experts see logarithms
        self._experts_log = log
        self._values: deque[float] = deque(maxlen=REMEMBERED)
        self._shadows: dict[int, _Shadow] = {}

    def _take(self, value: float) -> None:
        self._values.append(value)
        for shadow in self._shadows.values():
            shadow.observe(value)

    def _at(self, intervals: int) -> float:
        if intervals not in self._shadows:
            while len(self._shadows) >= MOST_DISTANCES:
                del self._shadows[next(iter(self._shadows))]
            shadow = self._shadows[intervals] = _Shadow(intervals, log=self._experts_log)
            for value in self._values:
                shadow.observe(value)
        return self._shadows[intervals].best()


class _Shadow:
    """The experts at one distance: what they say, by how much they erred, what that has cost."""

    def __init__(self, ahead: int, *, log: bool) -> None:
        self._ahead = ahead
        self._experts = [make(log=log) for make in EXPERTS]
        self._awaited: deque[tuple[np.ndarray, np.ndarray]] = deque()
        self._errors: deque[np.ndarray] = deque(maxlen=ERRORS)
        self._losses = np.zeros(len(MARGINS) * len(EXPERTS))

    def observe(self, value: float) -> None:
        """Judge what was said of this interval, and say the one that is `ahead` of it."""
        if len(self._awaited) == self._ahead:
            said, candidates = self._awaited.popleft()
            self._errors.append(value - said)
            self._losses = KEPT * self._losses + pinball(np.array(value), candidates)
        for expert in self._experts:
            expert.observe(value)
        told = [expert.predict(self._ahead) or 0.0 for expert in self._experts]
        said = np.maximum(0.0, np.array(told))
        self._awaited.append((said, self._candidates(said)))

    def _candidates(self, said: np.ndarray) -> np.ndarray:
        quantiles = [quantile for quantile in MARGINS if quantile is not None]
        margins = np.zeros((len(quantiles), len(said)))
        if len(self._errors) >= LEAST_ERRORS:
            margins = np.quantile(np.array(self._errors), quantiles, axis=0)
        return np.maximum(0.0, np.concatenate([said, *(said + margin for margin in margins)]))

    def best(self) -> float:
        """What the candidate with the least loss has said last."""
        _, candidates = self._awaited[-1]
        behind = self._losses + HEAD_START * candidates.mean()
        behind[0] = self._losses[0]
        return float(candidates[int(behind.argmin())])
