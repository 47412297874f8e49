"""The engine model's constants, fitted to the log of a run by scipy's least squares.

The regression function is the model itself: every leg is run through it at the time and on the
engine of the log (`replayer.virtual.legs`). Queues, batches, chunks, cache hits and pulls are thus
the model's own, and none has to be guessed from timestamps. A residual is the logarithm of modelled
over measured time, divided by the spread of its kind of time. The loss functions give little weight
to residuals beyond LOSS_SCALE spreads, so a disturbed request does not move the fit.

A constant without any effect in this run (no transfer: `x0`, `x1`) is not in `Fit.seen`, and its
value means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from analysis.check.logs import CheckSample, Overhead
from analysis.runs import RunError
from replayer.engine.types import EngineOptions
from replayer.virtual.legs import run_legs

Vector = NDArray[np.float64]
LEAST_SPREAD = 0.001
"""Least spread of residuals of one kind: a log's times have errors too."""
WIDTHS = (0.5, 0.5, 0.2, 0.2, 0.05, 0.05, 0.01, 0.01)
"""Relative step widths of the numerical derivative, one descent each.

A leg joins its engine at the end of a step, and both which step that is and when it ends depend on
all steps before it. So the modelled times jump by a step's length with every small change of a
constant. Wide differences average over these jumps; narrow ones are exact once the steps are right.
"""
LEAST_WIDTH = 0.3
"""A width is relative to the constant, but at least to this part of its first guess."""
LEAST = 1e-6
"""Lower bound of a constant, in units of its first guess; stands for zero."""
SEEN = 1e-2
"""A constant counts as seen if doubling it moves the times by about this many spreads together."""
LOSSES = ("cauchy", "arctan")
"""Loss functions of the fits, of which the better is kept: either may stop at a local minimum."""
LOSS_SCALE = 1.5
CALLS = 8
"""Most steps of one descent; spreads are then estimated again."""
TOLERANCE = 1e-3
"""A descent ends when a step lowers the cost by less than this part."""
KEPT = 0.9
"""Share of the residuals, the smallest ones, by which the better of two fits is chosen."""
MAD = 1.4826
"""Factor from the median absolute residual to the standard deviation of a normal distribution."""

JITTER = (1.0, 0.9995, 1.0005, 0.999, 1.001, 0.9985, 1.0015, 0.998, 1.002)
"""The prediction is the median of runs with the constants multiplied by these factors. They differ
by less than a fit can resolve. But one early request that just misses a step changes the load that
the router sees, and so later placements. Single runs of some hundred requests differ by more than
10 % in p50 and p90."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Seconds, as in `replayer.engine.costs`: step (a0..a4), transfer (x0, x1), intake of a leg.

    `x1` is a transfer's time per token: bytes per token over bandwidth, which no log tells apart.
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
        """Return `like` with these constants instead of its own."""
        bandwidth = like.transfer.bytes_per_token / self.x1
        return replace(
            like,
            step=replace(like.step, a0=self.a0, a1=self.a1, a2=self.a2, a3=self.a3, a4=self.a4),
            transfer=replace(like.transfer, x0=self.x0, bandwidth=bandwidth),
            intake=replace(like.intake, fixed_s=self.intake, per_token_s=self.intake_per_token),
        )

    def scaled(self, factor: float) -> Constants:
        """Return the constants with every time multiplied by `factor`."""
        return Constants(*(value * factor for value in astuple(self)))


NAMES = tuple(Constants.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants in seconds of the log, and the names of those that have an effect in this run.

    `spread` is the standard deviation of log(model / measured) by kind of time, estimated from the
    median. `runs` counts the runs of the model that the fit took.
    """

    constants: Constants
    seen: frozenset[str]
    spread: dict[str, float]
    runs: int


def fit(samples: Sequence[CheckSample], engines: Sequence[EngineOptions]) -> Fit:
    """Fit the constants to a run's legs; `engines` give the sizes, their own constants are unused.

    Raises RunError when no leg is timed, or when the engines' KV is too small for a request.
    """
    return _Fitting(samples, engines).run()


def with_unseen(fitted: Fit, engines: Sequence[EngineOptions]) -> Fit:
    """Replace constants that had no effect in the run by those of `engine-sim`.

    Decisions of the prediction may differ from the run's, and may need a transfer where the run had
    none.
    """
    own, found = constants_of(engines[0]), fitted.constants
    unseen = {name: getattr(own, name) for name in NAMES if name not in fitted.seen}
    return replace(fitted, constants=replace(found, **unseen))


def constants_of(engine: EngineOptions) -> Constants:
    """Return an engine model's constants."""
    step, transfer, intake = engine.step, engine.transfer, engine.intake
    x1 = transfer.bytes_per_token / transfer.bandwidth
    steps = (step.a0, step.a1, step.a2, step.a3, step.a4)
    return Constants(*steps, transfer.x0, x1, intake.fixed_s, intake.per_token_s)


def guess(samples: Sequence[CheckSample]) -> Constants:
    """Estimate orders of magnitude from the log alone, for a fit to begin with.

    a0 comes from the fastest streams, a1 from the median prefill, the others are small parts of
    these.
    """
    tpot_s = [one.tpot_s for one in samples if one.tpot_s]
    first_s = [(one.first_s, one.leg.prompt_tokens) for one in samples if one.first_s]
    whole = [s / tokens for s, tokens in first_s if tokens > 0]
    a0 = float(np.quantile(tpot_s or [min(s for s, _ in first_s)], 0.1))
    # Far too small, since most of a prompt is cached; only a start for the fit.
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
    """Fit seconds per request and per prompt token by least absolute deviations; neither is < 0.

    As a linear program: every overhead is the line plus a positive less a negative deviation.
    """
    from scipy.optimize import linprog  # here, as it takes a second to import
    from scipy.sparse import eye_array, hstack

    # In ms and thousands of tokens, since the solver's tolerances are absolute (1e-7).
    y_ms = np.array([one.seconds for one in overheads]) * 1e3
    x = np.array([one.prompt_tokens for one in overheads]) / 1e3
    deviation = eye_array(len(x))
    sums = hstack([np.column_stack([np.ones_like(x), x]), deviation, -deviation])
    # Prompts of one length cannot tell the two apart: the small cost then prefers a slope of 0.
    cost = np.concatenate([[0.0, 1e-6], np.ones(2 * len(x))])
    fixed_ms, us_per_token = linprog(cost, A_eq=sums, b_eq=y_ms).x[:2]
    return float(fixed_ms) * 1e-3, float(us_per_token) * 1e-6


class _Fitting:
    """One fit. Its variables `x` are the constants, each in units of its first guess."""

    def __init__(self, samples: Sequence[CheckSample], engines: Sequence[EngineOptions]) -> None:
        self._samples = samples
        self._engines = engines
        self._unit = np.array(astuple(guess(samples)))
        self._runs = 0
        kinds = [one.kind for one in samples if one.first_s]
        kinds += ["tpot" for one in samples if one.tpot_s]
        self._groups = {kind: np.array([k == kind for k in kinds]) for kind in sorted(set(kinds))}
        measured = [one.first_s for one in samples if one.first_s]
        measured += [one.tpot_s for one in samples if one.tpot_s]
        self._measured = np.log(np.array(measured, dtype=float))

    def run(self) -> Fit:
        """Descend with each loss through all widths; return the better end."""
        if not len(self._measured):
            raise RunError("the log has no leg to fit")
        ends, seen = [], np.zeros(len(NAMES), dtype=bool)
        for loss in LOSSES:
            x = np.ones(len(NAMES))
            for width in WIDTHS:
                x, moves = self._descend(x, width, loss)
                seen |= moves
            residuals = self._residuals(x)
            ends.append((self._score(residuals), x, residuals))
        _, x, residuals = min(ends, key=lambda end: end[0])
        spread = {kind: _mad(residuals[of]) for kind, of in self._groups.items()}
        named = frozenset(name for name, is_seen in zip(NAMES, seen, strict=True) if is_seen)
        return Fit(self._constants(x), named, spread, self._runs)

    def _descend(self, x: Vector, width: float, loss: str) -> tuple[Vector, NDArray[np.bool_]]:
        """Minimise from `x` on; also returns which constants have an effect at the end."""
        from scipy.optimize import least_squares  # here, as it takes a second to import

        scale = self._scales(self._residuals(x))

        def slopes(x: Vector) -> Vector:
            found: Vector = self._slopes(x, width) / scale[:, None]
            return found * _has_effect(found, x)

        end = least_squares(
            lambda x: self._residuals(x) / scale,
            x,
            slopes,
            bounds=(LEAST, np.inf),
            loss=loss,
            f_scale=LOSS_SCALE,
            ftol=TOLERANCE,
            max_nfev=CALLS,
        )
        return end.x, _has_effect(end.jac, end.x)

    def _score(self, residuals: Vector) -> float:
        """Return minus a robust log-likelihood, in which every kind of time has its own spread."""
        found = 0.0
        for of in self._groups.values():
            size = np.sort(np.abs(residuals[of]))
            kept = size[: max(1, math.ceil(KEPT * len(size)))]
            found += len(size) * math.log(LEAST_SPREAD + float(kept.mean()))
        return found

    def _residuals(self, x: Vector) -> Vector:
        """Run the model; return log(model / measured) of all times."""
        self._runs += 1
        constants = self._constants(x)
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
        """Return the derivatives by central differences, cut off at the lower bound."""
        columns = []
        for at, value in enumerate(x):
            width = relative * max(value, LEAST_WIDTH)
            above, below = x.copy(), x.copy()
            above[at], below[at] = value + width, max(LEAST, value - width)
            difference = self._residuals(above) - self._residuals(below)
            columns.append(difference / (above[at] - below[at]))
        return np.stack(columns, axis=1)

    def _scales(self, residuals: Vector) -> Vector:
        """Return for each residual the spread of its kind."""
        scale = np.empty(len(residuals))
        for of in self._groups.values():
            scale[of] = max(LEAST_SPREAD, _mad(residuals[of]))
        return scale

    def _constants(self, x: Vector) -> Constants:
        return Constants(*(x * self._unit).tolist())


def _has_effect(slopes: Vector, x: Vector) -> NDArray[np.bool_]:
    effect: NDArray[np.bool_] = np.linalg.norm(slopes, axis=0) * np.maximum(x, 1.0) > SEEN
    return effect


def _mad(residuals: Vector) -> float:
    return MAD * float(np.median(np.abs(residuals)))
