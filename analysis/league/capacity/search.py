"""The highest load at which a share is kept, by a search that tries few loads: shares are noisy.

The share falls as the load grows, but what a run measures of it is noisy: a load may seem better
than a lower one. So one lucky or unlucky load does not decide. Shares are smoothed to the nearest
that fall with the load (isotonic regression, by pooling neighbours). The answer is a bracket of two
neighbours among the loads that were tried: the last one that holds, and the first one that does
not. It is narrowed by bisection. Then one load is tried beyond each side, and where the bracket
moves by that, the search goes on.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

UP, DOWN = 1.5, 2.0
"""Factors by which the search moves while all loads hold, or none. High loads take long to run."""
FIRST = 1.0
MARGIN = 2
"""So many times the bracket's width away a load is tried beyond each side."""


@dataclass(frozen=True, slots=True)
class Point:
    """A load that was tried, and the share of each seed; `smooth`: after smoothing."""

    load: float
    shares: tuple[float, ...]
    smooth: float = math.nan

    @property
    def share(self) -> float:
        """The mean over seeds."""
        return fmean(self.shares)


Bracket = tuple[Point | None, Point | None]
"""The last load that holds, and the first that does not: neighbours. None: there is no such one."""


@dataclass(slots=True)
class Search:
    """A search for the highest load with at least `share`, from `least` to `most`.

    `width`: the bracket's, over its lower side. `tries`: most loads that are tried.
    """

    share: float
    least: float
    most: float
    width: float = 0.02
    tries: int = 20
    _points: list[Point] = field(default_factory=list)

    def next_load(self) -> float | None:
        """Return the load that is to be tried next; None at the end."""
        return None if len(self._points) >= self.tries else self._wanted()

    @property
    def is_cut(self) -> bool:
        """Whether the search ended before it was done, by `tries`."""
        return len(self._points) >= self.tries and self._wanted() is not None

    def _wanted(self) -> float | None:
        if not self._points:
            inside = self.least <= FIRST <= self.most
            return FIRST if inside else math.sqrt(self.least * self.most)
        last, first = self.bracket()
        if last is None or first is None:
            return self._outwards(all_hold=first is None)
        low, high = last.load, first.load
        if high / low > 1.0 + self.width:
            return math.sqrt(low * high)
        return next(iter(self._beyond(low, high)), None)

    def _outwards(self, *, all_hold: bool) -> float | None:
        if all_hold:
            highest = self._points[-1].load
            return None if highest >= self.most else min(UP * highest, self.most)
        lowest = self._points[0].load
        return None if lowest <= self.least else max(lowest / DOWN, self.least)

    def _beyond(self, low: float, high: float) -> list[float]:
        """Loads that are still to be tried on both sides of the bracket."""
        step = 1.0 + MARGIN * self.width
        loads = [one.load for one in self._points]
        wanted = []
        if low > self.least and not any(low / step**2 <= one < low for one in loads):
            wanted.append(max(low / step, self.least))
        if high < self.most and not any(high < one <= high * step**2 for one in loads):
            wanted.append(min(high * step, self.most))
        return wanted

    def told(self, load: float, shares: Sequence[float]) -> None:
        """Note the shares of a load."""
        at = bisect_right([one.load for one in self._points], load)
        self._points.insert(at, Point(load, tuple(shares)))

    def left(self) -> int:
        """Return how many more loads will be tried, about."""
        if self.next_load() is None:
            return 0
        last, first = self.bracket()
        if last is None or first is None:
            more = 3 + self._halvings(UP)
        else:
            low, high = last.load, first.load
            halvings = self._halvings(high / low)
            more = 2 + halvings if halvings else len(self._beyond(low, high))
        return min(more, self.tries - len(self._points))

    def _halvings(self, ratio: float) -> int:
        return max(0, math.ceil(math.log2(math.log(ratio) / math.log1p(self.width)) - 1e-9))

    @property
    def points(self) -> list[Point]:
        """What was tried, by load, smoothed."""
        smooth = falling([one.share for one in self._points])
        return [Point(p.load, p.shares, s) for p, s in zip(self._points, smooth, strict=True)]

    def bracket(self) -> Bracket:
        """Return what is known by now."""
        points = self.points
        held = sum(one.smooth >= self.share for one in points)
        return points[held - 1] if held else None, points[held] if held < len(points) else None

    def by_seed(self) -> list[float]:
        """Return the limit that each seed alone would have, between the loads that were tried.

        It is interpolated. A seed of which all loads hold, or none, has the last one or the first.
        """
        loads = [one.load for one in self._points]
        seeds = zip(*(one.shares for one in self._points), strict=True)
        return [crossing(loads, falling(shares), self.share) for shares in seeds]


def crossing(loads: Sequence[float], shares: Sequence[float], share: float) -> float:
    """Return the load at which falling shares go below one, within the loads."""
    held = sum(one >= share for one in shares)
    if held in (0, len(loads)):
        return loads[max(0, held - 1)]
    part = (shares[held - 1] - share) / (shares[held - 1] - shares[held])
    return loads[held - 1] * math.pow(loads[held] / loads[held - 1], part)


def falling(values: Sequence[float]) -> list[float]:
    """Return the nearest values (least squares) of which none is above the one before."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] < mean:
            before, many = pools.pop()
            mean, size = (before * many + mean * size) / (many + size), many + size
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]
