"""How far a run is from the clairvoyant, and what the cheapest known way to its attainment costs.

score = GPU hours / the clairvoyant's + 5 x (the clairvoyant's attainment - attainment, if positive)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from analysis.plan.measured import CLAIRVOYANT, STATIC, Run

POINT_WEIGHT = 5.0
Frontier = Sequence[tuple[float, float]]
"""GPU hours with the attainment that they buy, both rising."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The clairvoyant of one seed: its cheapest schedule at the target, and its frontier."""

    best: Run
    frontier: Frontier

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Reference | None:
        """From the runs of one seed; None without the clairvoyant. A fixed fleet is a schedule."""
        known = [one for one in runs if one.policy == CLAIRVOYANT or is_static(one)]
        best = next((one for one in known if one.is_best), None)
        if best is None:
            return None
        return cls(best, frontier((one.gpu_h, one.attainment_ratio) for one in known))

    def score(self, run: Run) -> float:
        """How far a run is from the clairvoyant."""
        short = max(0.0, self.best.attainment_ratio - run.attainment_ratio)
        return run.gpu_h / self.best.gpu_h + POINT_WEIGHT * short

    def at_same(self, run: Run) -> float | None:
        """GPU hours over the least that attain as much; None where nothing known does."""
        least = at_least(self.frontier, run.attainment_ratio)
        return None if least is None else run.gpu_h / least


def is_static(run: Run) -> bool:
    """Whether a run is of a fixed fleet."""
    return run.policy.startswith(f"{STATIC}:")


def frontier(points: Iterable[tuple[float, float]]) -> Frontier:
    """The points than which no cheaper one attains as much."""
    kept: list[tuple[float, float]] = []
    for gpu_h, attainment in sorted(points):
        if not kept or attainment > kept[-1][1]:
            kept.append((gpu_h, attainment))
    return kept


def at_least(points: Frontier, attainment_ratio: float) -> float | None:
    """The least GPU hours with at least this attainment."""
    return next((gpu_h for gpu_h, found in points if found >= attainment_ratio), None)
