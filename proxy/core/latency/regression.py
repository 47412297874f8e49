"""Online linear regression of a duration, and the quantiles of its residuals."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Final

WINDOW: Final = 128
"""Memory of a line in observations: each one multiplies the older ones by 1 - 1/WINDOW."""
CLIP: Final = 2.0
"""An observation is clipped to between 1/CLIP and CLIP times its prediction, so that one stall
does not move the model."""
PRIOR_WEIGHT: Final = 4.0
"""A point of the prior mostly counts as this many observations; they fade like the others."""
SHAPE_WEIGHT: Final = 0.5


class OnlineRegression:
    """y = p * f + q * g with p, q >= 0, by least squares of relative errors with forgetting.

    `prior`: points (f, g), and how many observations each of them counts as.

    `toward` replaces what is left of the prior by a line learned from other instances. `shape`: a
    point (f, g) at which the ratio q / p of that line keeps a small weight for ever, for a term on
    which few observations depend.
    """

    __slots__ = ("_left", "_points", "_prior", "_s", "_shape", "_toward", "p", "q", "residuals")

    def __init__(
        self,
        p: float,
        q: float,
        prior: tuple[tuple[float, float, float], ...],
        shape: tuple[float, float] | None = None,
    ) -> None:
        self.p, self.q = p, q
        self.residuals = Residuals()
        self._prior = self._toward = p, q
        ff = fg = gg = 0.0
        for f, g, observations in prior:
            weight = observations / self.at(f, g) ** 2
            ff, fg, gg = ff + weight * f * f, fg + weight * f * g, gg + weight * g * g
        self._points = ff, fg, gg
        self._left = 1.0
        self._s = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._shape = shape

    def at(self, f: float, g: float) -> float:
        """The predicted y."""
        return self.p * f + self.q * g

    def observe(self, f: float, g: float, y: float, beside: float = 0.0) -> None:
        """Add an observation of `y`, of which `beside` is not explained by this line.

        The larger that part, the smaller the observation's weight. Constant time and memory.
        """
        expected = self.at(f, g)
        if expected > 0.0 and (y > beside or beside):
            self.residuals.add(max(0.0, y) / (expected + beside))
            self.learn(f, g, y, beside)

    def learn(self, f: float, g: float, y: float, beside: float) -> None:
        """`observe` without a residual, for a line whose quantiles are not used."""
        expected = self.at(f, g)
        y -= beside
        if expected <= 0.0 or (y <= 0.0 and not beside):
            return
        weight = (expected / (expected + beside)) ** 2
        kept = 1.0 - weight / WINDOW
        self._s = _faded(self._s, kept)
        self._left *= kept
        self._add(f, g, min(max(y, expected / CLIP), expected * CLIP), weight)
        self._solve()

    def toward(self, p: float, q: float) -> None:
        """Replace what is left of the prior by the line (p, q), learned from other instances."""
        self._toward = p, q
        self._solve()

    def legacy(self) -> list[float]:
        """The learned values, for `adopt` in another process: both priors, then the sums."""
        return [*self._prior, *self._toward, *self._sums()]

    def adopt(self, legacy: Sequence[float]) -> None:
        """Start from another process's `legacy`, if its prior, the unit of the sums, is equal."""
        p, q, *learned = legacy
        if (p, q) == self._prior and all(math.isfinite(x) and x >= 0.0 for x in learned):
            p, q, ff, fg, gg, f1, g1 = learned
            self._toward = p, q
            self._s = ff, fg, gg, f1, g1
            self._left = 0.0
            self._solve()

    def _add(self, f: float, g: float, y: float, weight: float) -> None:
        # In units of the prior's prediction, so that short and long prompts count alike.
        p, q = self._prior
        unit = p * f + q * g
        f, g, y = f / unit, g / unit, y / unit
        ff, fg, gg, f1, g1 = self._s
        self._s = (
            ff + weight * f * f,
            fg + weight * f * g,
            gg + weight * g * g,
            f1 + weight * f * y,
            g1 + weight * g * y,
        )

    def _sums(self) -> tuple[float, float, float, float, float]:
        """Sums of the normal equations: the observations and what is left of the prior."""
        (ff, fg, gg, f1, g1), left = self._s, self._left
        (a, b, c), (p, q) = self._points, self._toward
        return (
            ff + left * a,
            fg + left * b,
            gg + left * c,
            f1 + left * (p * a + q * b),
            g1 + left * (p * b + q * c),
        )

    def _solve(self) -> None:
        ff, fg, gg, f1, g1 = self._sums()
        if self._shape is not None:
            # One more observation, 0 = q * g - (q1 / p1) * p * g, weighted.
            (p0, q0), (p1, q1), (f, g) = self._prior, self._toward, self._shape
            if p1 > 0.0:
                g /= p0 * f + q0 * g
                r = q1 / p1 * g
                ff, fg, gg = (
                    ff + SHAPE_WEIGHT * r * r,
                    fg - SHAPE_WEIGHT * r * g,
                    gg + SHAPE_WEIGHT * g * g,
                )
        det = ff * gg - fg * fg
        if det > 1e-9 * ff * gg:
            p, q = (f1 * gg - g1 * fg) / det, (g1 * ff - f1 * fg) / det
            if p >= 0.0 and q >= 0.0:
                self.p, self.q = p, q
                return
        # Singular, or a coefficient would be negative: fit each term alone and keep the better.
        by_f, by_g = (f1 / ff if ff else 0.0), (g1 / gg if gg else 0.0)
        self.p, self.q = (by_f, 0.0) if f1 * by_f >= g1 * by_g else (0.0, by_g)


def _faded(
    sums: tuple[float, float, float, float, float], by: float
) -> tuple[float, float, float, float, float]:
    """The sums, each multiplied by `by`."""
    a, b, c, d, e = sums
    return a * by, b * by, c * by, d * by, e * by


PRIOR_LEFT: Final = 0.02
"""The prior's weight does not fall below this part, so that there always is one solution."""


class JointRegression:
    """y = sum of c[i] * x[i] with all c >= 0, by least squares of relative errors with forgetting.

    For terms that only show together. Errors are relative to all of y. Coefficients are kept in
    units of the prior's; `prior` must be above 0 everywhere. `points`: rows x of the prior, and how
    many observations each of them counts as.
    """

    __slots__ = ("_a", "_b", "_left", "_prior", "_prior_a", "_prior_b", "c")

    def __init__(
        self, prior: Sequence[float], points: Sequence[tuple[Sequence[float], float]]
    ) -> None:
        count = len(prior)
        self.c = list(prior)
        self._prior = list(prior)
        self._left = 1.0
        self._a = [[0.0] * count for _ in range(count)]
        self._b = [0.0] * count
        for x, weight in points:
            self._add(x, self.at(x), self.at(x), weight)
        self._prior_a, self._prior_b = self._a, self._b
        self._a = [[0.0] * count for _ in range(count)]
        self._b = [0.0] * count

    def at(self, x: Sequence[float]) -> float:
        """The predicted y."""
        y = 0.0
        for i in range(len(self.c)):
            y += self.c[i] * x[i]
        return y

    def learn(self, x: Sequence[float], y: float, beside: float) -> None:
        """Add an observation of `y`, of which `beside` is not explained by these terms."""
        whole = self.at(x) + beside
        if whole <= 0.0 or y <= 0.0:
            return
        kept = 1.0 - 1.0 / WINDOW
        self._left *= kept
        for i in range(len(self.c)):
            self._b[i] *= kept
            row = self._a[i]
            for j in range(len(self.c)):
                row[j] *= kept
        self._add(x, min(max(y, whole / CLIP), whole * CLIP) - beside, whole, 1.0)
        self._solve()

    def _add(self, x: Sequence[float], y: float, whole: float, weight: float) -> None:
        count = len(self.c)
        scaled = [x[i] * self._prior[i] / whole for i in range(count)]
        for i in range(count):
            part = weight * scaled[i]
            self._b[i] += part * y / whole
            row = self._a[i]
            for j in range(count):
                row[j] += part * scaled[j]

    def _solve(self) -> None:
        """Least squares; while a coefficient would be negative, the most negative one is 0."""
        left = max(self._left, PRIOR_LEFT)
        free = list(range(len(self.c)))
        found = self._solved(free, left)
        while free and min(found) < 0.0:
            del free[found.index(min(found))]
            found = self._solved(free, left)
        self.c = [0.0] * len(self.c)
        for i, value in zip(free, found, strict=True):
            self.c[i] = value * self._prior[i]

    def _solved(self, free: list[int], left: float) -> list[float]:
        """The coefficients of the `free` terms, all others being 0, by elimination."""
        rows = [
            [self._a[i][j] + left * self._prior_a[i][j] for j in free]
            + [self._b[i] + left * self._prior_b[i]]
            for i in free
        ]
        count = len(free)
        for i in range(count):
            pivot = rows[i]
            for k in range(i + 1, count):
                ratio = rows[k][i] / pivot[i]
                for j in range(i, count + 1):
                    rows[k][j] -= ratio * pivot[j]
        found = [0.0] * count
        for i in range(count - 1, -1, -1):
            rest = rows[i][count]
            for j in range(i + 1, count):
                rest -= rows[i][j] * found[j]
            found[i] = rest / rows[i][i]
        return found


RESIDUALS_WINDOW: Final = 128
"""Ratios kept: enough for a 95th percentile (six are above it)."""
FEW: Final = 8
"""With fewer ratios than this PRIOR_RATIO is used."""
PRIOR_RATIO: Final = 2.0
"""Without measured ratios, a leg is late after twice its prediction."""
SHORT_S: Final = 0.05
"""A shorter time is mostly network latency and an engine's step, so its ratio does not apply to
longer ones. It is not kept, and no bound is computed from a shorter prediction."""


class Residuals:
    """The last RESIDUALS_WINDOW ratios of measured to predicted seconds."""

    __slots__ = ("_at", "_ordered", "_ring")

    def __init__(self) -> None:
        # Arrays of doubles save memory: every pair of instances has one of these.
        self._ring = array("d")
        self._ordered = array("d")
        self._at = 0

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, ratio: float) -> None:
        """Add a ratio; the oldest is dropped from a full window."""
        if len(self._ring) < RESIDUALS_WINDOW:
            self._ring.append(ratio)
        else:
            del self._ordered[bisect_left(self._ordered, self._ring[self._at])]
            self._ring[self._at] = ratio
            self._at = (self._at + 1) % RESIDUALS_WINDOW
        insort(self._ordered, ratio)

    def quantile(self, q: float) -> float | None:
        """The `q` quantile (0..1) of the ratios in the window; None with fewer than FEW."""
        count = len(self._ordered)
        if count < FEW:
            return None
        return self._ordered[min(count - 1, int(q * count))]

    def observe(self, predicted_s: float, realised_s: float) -> None:
        """Add the ratio of a measured to a predicted time, unless the prediction is too short."""
        if predicted_s >= SHORT_S and realised_s > 0.0:
            self.add(realised_s / predicted_s)

    def bound_s(self, predicted_s: float, q: float) -> float:
        """The time after which a leg predicted to take `predicted_s` is late; at least that."""
        ratio = self.quantile(q)
        return max(
            predicted_s, max(predicted_s, SHORT_S) * (PRIOR_RATIO if ratio is None else ratio)
        )
