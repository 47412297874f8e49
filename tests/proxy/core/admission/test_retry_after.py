"""What refused clients are told, tried on a fleet in virtual time."""

from __future__ import annotations

import heapq
import sys
from dataclasses import dataclass, field, replace

import pytest

from proxy.core.admission.queue import Entry, Priority, QueueLimits, WaitQueue
from proxy.core.admission.retry_after import RetryAdvice, milliseconds
from proxy.core.types import Reject, RejectReason

BUSY = Reject(RejectReason.PREFILL_TOKENS, 1, 0.4, 1000.0)


def test_each_is_told_a_moment_of_its_own() -> None:
    promises = RetryAdvice()
    waits = [promises.advise(BUSY, 500, 2000, 0.0).wait_s for _ in range(4)]
    assert waits == pytest.approx([2.4, 3.4, 4.4, 5.4])


def test_promises_pass() -> None:
    promises = RetryAdvice()
    promises.advise(BUSY, 500, 2000, 0.0)
    assert promises.advise(BUSY, 500, 0, 100.0).wait_s == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("wait_s", "whole_s", "ms"), [(0.0, 1, 50), (0.4, 1, 400), (1.2, 2, 1200), (99.0, 30, 30_000)]
)
def test_whole_seconds_and_milliseconds_are_bounded(wait_s: float, whole_s: int, ms: int) -> None:
    told = RetryAdvice().advise(replace(BUSY, wait_s=wait_s), 1, 0, 0.0)
    assert (told.retry_after_s, milliseconds(told)) == (whole_s, ms)


def test_a_refusal_without_a_prediction_has_milliseconds_too() -> None:
    assert milliseconds(Reject(RejectReason.NO_INSTANCE, 5)) == 5000


@dataclass
class Fleet:
    """Takes one prompt of `tokens` at a time, `tps` tokens per second, behind a queue."""

    tps: float
    tokens: int
    queue: WaitQueue
    promises: RetryAdvice = field(default_factory=RetryAdvice)
    free_at_s: float = 0.0

    def pump(self, now_s: float) -> None:
        while self.free_at_s <= now_s and (entry := self.queue.next((), self.free_at_s)):
            start_s = max(self.free_at_s, entry.queued_s)
            self.queue.served(entry, start_s)
            self.free_at_s = start_s + self.tokens / self.tps

    def ask(self, now_s: float) -> Reject | None:
        self.pump(now_s)
        if self.free_at_s <= now_s and not len(self.queue):
            self.free_at_s = now_s + self.tokens / self.tps
            return None
        busy = Reject(RejectReason.PREFILL_TOKENS, 1, max(0.0, self.free_at_s - now_s), self.tps)
        entry = Entry("m", "", Priority.NORMAL, self.tokens, 1)
        if self.queue.offer(entry, busy.wait_s, busy.drain_tps, now_s).refused is None:
            return None
        rate = self.queue.drain_tps(self.tps, now_s)
        busy = replace(busy, drain_tps=rate)
        return self.promises.advise(busy, self.tokens, self.queue.tokens, now_s)


@pytest.mark.parametrize("precise", [True, False], ids=["milliseconds", "whole seconds"])
@pytest.mark.parametrize(
    ("most", "seconds", "at_least"),
    [(256, 10.0, 0.9), (64, 2.0, 0.8), (0, 10.0, None)],
    ids=["default queue", "short queue", "no queue"],
)
def test_who_obeys_is_mostly_let_in(
    most: int, seconds: float, at_least: float | None, *, precise: bool
) -> None:
    """Five times what fits for four seconds, then half of it: the second try is the last for most.

    Without a queue two who come at the same moment are one too many; that is only printed.
    """
    fleet = Fleet(10_000.0, 100, WaitQueue(QueueLimits(most, 1 << 20, seconds)))
    arrivals = [(i / 500, 0) for i in range(2000)] + [(4 + i / 50, 0) for i in range(2000)]
    heapq.heapify(arrivals)
    came_again, in_at_second, bound_s = 0, 0, 0.0
    while arrivals:
        now_s, tries = heapq.heappop(arrivals)
        told = fleet.ask(now_s)
        if tries == 1:
            came_again += 1
            in_at_second += told is None
        if told is not None:
            wait_s = milliseconds(told) / 1000 if precise else float(told.retry_after_s)
            bound_s = max(bound_s, wait_s)
            heapq.heappush(arrivals, (now_s + wait_s, tries + 1))
    assert came_again > 500
    sys.stdout.write(
        f"second try: {in_at_second} of {came_again} in; told {bound_s:.1f} s at most\n"
    )
    assert at_least is None or in_at_second >= at_least * came_again
