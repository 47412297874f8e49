"""What a planner could reach that knows every arrival: a search over numbers of replicas.

A schedule has a number of ready engines per epoch of 30 s. A simulation judges each: attainment and
GPU hours are its own, start-up and drain included.

1. Fixed fleets of every size: who misses the SLO, per epoch and size.
2. Schedules in proportion to the work that arrives; the proportion moves until the target is just
   attained.
3. Dynamic programming over the epochs: the least of GPU time, start-up time and the price of each
   miss, for a row of prices. What is played corrects the table of misses.
4. Local search from the cheapest schedule at the target: later rises, earlier falls, lower pieces.

The target is the attainment of the largest fleet less a point, where none is given. Each row is a
schedule that somebody could have ordered: the optimum costs at most so much, and nothing proves
that it does not cost less. `unwarned` is the best schedule, each order given only when it is
needed: what foresight is worth.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from analysis.plan.measured import CLAIRVOYANT, UNWARNED, Played, Record, Run
from replayer.loads.load import Load

EPOCH_S = 30.0
SESSION_EPOCHS = 20
"""Sessions go on after the load's end: so many epochs more."""
POINT = 0.01
WINDOWS_S = (45.0, 120.0)
"""Windows in which arriving work is smoothed: the one follows bursts, the other does not."""
BUSY, BUSY_STEP, LEAST_STEP, LEAST_BUSY = 0.75, 0.16, 0.02, 0.2
"""Share of its time that an engine is asked to work: at first, and how it moves."""
PRICE, PRICES = 0.004, (1e-4, 0.2)
"""GPU hours per miss: the first one, and the bounds."""
CHEAPER_H = 1e-4
Counts = tuple[int, ...]
"""Ready engines per epoch."""
Orders = list[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class World:
    """One load with one start-up delay, and the way to play orders on it."""

    load: Load
    work_s: Callable[[Record], float]
    """An engine's time that a request takes, beside others."""
    startup_s: float
    play: Callable[[str, Orders, int], Played]
    """Of a name, orders, and engines at the start."""

    @property
    def epochs(self) -> int:
        """How many a schedule has."""
        more = SESSION_EPOCHS if self.load.has_sessions else 0
        return math.ceil(self.load.end_s / EPOCH_S) + more


def missed_per_epoch(load: Load, records: Sequence[Record], epochs: int) -> list[int]:
    """Requests that miss the SLO, by arrival."""
    missed = [0] * epochs
    for one in records:
        if not one.keeps_slo(load):
            missed[min(epochs - 1, int(one.arrival_s / EPOCH_S))] += 1
    return missed


def arriving_work(
    work_s: Callable[[Record], float], records: Sequence[Record], window_s: float, epochs: int
) -> list[float]:
    """Seconds of an engine that arrive per second, around the middle of each epoch."""
    arrived_s = [0.0] * (int(epochs * EPOCH_S) + 1)
    for one in records:
        arrived_s[min(len(arrived_s) - 1, int(one.arrival_s))] += work_s(one)
    middles_s = [(epoch + 0.5) * EPOCH_S for epoch in range(epochs)]
    return [_mean_around(arrived_s, middle_s, window_s) for middle_s in middles_s]


def _mean_around(values: Sequence[float], middle_s: float, window_s: float) -> float:
    begin = int(max(0.0, middle_s - window_s / 2))
    part = values[begin : int(middle_s + window_s / 2)]
    return sum(part) / max(1, len(part))


class Misses:
    """Requests that miss the SLO, per number of engines and epoch.

    It begins with fixed fleets, which carry a backlog from epoch to epoch. What schedules show
    corrects it. More engines never miss more.
    """

    def __init__(self, of_fleets: Mapping[int, Sequence[float]]) -> None:
        self.table = {n: list(map(float, missed)) for n, missed in sorted(of_fleets.items())}
        sizes = list(self.table)
        for fewer, more in pairwise(sizes):
            pairs = zip(self.table[fewer], self.table[more], strict=True)
            self.table[more] = [min(pair) for pair in pairs]

    def learn(self, epoch: int, engines: int, missed: float) -> None:
        """What was seen in an epoch: fewer misses count at once, more of them by half."""
        known = self.table[engines][epoch]
        seen = missed if missed <= known else 0.5 * (known + missed)
        self.table[engines][epoch] = seen
        for n, row in self.table.items():
            if n > engines and seen < row[epoch]:
                row[epoch] = seen
            if n < engines and seen > row[epoch]:
                row[epoch] = seen


def cheapest(missed: Mapping[int, Sequence[float]], price: float, startup_s: float) -> Counts:
    """The schedule of least GPU time + price x misses + start-up time x engines added.

    Nothing can rise before the first start-up delay is over. The first number is free.
    """
    sizes, rise_h = sorted(missed), startup_s / 3600
    costs = {n: _epoch_cost(n, missed[n][0], price) for n in sizes}
    came: list[dict[int, int]] = []
    for epoch in range(1, len(missed[sizes[0]])):
        may_rise = epoch * EPOCH_S >= startup_s
        before = {n: _before(n, costs, rise_h, may_rise=may_rise) for n in sizes}
        costs = {
            n: costs[m] + rise_h * max(0, n - m) + _epoch_cost(n, missed[n][epoch], price)
            for n, m in before.items()
        }
        came.append(before)
    path = [min(sizes, key=costs.__getitem__)]
    for before in reversed(came):
        path.append(before[path[-1]])
    return tuple(reversed(path))


def _epoch_cost(engines: int, missed: float, price: float) -> float:
    return engines * EPOCH_S / 3600 + price * missed


def _before(n: int, costs: Mapping[int, float], rise_h: float, *, may_rise: bool) -> int:
    """From how many engines one comes to n at the least cost."""
    possible = (m for m in costs if may_rise or n <= m)
    return min(possible, key=lambda m: costs[m] + rise_h * max(0, n - m))


def orders(counts: Counts, startup_s: float) -> Orders:
    """Orders such that so many are ready in each epoch: given one start-up delay ahead.

    An engine that is needed again within a delay is kept, since it would not be back in time.
    """
    ahead = math.ceil(startup_s / EPOCH_S)
    wanted = tuple(max(counts[at : at + ahead + 1]) for at in range(len(counts)))
    # A second early: the next tick may be a moment late.
    return [(max(0.0, at_s - 1.0), n) for at_s, n in when_needed(wanted)]


def when_needed(counts: Counts) -> Orders:
    """Each change at the moment at which it is needed."""
    changes = [at for at in range(len(counts)) if at == 0 or counts[at] != counts[at - 1]]
    return [(at * EPOCH_S, counts[at]) for at in changes]


def in_proportion(work: Sequence[float], busy: float, world: World) -> Counts:
    """As many engines as the work keeps busy for that share of their time."""
    load = world.load
    counts = [min(load.max_replicas, max(load.min_replicas, math.ceil(one / busy))) for one in work]
    # Before the first delay is over nothing can rise: the fleet begins with what it needs then.
    first = 1 + int(world.startup_s // EPOCH_S)
    if any(n > counts[0] for n in counts[1:first]):
        counts[:first] = [max(counts[:first])] * len(counts[:first])
    return tuple(counts)


def neighbours(counts: Counts, least: int) -> Iterator[Counts]:
    """Schedules that are cheaper by a little."""
    edges = [at for at in range(1, len(counts)) if counts[at] != counts[at - 1]]
    for at in edges:
        before, after = counts[at - 1], counts[at]
        for epochs in (1, 2):
            if after > before and at + epochs <= len(counts):  # rises later
                yield counts[:at] + (before,) * epochs + counts[at + epochs :]
            if after < before and at - epochs >= 0:  # falls earlier
                yield counts[: at - epochs] + (after,) * epochs + counts[at:]
    bounds = [0, *edges, len(counts)]
    for begin, end in pairwise(bounds):
        if counts[begin] > least:
            yield counts[:begin] + (counts[begin] - 1,) * (end - begin) + counts[end:]


class Search:
    """One search. `effort`: runs of the local search; all before it take about as many."""

    def __init__(
        self,
        world: World,
        fleets: Mapping[int, Played],
        effort: int,
        target_ratio: float | None = None,
    ) -> None:
        self._world, self._effort = world, effort
        largest = fleets[max(fleets)]
        self._records = largest.records
        usual = largest.run.attainment_ratio - POINT
        self.target_ratio = usual if target_ratio is None else target_ratio
        self._misses = Misses(
            {n: self._missed(played.records) for n, played in fleets.items()},
        )
        self._runs: dict[Counts, Run] = {}

    def _missed(self, records: Sequence[Record]) -> list[int]:
        return missed_per_epoch(self._world.load, records, self._world.epochs)

    def runs(self) -> list[Run]:
        """The frontier, its cheapest schedule at the target, and that one `unwarned`."""
        for window_s in WINDOWS_S:
            self._follow_work(window_s)
        self._follow_prices()
        best = self._improved()
        self._runs[best] = replace(self._runs[best], is_best=True)
        return [*self._frontier(), self._unwarned(best)]

    def _play(self, counts: Counts) -> Run:
        if counts not in self._runs:
            asked = orders(counts, self._world.startup_s)
            played = self._world.play(CLAIRVOYANT, asked, counts[0])
            self._runs[counts] = played.run
            self._learn(played)
        return self._runs[counts]

    def _learn(self, played: Played) -> None:
        sizes = list(self._misses.table)
        for epoch, missed in enumerate(self._missed(played.records)):
            middle_s = (epoch + 0.5) * EPOCH_S
            ready = [n for at_s, n in played.ready if at_s <= middle_s] or [played.ready[0][1]]
            self._misses.learn(epoch, min(sizes[-1], max(sizes[0], ready[-1])), missed)

    def _attains(self, run: Run) -> bool:
        return run.attainment_ratio >= self.target_ratio

    def _follow_work(self, window_s: float) -> None:
        world = self._world
        work = arriving_work(world.work_s, self._records, window_s, world.epochs)
        busy, step = BUSY, BUSY_STEP
        for _ in range(max(4, self._effort // 4)):
            run = self._play(in_proportion(work, busy, world))
            busy = max(LEAST_BUSY, busy + (step if self._attains(run) else -step))
            step = max(LEAST_STEP, 0.6 * step)

    def _follow_prices(self) -> None:
        """Move the price of a miss until the target is just attained."""
        price, step = PRICE, 2.0
        for _ in range(max(4, self._effort // 3)):
            run = self._play(cheapest(self._misses.table, price, self._world.startup_s))
            least, most = PRICES
            price = min(most, max(least, price / step if self._attains(run) else price * step))
            step = max(1.12, step**0.9)

    def _improved(self) -> Counts:
        """Local search, from the cheapest schedule so far."""
        draw, played_before = random.Random(0), len(self._runs)
        best = self._cheapest()
        while len(self._runs) - played_before < self._effort:
            least = self._world.load.min_replicas
            moves = [one for one in neighbours(best, least) if one not in self._runs]
            draw.shuffle(moves)
            left = self._effort + played_before - len(self._runs)
            better = next((one for one in moves[:left] if self._is_better(one, best)), None)
            if better is None:
                return best
            best = better
        return best

    def _cheapest(self) -> Counts:
        """Of what attains the target; all engines all the time where nothing does."""
        attaining = [counts for counts, run in self._runs.items() if self._attains(run)]
        if attaining:
            return min(attaining, key=lambda counts: self._runs[counts].gpu_h)
        most = (self._world.load.max_replicas,) * self._world.epochs
        self._play(most)
        return most

    def _is_better(self, counts: Counts, best: Counts) -> bool:
        run = self._play(counts)
        return self._attains(run) and run.gpu_h < self._runs[best].gpu_h - CHEAPER_H

    def _frontier(self) -> list[Run]:
        """Runs than which no cheaper one attains more; and the best."""
        kept, most = [], 0.0
        for run in sorted(self._runs.values(), key=lambda one: one.gpu_h):
            if run.attainment_ratio > most or run.is_best:
                most = max(most, run.attainment_ratio)
                kept.append(run)
        return kept

    def _unwarned(self, counts: Counts) -> Run:
        """The best schedule without foresight: ordered when needed, so one delay late."""
        return self._world.play(UNWARNED, when_needed(counts), counts[0]).run
