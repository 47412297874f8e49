"""How wrong predictions lately were: quantiles of realised over predicted, in a bounded window.

A mean says what to expect, a quantile says when something is late. Ratios, not differences: a
prefill of 10 s is off by more than one of 0.1 s, but by the same factor.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort

WINDOW = 128
"""Ratios kept: about a 95th percentile's worth (six above it)."""
FEW = 8
"""Below so many, the prior speaks."""
PRIOR_RATIO = 2.0
"""What is late before anything was seen: twice the prediction."""
SHORT_S = 0.05
"""A shorter prediction is mostly the network and an engine's step: its ratio says nothing of
longer ones, so it is not kept, and nothing is called late before this time's ratio is up."""


class Residuals:
    """The last `WINDOW` ratios of realised to predicted seconds, oldest out first."""

    __slots__ = ("_at", "_ordered", "_ring")

    def __init__(self) -> None:
        # Arrays of doubles: a line per pair of instances keeps one of these.
        self._ring = array("d")
        self._ordered = array("d")
        self._at = 0

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, ratio: float) -> None:
        """Take in one ratio; bounded time and memory."""
        if len(self._ring) < WINDOW:
            self._ring.append(ratio)
        else:
            del self._ordered[bisect_left(self._ordered, self._ring[self._at])]
            self._ring[self._at] = ratio
            self._at = (self._at + 1) % WINDOW
        insort(self._ordered, ratio)

    def quantile(self, q: float) -> float | None:
        """The ratio that a share `q` (0..1) of the window does not exceed; None with too few."""
        count = len(self._ordered)
        if count < FEW:
            return None
        return self._ordered[min(count - 1, int(q * count))]

    def observe(self, predicted_s: float, realised_s: float) -> None:
        """Take in one prediction that came true."""
        if predicted_s >= SHORT_S and realised_s > 0.0:
            self.add(realised_s / predicted_s)

    def bound_s(self, predicted_s: float, q: float) -> float:
        """When something predicted to take `predicted_s` is late; never before it."""
        ratio = self.quantile(q)
        return max(
            predicted_s, max(predicted_s, SHORT_S) * (PRIOR_RATIO if ratio is None else ratio)
        )
