"""A virtual fleet whose run can be branched, so that a decision's alternatives can be lived out.

A branch is a forked process. The run's state is spread over router, engines, heap and the rule
under test, some of it keyed by object identity (reservations by their lease) or held in closures
and iterators: a copy by pickle or deepcopy would differ, a fork is the same memory at the same
addresses, costs some milliseconds and only what it changes. The child goes on from the middle of
the decision to its end, writes what became of it into a pipe and exits; the parent waits, so that
there is never more than one branch per run, and none outlives it. Needs a Unix.
"""

from __future__ import annotations

import heapq
import math
import os
import random
import signal
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import orjson

from proxy.core.latency.slo import Slo
from proxy.core.routing.router import Router
from replayer.virtual.arrivals import Planned
from replayer.virtual.fleet import VirtualFleet
from replayer.virtual.requests import (
    Kind,
    LiveRequest,
    VirtualOptions,
    VirtualRow,
    VirtualRun,
    keeps_slo,
)

SLO_WEIGHT_S = 10.0
"""J = mean e2e + 10 s * (share of requests that miss the SLO), as the prototype study had it."""
START_SHIFT_S = 10.0
THINK_SPREAD = 0.5
"""A resampled future: session starts move by up to 10 s either way, think times by up to half."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How branches are judged: the SLO, how far they look, how many futures, which seed."""

    slo: Slo
    horizon_s: float = math.inf
    futures: int = 1
    seed: int = 0


PATIENCE_RATIO = 2.0
"""A branch with a horizon ends at twice that: its last members get as long as its first."""
PACE_TOKENS = 32
"""A pace so far counts against this many tokens at half the SLO's time: the first few tokens of a
stream, beside somebody's prefill, say little of thousands to come."""


@dataclass(frozen=True, slots=True)
class BranchOutcome:
    """What became of a branch: its cost over its members (None: all requests), its own request."""

    cost_s: float
    requests: int
    own_ttft_s: float | None
    members: tuple[int, ...] | None


class Postponed(Exception):  # noqa: N818 - an answer to the fleet, not an error
    """Raised by a decision that is to be asked again in `by_s` seconds."""

    def __init__(self, by_s: float) -> None:
        super().__init__()
        self.by_s = by_s


def cost_s(row: VirtualRow, slo: Slo, timeout_s: float) -> float:
    """One request's part of J: its e2e, and 10 s when it misses the SLO.

    One that failed counts as if it had been sent again, and served at the SLO, after the timeout.
    """
    e2e_s = row.e2e_s
    if e2e_s is None or row.outcome != "ok":
        e2e_s = timeout_s + slo.ttft_limit_s(row.new_tokens) + slo.tpot_s * row.output_tokens
    return e2e_s + (0.0 if keeps_slo(row, slo) else SLO_WEIGHT_S)


def carried_on(row: VirtualRow, written: int, slo: Slo, now_s: float) -> VirtualRow:
    """A request that goes on when its branch ends: its `written` tokens set the pace of the rest.

    Before its first token it is taken to be served at the SLO from then on.
    """
    elapsed_s = now_s - row.arrival_s
    if row.ttft_s is None:
        ttft_s = elapsed_s + slo.ttft_limit_s(row.new_tokens)
        return replace(
            row, ttft_s=ttft_s, end_s=row.arrival_s + ttft_s + slo.tpot_s * row.output_tokens
        )
    usual_s = PACE_TOKENS * slo.tpot_s / 2
    pace_s = (elapsed_s - row.ttft_s + usual_s) / (max(0, written - 1) + PACE_TOKENS)
    return replace(row, end_s=now_s + pace_s * max(0, row.output_tokens - written))


def objective_s(rows: Iterable[VirtualRow], slo: Slo, timeout_s: float) -> float:
    """J of a whole run."""
    costs = [cost_s(row, slo, timeout_s) for row in rows]
    return sum(costs) / max(1, len(costs))


class BranchingFleet(VirtualFleet):
    """One run. `asked` is the request that a decision is being made for."""

    def __init__(
        self,
        planned: Sequence[Planned],
        router: Router,
        options: VirtualOptions,
        observers: Sequence[object],
        terms: Terms,
    ) -> None:
        super().__init__(planned, router, options, observers)
        self.terms = terms
        self.asked: LiveRequest | None = None
        self._pipe: int | None = None
        self._own = 0
        self._cut_s = math.inf
        self._members: set[int] | None = None
        self._open: set[int] = set()

    @property
    def is_branch(self) -> bool:
        """Whether this is the forked child."""
        return self._pipe is not None

    def run(self) -> VirtualRun:
        """Run to the end; a branch never returns from here."""
        try:
            run = super().run()
            if self._pipe is not None:
                self._answer(self._pipe)
            return run
        finally:
            # Whatever stops a child must not run its parent's code a second time.
            if self.is_branch:
                os._exit(1)

    def branch(
        self, now_s: float, draw: random.Random | None, members: tuple[int, ...] | None
    ) -> BranchOutcome | None:
        """Fork. The parent gets the outcome; the child gets None and goes on with its own choice.

        `draw` resamples the child's future. `members` are the requests that count: without them,
        and with a horizon, those in flight now and those that come within the horizon. What goes
        on at twice the horizon is judged by its pace so far.
        """
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns where a library has started threads; the child calls none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os.close(reader)
            self._pipe = writer
            self._begin_branch(now_s, draw, members)
            return None
        os.close(writer)
        return _read(reader, child)

    def _begin_branch(
        self, now_s: float, draw: random.Random | None, members: tuple[int, ...] | None
    ) -> None:
        if self.asked is not None:
            self._own = self.asked.index
        if draw is not None:
            self._redraw(now_s, draw)
        if math.isinf(self.terms.horizon_s):
            return
        in_flight = {
            index
            for index, row in enumerate(self._rows)
            if row is not None and row.end_s is None and row.outcome == "ok"
        }
        self._cut_s = now_s + self.terms.horizon_s if members is None else -math.inf
        self._members = in_flight if members is None else set(members)
        ended = {i for i, row in enumerate(self._rows) if row is not None} - in_flight
        self._open = self._members - ended
        self.options = replace(self.options, until_s=now_s + PATIENCE_RATIO * self.terms.horizon_s)

    def _arrive(self, index: int, now_s: float) -> None:
        if self._members is not None and now_s <= self._cut_s:
            self._members.add(index)
            self._open.add(index)
        super()._arrive(index, now_s)
        self._stop_when_over(now_s)

    def _admit(self, live: LiveRequest, now_s: float) -> None:
        self.asked = live
        try:
            super()._admit(live, now_s)
        except Postponed as postponed:
            self._at(now_s + postponed.by_s, Kind.ARRIVAL, live)

    def _end(self, live: LiveRequest, outcome: str, now_s: float) -> None:
        super()._end(live, outcome, now_s)
        self._open.discard(live.index)
        self._stop_when_over(now_s)

    def _stop_when_over(self, now_s: float) -> None:
        if self._members is not None and not self._open and now_s > self._cut_s:
            self.options = replace(self.options, until_s=now_s)

    def _redraw(self, now_s: float, draw: random.Random) -> None:
        """Who comes and what they ask stays; when they come, after now, is drawn again."""
        factors = [1.0 + THINK_SPREAD * (2.0 * draw.random() - 1.0) for _ in self._planned]
        shifts_s = [START_SHIFT_S * (2.0 * draw.random() - 1.0) for _ in self._planned]
        planned = [
            replace(one, delay_s=one.delay_s * factor)
            for one, factor in zip(self._planned, factors, strict=True)
        ]

        def moved(index: int, at_s: float) -> float:
            if at_s <= now_s:
                return at_s
            if self._planned[index].delay_s > 0.0:
                return now_s + (at_s - now_s) * factors[index]
            return now_s + abs(at_s + shifts_s[index] - now_s)

        self._heap = [
            (moved(what, at_s), order, kind, what, number)
            if kind is Kind.ARRIVAL and isinstance(what, int)
            else (at_s, order, kind, what, number)
            for at_s, order, kind, what, number in self._heap
        ]
        heapq.heapify(self._heap)
        for index, waiting in enumerate(self._waits.open):
            if waiting:
                ready_s = self._waits.ready_s
                ready_s[index] = moved(index, ready_s[index])
        self._planned = self._waits.planned = planned

    def _answer(self, pipe: int) -> NoReturn:
        """The child's end."""
        members = None if self._members is None else sorted(self._members)
        rows = self._judged(range(len(self._rows)) if members is None else members)
        slo, timeout_s = self.terms.slo, self.options.timeout_s
        total_s = math.fsum(cost_s(row, slo, timeout_s) for row in rows.values())
        # A member that has not come yet is late for what others suffered, which is counted there.
        turns = [self._planned[index].turn for index in members or () if index not in rows]
        total_s += sum(slo.ttft_limit_s(t.new_tokens) + slo.tpot_s * t.output_tokens for t in turns)
        own = rows[self._own]
        with os.fdopen(pipe, "wb") as answer:
            found = [total_s, len(rows) + len(turns), own.ttft_s, members]
            answer.write(orjson.dumps(found))
        os._exit(0)

    def _judged(self, indexes: Iterable[int]) -> dict[int, VirtualRow]:
        """The rows that count; those of requests that go on are estimates."""
        until_s, slo = self.options.until_s, self.terms.slo
        rows = {index: row for index in indexes if (row := self._rows[index]) is not None}
        for engine in self.engines if math.isfinite(until_s) else ():
            engine.advance(until_s)
        written = {live.index: leg.output_tokens for leg, live in self._legs.items()}
        for index, row in rows.items():
            if row.end_s is None and row.outcome == "ok":
                rows[index] = carried_on(row, written.get(index, 0), slo, until_s)
        return rows


def _read(reader: int, child: int) -> BranchOutcome:
    try:
        with os.fdopen(reader, "rb") as answer:
            data = answer.read()
    finally:
        # One that has answered is ending anyway; one that nobody listens to has to.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not data:
        raise RuntimeError("a branch of the run died")
    total_s, requests, ttft_s, members = orjson.loads(data)
    return BranchOutcome(total_s, requests, ttft_s, None if members is None else tuple(members))
