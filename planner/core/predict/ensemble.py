"""An ensemble: other predictors run in its shadow, and the one that has cost least speaks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.core.predict.base import Predictor

MARGINS = (None, 0.55, 0.65, 0.75)
"""What stands above an expert: nothing, or such a quantile of its own errors."""
TAU = 0.8
"""Too little costs four times as much as too much."""
ERRORS, LEAST_ERRORS = 128, 8
"""Errors of an expert that are remembered, and how many a margin needs."""
KEPT = 0.98
"""Share of the losses so far that counts one interval later."""
HEAD_START = 0.03
"""Part of a value by which the first expert, plain, is ahead: others have to earn their turn."""
REMEMBERED = 1024
MOST_DISTANCES = 4
Values = NDArray[np.float64]


def pinball(actual: float, predicted: Values) -> Values:
    """The losses of predictions."""
    short = actual - predicted
    return np.maximum(TAU * short, (TAU - 1.0) * short)


class Ensemble(Predictor):
    """Says what the best expert of late says, at the distance that is asked for.

    A candidate is an expert with one of the margins. Losses are discounted, and the least one wins:
    to follow the leader (Cesa-Bianchi and Lugosi, Prediction, Learning, and Games, 2006, section
    2.11). What it says depends on the values alone, not on when it was asked.
    """

    def __init__(self, experts: Sequence[type[Predictor]], *, log: bool = False) -> None:
        super().__init__()  # losses are of plain values: only the experts see logarithms
        self._experts, self._experts_log = experts, log
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
            shadow = self._shadows[intervals] = _Shadow(
                [make(log=self._experts_log) for make in self._experts], intervals
            )
            for value in self._values:
                shadow.observe(value)
        return self._shadows[intervals].best()


class _Shadow:
    """The experts at one distance: what they say, by how much they erred, what that has cost."""

    def __init__(self, experts: Sequence[Predictor], ahead: int) -> None:
        self._experts, self._ahead = experts, ahead
        self._awaited: deque[tuple[Values, Values]] = deque()
        self._errors: deque[Values] = deque(maxlen=ERRORS)
        self._losses = np.zeros(len(MARGINS) * len(experts))

    def observe(self, value: float) -> None:
        """Judge what was said of this interval, and say the one that is `ahead` of it."""
        if len(self._awaited) == self._ahead:
            said, candidates = self._awaited.popleft()
            self._errors.append(value - said)
            self._losses = KEPT * self._losses + pinball(value, candidates)
        for expert in self._experts:
            expert.observe(value)
        told = [expert.predict(self._ahead) or 0.0 for expert in self._experts]
        said = np.maximum(0.0, np.array(told))
        self._awaited.append((said, self._candidates(said)))

    def _candidates(self, said: Values) -> Values:
        quantiles = [quantile for quantile in MARGINS if quantile is not None]
        margins = np.zeros((len(quantiles), len(said)))
        if len(self._errors) >= LEAST_ERRORS:
            margins = np.quantile(np.array(self._errors), quantiles, axis=0)
        found: Values = np.concatenate([said, *(said + margin for margin in margins)])
        return np.maximum(0.0, found)

    def best(self) -> float:
        """What the candidate with the least loss has said last."""
        _, candidates = self._awaited[-1]
        behind = self._losses + HEAD_START * candidates.mean()
        behind[0] = self._losses[0]
        return float(candidates[int(behind.argmin())])
