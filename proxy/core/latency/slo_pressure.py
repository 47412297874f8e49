"""How hard decoding is pressed against its target: the price of others' time, learned.

Dual ascent on the constraint "at most a tenth of the answers miss the TPOT target": every answer
that misses raises the logarithm of the price, every one that keeps it lowers it, so that the price
rests where a tenth misses (Boyd & Vandenberghe,
Convex Optimization, 5.4). It is bounded, since a target may be out of reach.
"""

from __future__ import annotations

import math

MISS_RATIO = 0.1
"""The target is one for the 90th percentile."""
RATE = 0.02
"""Some hundred answers move the price from one bound to the other."""
LOWEST, HIGHEST = 0.7, 1.4
"""Measured in the league: beyond these either steps or first tokens pay too much."""


class SloPressure:
    """A factor on the weights that protect running streams, LOWEST to HIGHEST; 1 to begin with."""

    __slots__ = ("_log", "_target_s")

    def __init__(self, tpot_target_s: float) -> None:
        self._target_s = tpot_target_s
        self._log = 0.0

    def aim_at(self, tpot_target_s: float) -> None:
        """Another target; the price moves on from where it is."""
        self._target_s = tpot_target_s

    @property
    def price(self) -> float:
        """The factor."""
        return math.exp(self._log)

    def observe_tpot(self, tpot_s: float) -> None:
        """An answer's mean time per output token after the first, seconds."""
        missed = 1.0 if tpot_s > self._target_s else 0.0
        moved = self._log + RATE * (missed - MISS_RATIO)
        self._log = min(math.log(HIGHEST), max(math.log(LOWEST), moved))
