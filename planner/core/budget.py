"""The limits that no proposal gets past: fewest replicas, and GPUs of all components together.

Several deployments may share GPUs: there each gets what it is worth, one replica after the other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import product

HOLD, RECONCILE = "gpu_budget_guard_hold", "gpu_budget_reconcile"
"""Why a target is another than the proposed one: it stays as it was; it is as near as fits."""
SHARED = "gpu_budget_shared"
"""Or others have the GPUs, or are worth more."""
OFF = -1


@dataclass(frozen=True, slots=True)
class Limits:
    """GPUs per replica and fewest replicas by component, and GPUs of all together; OFF: none."""

    gpus: Mapping[str, int]
    min_replicas: Mapping[str, int]
    max_gpus: int = OFF
    min_gpus: int = OFF

    def used(self, replicas: Mapping[str, int]) -> int:
        """GPUs of so many replicas."""
        return sum(self.gpus[name] * count for name, count in replicas.items())

    def is_over(self, replicas: Mapping[str, int]) -> bool:
        """Whether they take more than there is."""
        return self.max_gpus != OFF and self.used(replicas) > self.max_gpus

    def is_under(self, replicas: Mapping[str, int]) -> bool:
        """Whether they take fewer than are to be used; one more of the largest may be too many."""
        slack = max(self.gpus.values(), default=0) if self.min_gpus != self.max_gpus else 0
        return self.min_gpus != OFF and self.used(replicas) + slack <= self.min_gpus


@dataclass(frozen=True, slots=True)
class Bounded:
    """Targets within the limits, and why they are not the proposed ones; empty where they are."""

    targets: Mapping[str, int]
    reason: str = ""


def bounded(current: Mapping[str, int], wanted: Mapping[str, int], limits: Limits) -> Bounded:
    """The targets nearest to the wanted ones that fit.

    No component moves against its wish: one that is to grow does not shrink. If some are to grow
    and others to shrink, all of them move or none. At a full budget nothing grows unless another
    component was to shrink. Where the current fleet itself is over the budget, it is cut in
    proportion.
    """
    wanted = {name: max(n, limits.min_replicas.get(name, 0)) for name, n in wanted.items()}
    if not limits.is_over(wanted) and not limits.is_under(wanted):
        return Bounded(wanted)
    if limits.is_over(current):
        return Bounded(ceiling(wanted, limits), RECONCILE)
    if limits.is_under(wanted):
        return Bounded(floor(wanted, limits), RECONCILE)
    best = min(_between(current, wanted, limits), key=lambda one: _distance(one, wanted))
    return Bounded(best, HOLD if best == dict(current) else RECONCILE)


def _between(
    current: Mapping[str, int], wanted: Mapping[str, int], limits: Limits
) -> Iterator[dict[str, int]]:
    """Every fleet on the way from the current one to the wanted one that fits."""
    names = list(wanted)
    # What is wanted has no bound: a way ends where its component alone takes all GPUs.
    room = {n: limits.max_gpus // max(1, limits.gpus[n]) for n in names}
    ends = [min(wanted[n], max(room[n], current.get(n, 0))) for n in names]
    ways = [_way(current.get(name, 0), end) for name, end in zip(names, ends, strict=True)]
    opposed = any(way.step > 0 for way in ways if len(way) > 1) and any(
        way.step < 0 for way in ways if len(way) > 1
    )
    for counts in product(*ways):
        fleet = dict(zip(names, counts, strict=True))
        moved = {
            fleet[name] != current.get(name, 0)
            for name in names
            if wanted[name] != current.get(name, 0)
        }
        if limits.is_over(fleet) or (opposed and len(moved) > 1):
            continue
        yield fleet


def _way(begin: int, end: int) -> range:
    step = 1 if end >= begin else -1
    return range(begin, end + step, step)


def _distance(
    fleet: Mapping[str, int], wanted: Mapping[str, int]
) -> tuple[int, int, tuple[int, ...]]:
    """How far a fleet is from the wanted one: in all, at most in one component, and by name."""
    gaps = [abs(wanted[name] - count) for name, count in fleet.items()]
    return sum(gaps), max(gaps, default=0), tuple(gaps)


def ceiling(wanted: Mapping[str, int], limits: Limits) -> dict[str, int]:
    """The wanted fleet shrunk in proportion, each component with its fewest replicas at least.

    All are 0 where not even those fit.
    """
    fewest = {name: limits.min_replicas.get(name, 0) for name in wanted}
    if limits.is_over(fewest):
        return dict.fromkeys(wanted, 0)
    if not limits.is_over(wanted):
        return dict(wanted)
    scale = limits.max_gpus / limits.used(wanted)
    left, fleet, names = limits.max_gpus, {}, list(wanted)
    for at, name in enumerate(names):
        others = sum(limits.gpus[other] * fewest[other] for other in names[at + 1 :])
        room = (left - others) // limits.gpus[name]
        is_last = at == len(names) - 1
        share = room if is_last else min(room, math.floor(wanted[name] * scale))
        fleet[name] = max(fewest[name], min(share, wanted[name]) if is_last else share)
        left -= limits.gpus[name] * fleet[name]
    return fleet


def floor(wanted: Mapping[str, int], limits: Limits) -> dict[str, int]:
    """The wanted fleet grown in proportion; as it is, where that would break the ceiling."""
    used = limits.used(wanted)
    if not limits.is_under(wanted):
        return dict(wanted)
    scale = limits.min_gpus / used if used else math.inf
    grown = {
        n: count if math.isinf(scale) else math.ceil(count * scale) for n, count in wanted.items()
    }
    if math.isinf(scale):
        name = next(iter(wanted))
        grown[name] = math.ceil(limits.min_gpus / limits.gpus[name])
    return dict(wanted) if limits.is_over(grown) else grown


def within_step(current: Mapping[str, int], wanted: Mapping[str, int], most: int) -> dict[str, int]:
    """The wanted fleet, no component more than `most` replicas from the current one."""
    return {
        name: min(max(count, current.get(name, 0) - most), current.get(name, 0) + most)
        for name, count in wanted.items()
    }


STAYS = 1.5
"""A replica that runs is worth so many times one that has to be started with its GPUs."""
HOLD_S = 120.0
"""A deployment loses what is worth more elsewhere once it has been so for that long."""
LOW = 0.5
"""Chance that a forecast is too low: of what is kept in reserve the first part is needed so often.
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a deployment asks of the GPUs that it shares with others; in replicas.

    `wanted`: what it would have alone. `target`: ordered so far. `there`: with those that leave.
    `least`: its floor. `sure`: those that its load needs; `spare`: those for more of it. `rate`:
    requests per second that one serves within the targets, times the deployment's weight.
    """

    wanted: int
    target: int
    there: int
    least: int
    gpus: int
    rate: float = 0.0
    sure: float = 0.0
    spare: float = 0.0

    @property
    def used(self) -> int:
        """GPUs that no other deployment can have now."""
        return self.gpus * max(self.target, self.there)

    def worth(self, nth: int) -> float:
        """Requests per second that the nth replica serves on average, per GPU."""
        return self.rate * (self._needed(nth) - self._needed(nth - 1)) / self.gpus

    def _needed(self, count: int) -> float:
        """How many of so many replicas are needed on average."""
        beyond = min(self.spare, max(0.0, count - self.sure))
        share = 1.0 - beyond / (2.0 * self.spare) if self.spare > 0 else 0.0
        return min(count, self.sure) + LOW * beyond * share


def shares(claims: Mapping[str, Claim], max_gpus: int) -> dict[str, int]:
    """Replicas by deployment: the least of each, then one by one who is worth most per GPU."""
    found = {name: one.least for name, one in claims.items()}
    left = max_gpus - sum(one.gpus * one.least for one in claims.values())
    heap = [_next(name, one, one.least) for name, one in claims.items() if one.wanted > one.least]
    heapify(heap)
    while heap:
        *_, name = heappop(heap)
        one = claims[name]
        if one.gpus > left:
            continue  # a deployment of smaller replicas may still fit
        left -= one.gpus
        found[name] += 1
        if found[name] < one.wanted:
            heappush(heap, _next(name, one, found[name]))
    return found


def _next(name: str, one: Claim, count: int) -> tuple[float, bool, str]:
    """What the replica behind so many is worth, the largest first."""
    is_new = count >= one.target
    return -one.worth(count + 1) * (1.0 if is_new else STAYS), is_new, name


@dataclass(frozen=True, slots=True)
class Share:
    """A deployment's part in a shared budget. `weight`: what one of its requests counts."""

    budget: SharedBudget
    name: str
    weight: float = 1.0


class SharedBudget:
    """The GPUs of several deployments. Each asks at its own ticks, and gets what is free by then.

    Who has had more than its share for `hold_s` gives it away. Its GPUs are free once its instances
    have left. Floors are kept whatever others have; together they fit.
    """

    def __init__(self, max_gpus: int, hold_s: float = HOLD_S) -> None:
        self._max_gpus, self._hold_s = max_gpus, hold_s
        self._members: dict[str, tuple[int, Mapping[str, int]]] = {}
        self._claims: dict[str, Claim] = {}
        self._shares: dict[str, deque[tuple[float, int]]] = {}
        """The times and largest shares of each deployment, the largest first."""

    def join(self, name: str, gpus: int, floors: Mapping[str, int]) -> None:
        """One more deployment: GPUs of a replica, and its floors, which may change."""
        self._members[name] = gpus, floors

    def remember(self, name: str, claim: Claim) -> None:
        """What a deployment had before it was seen."""
        self._claims[name] = claim

    def most(self, name: str) -> int:
        """Replicas of a deployment while all others have their floors."""
        others = [one for other, one in self._members.items() if other != name]
        taken = sum(gpus * sum(floors.values()) for gpus, floors in others)
        return (self._max_gpus - taken) // self._members[name][0]

    def granted(self, name: str, claim: Claim, now_s: float) -> int:
        """The target of a deployment that asks for so much; until all have asked none grows."""
        before, target = self._claims | {name: claim}, claim.target
        most = target
        if len(before) == len(self._members):
            taken = sum(one.used for other, one in before.items() if other != name)
            fair = shares(before, self._max_gpus)[name]
            kept = min(target, self._held(name, target, fair, now_s))
            is_over = taken + claim.used > self._max_gpus  # by a floor that was raised
            free = (self._max_gpus - taken) // claim.gpus
            most = min(fair if is_over else max(fair, kept), max(free, target))
        found = max(claim.least, min(claim.wanted, most))
        self._claims[name] = replace(claim, target=found)
        return found

    def _held(self, name: str, target: int, fair: int, now_s: float) -> int:
        """The largest share of the last while; at first the fleet as it was found."""
        told = self._shares.setdefault(name, deque([(now_s, target)]))
        while told and told[-1][1] <= fair:
            told.pop()
        told.append((now_s, fair))
        while told[0][0] <= now_s - self._hold_s:
            told.popleft()
        return told[0][1]
