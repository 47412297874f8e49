"""A virtual fleet whose run can be branched, to follow each alternative of a decision.

A branch is a forked process. The run's state is spread over router, engines, heap and the rule
under test. Some of it is keyed by object identity (reservations by their lease) or held in closures
and iterators. A copy by pickle or deepcopy would differ. A fork has the same memory at the same
addresses, takes some milliseconds, and copies only pages that change. The child continues from the
middle of the decision to its end, writes the outcome into a pipe and exits. The parent waits for
it, so that a run never has more than one branch, and none outlives the run. Needs a Unix.
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

from analysis.regret.outcomes import BranchOutcome
from proxy.core.latency.slo import Slo
from proxy.core.routing.router import Router
from replayer.virtual.arrivals import Planned
from replayer.virtual.fleet import Kind, LiveRequest, VirtualFleet
from replayer.virtual.requests import VirtualOptions, VirtualRow, VirtualRun, keeps_slo

SLO_WEIGHT_S = 10.0
"""Weight of an SLO miss in J = mean e2e + 10 s * (share of requests that miss the SLO)."""
START_SHIFT_S = 10.0
THINK_SPREAD = 0.5
"""In a resampled future session starts move by up to 10 s, think times by up to half."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Comparison of branches: SLO, length in virtual seconds, number of futures, seed."""

    slo: Slo
    horizon_s: float = math.inf
    futures: int = 1
    seed: int = 0


PATIENCE_RATIO = 2.0
"""Longest branch, in horizons: the last members, too, get a horizon to end."""
PACE_TOKENS = 32
"""A stream's pace is averaged with this many tokens at half the SLO's time per token. Its first
tokens, perhaps beside another request's prefill, say little about thousands to come."""


class Postponed(Exception):  # noqa: N818 - an answer to the fleet, not an error
    """Raised by a policy: the fleet asks again in `by_s` seconds."""

    def __init__(self, by_s: float) -> None:
        super().__init__()
        self.by_s = by_s


def cost_s(row: VirtualRow, slo: Slo, timeout_s: float) -> float:
    """Return one request's part of J: its e2e, plus 10 s if it misses the SLO.

    A failed request counts as if it had been sent again after the timeout, and served at the SLO.
    """
    e2e_s = row.e2e_s
    if e2e_s is None or row.outcome != "ok":
        e2e_s = timeout_s + slo.ttft_limit_s(row.new_tokens) + slo.tpot_s * row.output_tokens
    return e2e_s + (0.0 if keeps_slo(row, slo) else SLO_WEIGHT_S)


def carried_on(row: VirtualRow, written: int, slo: Slo, now_s: float) -> VirtualRow:
    """Estimate the end of a request that is unfinished when its branch ends.

    Its other tokens take the pace of its `written` ones; without a token, it is served at the SLO.
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
    """Return J of a whole run, in seconds."""
    costs = [cost_s(row, slo, timeout_s) for row in rows]
    return sum(costs) / max(1, len(costs))


class BranchingFleet(VirtualFleet):
    """One run that can be branched. `asked`: the request that is placed now, for the first time."""

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
            # A child that fails must not return into the code of its parent.
            if self.is_branch:
                os._exit(1)

    def branch(
        self, now_s: float, draw: random.Random | None, members: tuple[int, ...] | None
    ) -> BranchOutcome | None:
        """Fork. The parent gets the outcome; the child gets None and continues with its own choice.

        `draw` resamples the child's future. `members` are the requests that count. None with a
        horizon: those in flight now and those that arrive within the horizon. Requests that are
        unfinished after PATIENCE_RATIO horizons are judged by their pace so far.
        """
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns if a library has started threads; the child uses none of them.
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
        finally:
            self.asked = None

    def _end(self, live: LiveRequest, outcome: str, now_s: float) -> None:
        super()._end(live, outcome, now_s)
        self._open.discard(live.index)
        self._stop_when_over(now_s)

    def _stop_when_over(self, now_s: float) -> None:
        if self._members is not None and not self._open and now_s > self._cut_s:
            self.options = replace(self.options, until_s=now_s)

    def _redraw(self, now_s: float, draw: random.Random) -> None:
        """Redraw the start times of all future requests; the requests themselves stay the same."""
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
        """Write the branch's outcome into the pipe, and exit."""
        members = None if self._members is None else sorted(self._members)
        rows = self._judged(range(len(self._rows)) if members is None else members)
        slo, timeout_s = self.terms.slo, self.options.timeout_s
        total_s = math.fsum(cost_s(row, slo, timeout_s) for row in rows.values())
        # A member that has not arrived yet is delayed by others, whose cost has that delay already.
        turns = [self._planned[index].turn for index in members or () if index not in rows]
        total_s += sum(slo.ttft_limit_s(t.new_tokens) + slo.tpot_s * t.output_tokens for t in turns)
        own = rows[self._own]
        with os.fdopen(pipe, "wb") as answer:
            found = [total_s, len(rows) + len(turns), own.ttft_s, members]
            answer.write(orjson.dumps(found))
        os._exit(0)

    def _judged(self, indexes: Iterable[int]) -> dict[int, VirtualRow]:
        """Return the rows that count; those of unfinished requests are estimates."""
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
        # A child that has answered is exiting anyway; any other must not outlive this call.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not data:
        raise RuntimeError("a branch of the run died")
    total_s, requests, ttft_s, members = orjson.loads(data)
    return BranchOutcome(total_s, requests, ttft_s, None if members is None else tuple(members))
