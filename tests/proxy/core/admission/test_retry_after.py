"""What refused clients are told, tried on a fleet in virtual time."""

from __future__ import annotations

import heapq
import sys
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.admission.queue import Entry, Priority, QueueLimits, WaitQueue
from proxy.core.admission.retry_after import PROMISES, RetryAdvice, milliseconds
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.router import Router
from proxy.core.routing.waiting import Waiting
from proxy.core.types import Instance, Reject, RejectReason, RequestFacts, RouterConfig, Thresholds

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


def told_s(promises: RetryAdvice, now_s: float, request: int, tokens: int = 500) -> float:
    return promises.advise(BUSY, tokens, 0, now_s, request).wait_s


def test_clients_that_never_come_back_do_not_lengthen_the_wait_without_end() -> None:
    """Five prompts a second are refused, each of a second of capacity; nobody comes again."""
    promises = RetryAdvice()
    waits_s = [told_s(promises, at / 5, request=at) for at in range(600)]
    assert max(waits_s) > 10, "at first each is expected to come"
    assert max(waits_s[-100:]) == pytest.approx(0.4, abs=0.2)
    assert promises.promises < 50, "what has lapsed is forgotten"


def test_who_comes_back_is_expected_again() -> None:
    promises = RetryAdvice()
    for at in range(400):
        told_s(promises, at / 2, request=at)
    assert promises.kept_ratio < 0.1
    for at in range(100):
        now_s = 1000.0 + 40 * at
        promises.came(7, now_s + told_s(promises, now_s, request=7))
    assert promises.kept_ratio > 0.9


def test_a_client_that_comes_too_early_keeps_no_promise() -> None:
    promises = RetryAdvice()
    promises.kept_ratio = 0.5
    told_s(promises, 0.0, request=7)
    promises.came(7, 0.1)
    assert promises.kept_ratio == 0.5
    promises.came(7, 0.4)
    assert promises.kept_ratio == 0.55
    promises.came(7, 0.5)
    assert promises.kept_ratio == 0.55, "once for each refusal"


def test_one_huge_prompt_reserves_half_a_minute_at_most() -> None:
    promises = RetryAdvice()
    told_s(promises, 0.0, request=1, tokens=10**9)
    assert told_s(promises, 1.0, request=2, tokens=1) <= 30
    assert told_s(promises, 61.0, request=3, tokens=1) == pytest.approx(0.4)


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.integers(0, 5), st.sampled_from([0.0, 0.4, 3.0, 40.0]), st.integers(1)
        ),
        max_size=60,
    )
)
def test_whatever_comes_or_does_not_the_books_are_bounded(
    history: list[tuple[bool, int, float, int]],
) -> None:
    promises, now_s, refused = RetryAdvice(), 0.0, 0
    for is_refused, request, later_s, tokens in history:
        now_s += later_s
        if is_refused:
            refused += 1
            assert 0 < told_s(promises, now_s, request, tokens) <= 30 + 1e-9  # of rounding
        else:
            promises.came(request, now_s)
        assert 0.0 <= promises.kept_ratio <= 1.0
        assert promises.promises <= min(refused, 6)
    promises.came(99, now_s + 100.0)
    assert promises.promises == 0


def test_promises_are_bounded() -> None:
    promises = RetryAdvice()
    for request in range(PROMISES + 10):
        told_s(promises, 0.0, request)
    assert promises.promises == PROMISES


def test_a_wait_queue_knows_a_retry_by_session_and_prompt() -> None:
    """Through the proxy's own admission: one that obeys is counted, others are forgotten."""
    limits = Thresholds(active_prefill_tokens_threshold=0)
    router = Router(FleetState(RouterConfig(prefill_throughput=1000.0, thresholds=limits)))
    router.known.add(Instance("i", "http://i"))
    waiting = Waiting(router, QueueLimits(0, 0, 1.0))

    def asks(session: str, now_s: float) -> Reject | None:
        facts = RequestFacts("m", session, 500, [1, 2], 250.0)
        answer = waiting.admit(facts, now_s)
        if not isinstance(answer, Reject):
            return None
        told = waiting.enter(facts, answer, now_s, lambda: None)
        assert isinstance(told, Reject)
        return told

    assert asks("holds the instance", 0.0) is None
    waits_s = []
    for at in range(600):
        told = asks(f"s{at}", at / 5)
        assert told is not None
        waits_s.append(told.wait_s)
    assert max(waits_s) > 10
    assert max(waits_s[-50:]) < 2
    advice = waiting._advice
    before, now_s = advice.kept_ratio, 120.0
    told = asks("obeys", now_s)
    assert told is not None
    asks("obeys", now_s + told.wait_s)
    assert advice.kept_ratio > before


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
