"""The price of running streams' time, learned from the share of answers that miss the TPOT target.

Dual ascent on the constraint "at most a tenth of the answers miss the TPOT target" (Boyd &
Vandenberghe, Convex Optimization, 5.4). An answer that misses raises the logarithm of the price,
any other lowers it. So the price settles where a tenth misses. The price is bounded, since the
target may be unreachable.
"""

from __future__ import annotations

import math
from typing import Final

MISS_RATIO: Final = 0.1
"""Share of answers that may miss: the target is for the 90th percentile."""
RATE: Final = 0.02
"""Step of the logarithm: 40 misses, or 350 kept targets, move the price between its bounds."""
LOWEST: Final = 0.7
HIGHEST: Final = 1.4
"""Bounds found in the league: below, decode steps become too slow, above, first tokens."""


class SloPressure:
    """A factor on the weights that protect running streams, LOWEST to HIGHEST; 1 to begin with."""

    __slots__ = ("_log", "_target_s")

    def __init__(self, tpot_target_s: float) -> None:
        self._target_s = tpot_target_s
        self._log = 0.0

    def aim_at(self, tpot_target_s: float) -> None:
        """Set another target; the price is kept and moves on from there."""
        self._target_s = tpot_target_s

    @property
    def price(self) -> float:
        """The factor for weights that protect running streams."""
        return math.exp(self._log)

    def observe_tpot(self, tpot_s: float) -> None:
        """Add an answer's mean time per output token after the first, in seconds."""
        missed = 1.0 if tpot_s > self._target_s else 0.0
        moved = self._log + RATE * (missed - MISS_RATIO)
        self._log = min(math.log(HIGHEST), max(math.log(LOWEST), moved))
