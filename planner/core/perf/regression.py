"""The time of an iteration as a line in its inputs, fitted to observations of all their range."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

SAMPLES, BUCKETS, LEAST = 64, 16, 5
LEAST_S, MOST_S, MOST_TOKENS = 1e-5, 3600.0, 1e9
"""Times of an iteration that are believed, and its tokens: an engine may tell others."""
DOUBTED_ERROR, SPOILED_RATIO, FEWEST_TO_DOUBT = 0.1, 1 / 3, 3
"""A fit with a larger median error is made without one of at least so many who tell, if what is
left then fits so much better: nobody spoils it for the others."""
HARDLY = 1e-12
Inputs = tuple[float, ...]


class Observation(NamedTuple):
    """What one iteration took, and who tells it."""

    inputs: Inputs
    seconds: float
    source: str = ""


class Observations:
    """At most `most` observations, spread over the range of their inputs.

    Each input's range has equal parts, `buckets` in all; when there are too many observations the
    fattest bucket loses its oldest. A plain window would forget a load that is rare.
    """

    def __init__(self, inputs: int, most: int = SAMPLES, buckets: int = BUCKETS) -> None:
        self._inputs, self._most = inputs, most
        self._parts = max(1, round(buckets ** (1 / inputs)))
        self._all: deque[Observation] = deque()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, inputs: Inputs, seconds: float, source: str = "") -> None:
        """Add what one iteration, or the mean of some, took; `source`: who tells it."""
        self._all.append(Observation(inputs, seconds, source))
        if len(self._all) > self._most:
            held = self._bucketed()
            fattest = max(held.values(), key=len)
            del self._all[fattest[0]]

    def _bucketed(self) -> dict[tuple[int, ...], list[int]]:
        """Places of the observations by the bucket of their inputs, the oldest first."""
        points = np.array([one.inputs for one in self._all])
        low, width = points.min(axis=0), np.ptp(points, axis=0)
        width[width == 0.0] = 1.0
        parts = np.minimum((points - low) / width * self._parts, self._parts - 1).astype(int)
        found: dict[tuple[int, ...], list[int]] = {}
        for at, part in enumerate(parts):
            found.setdefault(tuple(part), []).append(at)
        return found

    @property
    def is_spread(self) -> bool:
        """Whether more than one bucket has observations: else no slope is known."""
        return len(self._all) > 1 and len(self._bucketed()) > 1

    def rows(self) -> Sequence[Observation]:
        """All observations, the oldest first."""
        return list(self._all)


class Line:
    """Seconds of an iteration: a constant and a coefficient per input, none of them negative.

    One fit of `priors` (points of a profile) and of what was observed since. A prior counts as
    `prior_weight` observations at first, half of that after `least` of them, a third after twice as
    many: what an instance takes now is known better than what one took before.
    """

    def __init__(
        self,
        inputs: int,
        priors: Sequence[tuple[Inputs, float]] = (),
        prior_weight: float = 1.0,
        least: int = LEAST,
    ) -> None:
        self.observations = Observations(inputs)
        self._inputs, self._priors, self._weight = inputs, list(priors), prior_weight
        self._least = least
        self._fitted: tuple[float, ...] | None = None
        self._count = -1

    def observe(self, inputs: Inputs, seconds: float, source: str = "") -> None:
        """Take one observation; one that no iteration can be is none."""
        if is_iteration(inputs, seconds):
            self.observations.add(inputs, seconds, source)
            self._count = -1

    @property
    def coefficients(self) -> tuple[float, ...] | None:
        """The constant and the coefficients; None before there is enough to go by."""
        if self._count < 0:
            self._fitted = self._fit()
            self._count = len(self.observations)
        return self._fitted

    def __call__(self, *inputs: float) -> float:
        """Seconds of an iteration with these inputs. Raises ValueError before it is ready."""
        fitted = self.coefficients
        if fitted is None:
            raise ValueError("the model has too few observations")
        return fitted[0] + sum(a * b for a, b in zip(fitted[1:], inputs, strict=True))

    def _fit(self) -> tuple[float, ...] | None:
        own = self.observations
        if not self._priors and (len(own) < self._least or not own.is_spread):
            return None
        rows = own.rows()
        fitted = self._solved(rows)
        sources = {one.source for one in rows}
        if len(sources) < FEWEST_TO_DOUBT or _error(fitted, rows) < DOUBTED_ERROR:
            return fitted
        # One far point turns a whole line: so it is tried without each of those who tell.
        best, least = fitted, math.inf
        for source in sorted(sources):
            rest = [one for one in rows if one.source != source]
            without = self._solved(rest)
            error = _error(without, rest) / max(HARDLY, _error(fitted, rest))
            if error < least:
                best, least = without, error
        return best if least < SPOILED_RATIO else fitted

    def _solved(self, rows: Sequence[Observation]) -> tuple[float, ...]:
        """The line through the priors and these observations."""
        from scipy.optimize import nnls  # a second to import, for those who fit nothing

        of_prior = self._weight * self._least / (self._least + len(rows))
        seen = [(one.inputs, one.seconds) for one in rows]
        weighed = [*_relative(self._priors, of_prior), *_relative(seen, 1.0)]
        weights = np.sqrt([weight for _, _, weight in weighed])
        matrix = np.array([[1.0, *inputs] for inputs, _, _ in weighed]) * weights[:, None]
        # Inputs are up to 1e6: each column is brought to one size, or the fit would lose digits.
        scale = np.linalg.norm(matrix, axis=0)
        scale[scale == 0.0] = 1.0
        seconds = np.array([seconds for _, seconds, _ in weighed]) * weights
        found, _ = nnls(matrix / scale, seconds)
        return tuple(float(one) for one in found / scale)


def is_iteration(inputs: Inputs, seconds: float) -> bool:
    """Whether an iteration can have such inputs and take so long."""
    return LEAST_S <= seconds <= MOST_S and all(0.0 <= one <= MOST_TOKENS for one in inputs)


def _error(line: tuple[float, ...], rows: Sequence[Observation]) -> float:
    """The median of the relative errors of a line."""
    told = (line[0] + sum(a * b for a, b in zip(line[1:], one.inputs, strict=True)) for one in rows)
    return median(abs(said / one.seconds - 1.0) for said, one in zip(told, rows, strict=True))


def _relative(
    rows: Sequence[tuple[Inputs, float]], each: float
) -> Iterator[tuple[Inputs, float, float]]:
    """Rows with their weights, `each` in the mean: by relative errors among them.

    Errors in seconds grow with the step. So a few long steps of an overload, or prompts that were
    measured once, would drown the short steps of every other hour.
    """
    parts = [seconds**-2 for _, seconds in rows]
    for (inputs, seconds), part in zip(rows, parts, strict=True):
        yield inputs, seconds, each * part * len(parts) / sum(parts)
