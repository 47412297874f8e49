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
Four = tuple[float, float, float, float]
"""A value for each term. Tuples of fixed length stay numbers of the machine when compiled."""


class JointRegression:
    """y = sum of c[i] * x[i] of four terms with all c >= 0, by least squares with forgetting.

    For terms that only show together. Errors are relative to all of y. Coefficients are kept in
    units of the prior's; `prior` must be above 0 everywhere. `points`: rows x of the prior, and how
    many observations each of them counts as.
    """

    __slots__ = ("_left", "_prior", "_prior_sums", "_sums", "c")

    def __init__(self, prior: Four, points: Sequence[tuple[Four, float]]) -> None:
        self.c = self._prior = prior
        self._left = 1.0
        # Of the normal equations: the matrix's upper triangle by rows, then the right side.
        self._prior_sums = [0.0] * 14
        for x, weight in points:
            terms = self._terms(x, self.at(x), self.at(x), weight)
            self._prior_sums = [a + b for a, b in zip(self._prior_sums, terms, strict=True)]
        self._sums = [0.0] * 14

    def at(self, x: Four) -> float:
        """The predicted y."""
        c = self.c
        return c[0] * x[0] + c[1] * x[1] + c[2] * x[2] + c[3] * x[3]

    def learn(self, x: Four, y: float, beside: float) -> None:
        """Add an observation of `y`, of which `beside` is not explained by these terms."""
        whole = self.at(x) + beside
        if whole <= 0.0 or y <= 0.0:
            return
        kept = 1.0 - 1.0 / WINDOW
        self._left *= kept
        terms = self._terms(x, min(max(y, whole / CLIP), whole * CLIP) - beside, whole, 1.0)
        self._sums = [a * kept + b for a, b in zip(self._sums, terms, strict=True)]
        self._solve()

    def _terms(self, x: Four, y: float, whole: float, weight: float) -> list[float]:
        """What an observation adds to the sums."""
        p = self._prior
        a, b = x[0] * p[0] / whole, x[1] * p[1] / whole
        c, d = x[2] * p[2] / whole, x[3] * p[3] / whole
        wa, wb, wc, wd, y = weight * a, weight * b, weight * c, weight * d, y / whole
        matrix = [wa * a, wa * b, wa * c, wa * d, wb * b, wb * c, wb * d, wc * c, wc * d, wd * d]
        return [*matrix, wa * y, wb * y, wc * y, wd * y]

    def _solve(self) -> None:
        """Least squares; while a coefficient would be negative, the most negative one is 0."""
        left = max(self._left, PRIOR_LEFT)
        sums = [a + left * b for a, b in zip(self._sums, self._prior_sums, strict=True)]
        free = [True, True, True, True]
        found = _solved(sums, free)
        while (worst := min(found)) < 0.0:
            free[found.index(worst)] = False
            found = _solved(sums, free)
        p = self._prior
        self.c = found[0] * p[0], found[1] * p[1], found[2] * p[2], found[3] * p[3]


def _solved(sums: list[float], free: list[bool]) -> Four:
    """The solution in which the terms that are not `free` are 0, by elimination.

    `sums`: the matrix's upper triangle, which is symmetric, and the right side.
    """
    aa, ab, ac, ad, bb, bc, bd, cc, cd, dd, ay, by, cy, dy = sums
    if not free[0]:
        aa, ab, ac, ad, ay = 1.0, 0.0, 0.0, 0.0, 0.0
    if not free[1]:
        ab, bb, bc, bd, by = 0.0, 1.0, 0.0, 0.0, 0.0
    if not free[2]:
        ac, bc, cc, cd, cy = 0.0, 0.0, 1.0, 0.0, 0.0
    if not free[3]:
        ad, bd, cd, dd, dy = 0.0, 0.0, 0.0, 1.0, 0.0
    r, s, t = ab / aa, ac / aa, ad / aa
    bb, bc, bd, by = bb - r * ab, bc - r * ac, bd - r * ad, by - r * ay
    cc, cd, cy = cc - s * ac, cd - s * ad, cy - s * ay
    dd, dy = dd - t * ad, dy - t * ay
    r, s = bc / bb, bd / bb
    cc, cd, cy = cc - r * bc, cd - r * bd, cy - r * by
    dd, dy = dd - s * bd, dy - s * by
    r = cd / cc
    d = (dy - r * cy) / (dd - r * cd)
    c = (cy - cd * d) / cc
    b = (by - bc * c - bd * d) / bb
    return (ay - ab * b - ac * c - ad * d) / aa, b, c, d


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
