"""The engine model's constants, fitted to a run's own log.

The model itself is the regression function: every leg is run through it at the time and on the
engine of the log (`virtual_legs`), so that queues, batches, chunks, cache hits and pulls are those
of the model and none has to be guessed from timestamps. Fitted are the logarithms of the legs'
times, by Gauss-Newton steps with damping (Levenberg, Marquardt) that keep the constants from going
below zero. Residuals are divided by their kind's own spread; beyond HUBER spreads they weigh less,
beyond TRIM nothing.

A constant that the run says nothing of (no transfer) keeps its start value and is not `seen`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from analysis.check.logs import CheckSample, Overhead
from analysis.runs import RunError
from replayer.engine.types import EngineOptions
from replayer.virtual.legs import run_legs

Vector = NDArray[np.float64]
HUBER, TRIM = 1.5, 6.0
LEAST_SPREAD = 0.001
"""Times are not taken to be known better than to a thousandth."""
WIDTHS = (0.5, 0.2, 0.05, 0.01)
"""Of the numerical derivative, relative, one after the other.

A leg joins its engine at the end of a step, and which step that is, and when it ends, hangs on all
steps before it: seen closely the times jump by a step's length with every change of a constant.
Wide differences see past that; narrow ones are of use once the steps' own times are right.
"""
LEAST_WIDTH = 0.3
"""The same is relative to a constant, but to no less than this part of its unit."""
LEAST = 1e-6
"""Of a constant, in units of its first guess: what stands for zero."""
SEEN = 1e-2
"""A constant is seen when doubling it moves some time by about this many spreads."""
STEPS, TRIES = 12, 5
DAMPINGS = (1e-2, 1e-4)
"""Where two constants move the same times (a1 and a4), each leads to an end of its own."""
KEPT = 0.9
"""The part of the residuals that tells which of two ends is the better one."""
DONE = 1e-3
LONGEST = 2.0
"""Of a step, relative to the constant or its unit."""
MAD = 1.4826


@dataclass(frozen=True, slots=True)
class Constants:
    """Seconds, as in `sim_cost`: steps a0..a4, a transfer, and the intake of a leg.

    `x1` is a transfer's time per token: bytes per token over bandwidth, which no log can separate.
    """

    a0: float
    a1: float
    a2: float
    a3: float
    a4: float
    x0: float
    x1: float
    intake: float
    intake_per_token: float

    def engine(self, like: EngineOptions) -> EngineOptions:
        """An engine of another one's size with these constants."""
        bandwidth = like.transfer.bytes_per_token / self.x1
        return replace(
            like,
            step=replace(like.step, a0=self.a0, a1=self.a1, a2=self.a2, a3=self.a3, a4=self.a4),
            transfer=replace(like.transfer, x0=self.x0, bandwidth=bandwidth),
            intake=replace(like.intake, fixed_s=self.intake, per_token_s=self.intake_per_token),
        )

    def scaled(self, factor: float) -> Constants:
        """The same in another unit of time."""
        return _constants(_values(self) * factor)


NAMES = tuple(Constants.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants in seconds of the log; `spread`: of log(time / model's) by kind of time.

    `runs` counts the runs of the model that it took.
    """

    constants: Constants
    seen: frozenset[str]
    spread: dict[str, float]
    runs: int


def fit(samples: Sequence[CheckSample], engines: Sequence[EngineOptions]) -> Fit:
    """Fit to the legs of a run; `engines` give the sizes, their constants are not looked at."""
    return _Fitting(samples, engines).run()


def guess(samples: Sequence[CheckSample]) -> Constants:
    """Orders of magnitude from the log alone, where a fit may begin.

    a0 from the fastest streams, a1 from the fastest prefill, the rest as small parts of these.
    """
    tpot_s = [one.tpot_s for one in samples if one.tpot_s]
    first_s = [(one.first_s, one.leg.prompt_tokens) for one in samples if one.first_s]
    whole = [s / tokens for s, tokens in first_s if tokens > 0]
    a0 = float(np.quantile(tpot_s or [min(s for s, _ in first_s)], 0.1))
    # Of most prompts only a part is computed, so time per prompt token is far too little.
    a1 = float(np.quantile(whole, 0.5))
    return Constants(
        a0=a0,
        a1=a1,
        a2=a0 / 100,
        a3=a0 * 1e-6,
        a4=a1 * 1e-5,
        x0=a0,
        x1=a1 / 10,
        intake=a0 / 10,
        intake_per_token=a1 / 100,
    )


def line(overheads: Sequence[Overhead]) -> tuple[float, float]:
    """Seconds of a request, and per prompt token, by least absolute deviations; neither < 0."""
    x = np.array([one.prompt_tokens for one in overheads], dtype=float)
    y = np.array([one.seconds for one in overheads])
    weight = np.ones_like(y)
    fixed = slope = 0.0
    for _ in range(50):
        mean_x, mean_y = np.average(x, weights=weight), np.average(y, weights=weight)
        spread = float(np.sum(weight * (x - mean_x) ** 2))
        slope = float(np.sum(weight * (x - mean_x) * (y - mean_y)) / spread) if spread else 0.0
        slope = max(0.0, slope)
        fixed = max(0.0, float(mean_y - slope * mean_x))
        weight = 1.0 / np.maximum(np.abs(y - fixed - slope * x), 1e-6)
    return fixed, slope


class _Fitting:
    """One fit: the times of the log, and the model's as a function of the constants in units."""

    def __init__(self, samples: Sequence[CheckSample], engines: Sequence[EngineOptions]) -> None:
        self._samples = samples
        self._engines = engines
        self._unit = _values(guess(samples))
        self._runs = 0
        kinds = [one.kind for one in samples if one.first_s]
        kinds += ["tpot" for one in samples if one.tpot_s]
        self._groups = {kind: np.array([k == kind for k in kinds]) for kind in sorted(set(kinds))}
        measured = [one.first_s for one in samples if one.first_s]
        measured += [one.tpot_s for one in samples if one.tpot_s]
        self._measured = np.log(np.array(measured, dtype=float))

    def run(self) -> Fit:
        """Step until nothing gets better."""
        if not len(self._measured):
            raise RunError("the log times no leg that a fit could be made with")
        ends, seen = [], np.zeros(len(NAMES), dtype=bool)
        for damping in DAMPINGS:
            x = np.ones(len(NAMES))
            for width in WIDTHS:
                x, moves = self._descend(x, width, damping)
                seen |= moves
            residuals = self._residuals(x)
            ends.append((self._score(residuals), x, residuals))
        _, x, residuals = min(ends, key=lambda end: end[0])
        spread = {kind: _mad(residuals[of]) for kind, of in self._groups.items()}
        named = frozenset(name for name, is_seen in zip(NAMES, seen, strict=True) if is_seen)
        return Fit(_constants(x * self._unit), named, spread, self._runs)

    def _descend(self, x: Vector, width: float, damping: float) -> tuple[Vector, NDArray[np.bool_]]:
        """Gauss-Newton steps with one width; gives also which constants move anything."""
        seen = np.ones(len(x), dtype=bool)
        residuals = self._residuals(x)
        for _ in range(STEPS):
            scale = self._scales(residuals)
            slopes = self._slopes(x, width)
            seen = np.linalg.norm(slopes / scale[:, None], axis=0) * np.maximum(x, 1.0) > SEEN
            cost, better = _cost(residuals, scale), None
            for _ in range(TRIES):
                tried = _stepped(x, slopes * seen, residuals, scale, damping)
                found = self._residuals(tried)
                if _cost(found, scale) < cost:
                    better, damping = (tried, found), damping / 5
                    break
                damping *= 5
            if better is None:
                break
            x, residuals = better
            if _cost(residuals, scale) > cost * (1 - DONE):
                break
        return x, seen

    def _score(self, residuals: Vector) -> float:
        """A robust log-likelihood with its sign turned: each kind's spread is its own."""
        found = 0.0
        for of in self._groups.values():
            size = np.sort(np.abs(residuals[of]))
            kept = size[: max(1, math.ceil(KEPT * len(size)))]
            found += len(size) * math.log(LEAST_SPREAD + float(kept.mean()))
        return found

    def _residuals(self, x: Vector) -> Vector:
        """log(model / measured) of every time."""
        self._runs += 1
        constants = _constants(x * self._unit)
        engines = [constants.engine(one) for one in self._engines]
        ended = run_legs([one.leg for one in self._samples], engines)
        first, tpot = [], []
        for sample, leg in zip(self._samples, ended, strict=True):
            first_s, done_s = leg.first_token_s, leg.finished_s
            if first_s is None or done_s is None:
                raise RunError("the engine model never finishes a request: its KV is too small")
            if sample.first_s:
                first.append(first_s - sample.leg.sent_s)
            if sample.tpot_s:
                tpot.append((done_s - first_s) / (sample.leg.output_tokens - 1))
        model: Vector = np.log(np.array(first + tpot))
        difference: Vector = model - self._measured
        return difference

    def _slopes(self, x: Vector, relative: float) -> Vector:
        """Derivatives by differences, none of which looks below zero."""
        columns = []
        for at, value in enumerate(x):
            width = relative * max(value, LEAST_WIDTH)
            above, below = x.copy(), x.copy()
            above[at], below[at] = value + width, max(LEAST, value - width)
            difference = self._residuals(above) - self._residuals(below)
            columns.append(difference / (above[at] - below[at]))
        return np.stack(columns, axis=1)

    def _scales(self, residuals: Vector) -> Vector:
        scale = np.empty(len(residuals))
        for of in self._groups.values():
            scale[of] = max(LEAST_SPREAD, _mad(residuals[of]))
        return scale


def _stepped(x: Vector, slopes: Vector, residuals: Vector, scale: Vector, damping: float) -> Vector:
    """One damped step; what it would take below zero is set there, the rest solved again."""
    weight = _weights(residuals / scale) / scale**2
    square = slopes.T @ (weight[:, None] * slopes)
    right = slopes.T @ (weight * residuals)
    free, step = np.ones(len(x), dtype=bool), np.zeros(len(x))
    for _ in range(len(x)):
        at = np.flatnonzero(free)
        part, target = square[np.ix_(at, at)], right[at] + square[np.ix_(at, ~free)] @ step[~free]
        ridge = damping * np.diag(part) + 1e-9 * max(1e-30, float(np.trace(square)))
        step[at] = np.linalg.solve(part + np.diag(ridge), -target)
        low = free & (x + step < LEAST)
        if not low.any():
            break
        free &= ~low
        step[low] = LEAST - x[low]
    most = LONGEST * np.maximum(x, 1.0)
    stepped: Vector = np.maximum(LEAST, x + np.clip(step, -most, most))
    return stepped


def _weights(ratios: Vector) -> Vector:
    size = np.abs(ratios)
    weights: Vector = np.where(size > TRIM, 0.0, np.minimum(1.0, HUBER / np.maximum(size, 1e-12)))
    return weights


def _cost(residuals: Vector, scale: Vector) -> float:
    size = np.minimum(np.abs(residuals / scale), TRIM)
    huber = np.where(size < HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
    return float(huber.sum())


def _mad(values: Vector) -> float:
    return MAD * float(np.median(np.abs(values)))


def _values(constants: Constants) -> Vector:
    return np.array([getattr(constants, name) for name in NAMES])


def _constants(values: Vector) -> Constants:
    return Constants(*(float(one) for one in values))
