"""What refused clients are told, tried on a fleet in virtual time."""

from __future__ import annotations

import heapq
import sys
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import is_compiled
from proxy.core.admission import largest_pays, retry_after
from proxy.core.admission.queue import Entry, Priority, QueueLimits, WaitQueue
from proxy.core.admission.retry_after import PROMISES, TENANTS, RetryAdvice, milliseconds
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.router import Router
from proxy.core.routing.waiting import Waiting
from proxy.core.types import Instance, Reject, RejectReason, RequestFacts, RouterConfig, Thresholds
from tests.support.work import lines_of

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


def told_s(
    promises: RetryAdvice, now_s: float, request: int, tokens: int = 500, tenant: str = ""
) -> float:
    return promises.advise(BUSY, tokens, 0, now_s, (tenant, request)).wait_s


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
    assert promises.kept_ratio() < 0.1
    for at in range(100):
        now_s = 1000.0 + 40 * at
        promises.came("", 7, now_s + told_s(promises, now_s, request=7))
    assert promises.kept_ratio() > 0.9


def test_a_client_that_comes_too_early_keeps_no_promise() -> None:
    promises = RetryAdvice()
    for at in range(10):
        told_s(promises, 0.0, request=at)
    promises.came("", 99, 40.0)
    before = promises.kept_ratio()
    told_s(promises, 100.0, request=7)
    promises.came("", 7, 100.1)
    assert promises.kept_ratio() == before < 0.5
    promises.came("", 7, 100.4)
    assert promises.kept_ratio() == pytest.approx(before + 0.1 * (1 - before))
    after = promises.kept_ratio()
    promises.came("", 7, 100.5)
    assert promises.kept_ratio() == after, "once for each refusal"


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
            promises.came("", request, now_s)
        assert 0.0 <= promises.kept_ratio() <= 1.0
        assert promises.promises <= min(refused, 6)
    promises.came("", 99, now_s + 100.0)
    assert promises.promises == 0


def test_a_tenant_shares_once_however_its_moment_moves() -> None:
    """A small prompt after huge ones sets it back; a share was noted until the later one."""
    moved, alone = RetryAdvice(), RetryAdvice()
    for now_s, tokens in ((0.0, 10**9), (0.3, 10**9), (0.5, 0)):
        moved.advise(BUSY, tokens, 0, now_s, ("own", None))
    told = [
        [one.advise(BUSY, 1000, 0, 31.0, ("own", None)).wait_s for _ in range(3)]
        for one in (moved, alone)
    ]
    assert told[0] == pytest.approx(told[1])


@dataclass
class Others:
    """What another tenant does before and between one's own refusals."""

    tokens: int
    count: int
    come_back: bool

    def act(self, promises: RetryAdvice, now_s: float) -> None:
        for request in range(self.count):
            promises.advise(BUSY, self.tokens, 0, now_s, ("other", request))
            if self.come_back:
                promises.came("other", request, now_s + 31.0)


HARMLESS = Others(1, 1, come_back=False)


@given(
    st.builds(Others, st.sampled_from([1, 500, 10**9]), st.integers(1, 60), st.booleans()),
    st.lists(st.tuples(st.sampled_from([0.0, 0.2, 3.0, 40.0]), st.integers(1, 5000)), max_size=20),
)
def test_what_one_is_told_does_not_depend_on_what_another_sends(
    others: Others, own: list[tuple[float, int]]
) -> None:
    """How many it sends, how large they are, whether they come again: it is one that shares."""
    told: list[list[float]] = []
    for other in (HARMLESS, others):
        promises, now_s = RetryAdvice(), 0.0
        told.append([])
        for later_s, tokens in own:
            now_s += later_s
            other.act(promises, now_s)
            HARMLESS.act(promises, now_s)  # both share at this moment
            told[-1].append(told_s(promises, now_s, 7, tokens, tenant="own"))
    assert told[0] == told[1]


def test_one_huge_prompt_of_another_lengthens_no_wait() -> None:
    promises = RetryAdvice()
    told_s(promises, 0.0, request=1, tokens=10**9, tenant="other")
    assert told_s(promises, 0.0, request=2, tenant="own") == pytest.approx(0.4)


def test_tenants_are_promised_their_shares() -> None:
    promises = RetryAdvice({"a": 3.0, "b": 1.0}.__getitem__)
    a, b = ([told_s(promises, 0.0, at, tenant=name) for at in range(3)] for name in "ab")
    assert a == pytest.approx([0.4, 1.4, 2.4]), "while nobody else has been refused"
    assert b == pytest.approx([0.4, 4.4, 8.4]), "a quarter of the rate"
    assert told_s(promises, 3.0, 9, tenant="b") == pytest.approx(9.4), "of its own promises"
    assert told_s(promises, 50.0, 9, tenant="b") == pytest.approx(0.4)
    alone_s = 0.4 + promises.kept_ratio("b")
    assert told_s(promises, 50.0, 9, tenant="b") == pytest.approx(alone_s), "alone again"


def test_what_waits_of_another_tenant_lengthens_the_wait_by_turns_only() -> None:
    """Behind prompts of another tenant that wait, the first of one's own is next."""
    limits = Thresholds(active_prefill_tokens_threshold=0)
    router = Router(FleetState(RouterConfig(prefill_throughput=1000.0, thresholds=limits)))
    router.known.add(Instance("i", "http://i"))
    waiting = Waiting(router, QueueLimits(4, 1 << 20, 100.0))

    def told_s(tenant: str) -> float:
        reject = Reject(RejectReason.PREFILL_TOKENS, 1, 0.4, 1000.0)
        facts = RequestFacts("m", "s", 500, [1, 2], 250.0, tenant=tenant)
        return waiting.refusal(reject, facts, 0.0).wait_s

    for at in range(4):
        facts = RequestFacts("m", f"s{at}", 5000, [at], 250.0, tenant="other")
        assert not isinstance(waiting.enter(facts, BUSY, 0.0, lambda: None), Reject)
    assert told_s("own") == pytest.approx(0.4)
    assert told_s("other") > 15


def test_the_tenant_with_most_promises_forgets_them_first() -> None:
    promises = RetryAdvice()
    told_s(promises, 0.0, request=1, tenant="own")
    for request in range(PROMISES):
        told_s(promises, 0.0, request, tenant="other")
    assert promises.promises == PROMISES
    assert promises.awaits("own")


def test_tenants_are_bounded() -> None:
    promises = RetryAdvice()
    for at in range(TENANTS + 10):
        told_s(promises, 0.0, at, tenant=f"t{at}")
    assert promises.promises == TENANTS
    assert not promises.awaits("t9")
    assert promises.awaits("t10")
    assert told_s(promises, 100.0, 1, tenant="t9") == pytest.approx(0.4)
    assert told_s(promises, 100.0, 1, tenant="t9") == pytest.approx(1.4), "nobody else shares"


@pytest.mark.skipif(is_compiled(), reason="compiled code shows no lines")
def test_a_refusal_looks_at_few_tenants_whoever_is_known() -> None:
    """Beyond the bounds a tenant, or a promise, is forgotten: neither is searched for."""
    promises, newcomers = RetryAdvice(), TENANTS + 200
    for request in range(PROMISES):
        told_s(promises, 0.0, request, tenant=f"t{request % TENANTS}")
    with lines_of(retry_after, largest_pays) as lines:
        for at in range(newcomers):
            told_s(promises, 0.0, PROMISES + at, tenant=f"new {at}")
    assert lines.count < 200 * newcomers
    assert promises.promises == TENANTS
    with lines_of(retry_after, largest_pays) as lines:
        for request in range(PROMISES):
            told_s(promises, 0.0, request, tenant=f"new {200 + request % TENANTS}")
    assert lines.count < 200 * PROMISES
    assert promises.promises <= PROMISES


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
    before, now_s = advice.kept_ratio(), 120.0
    told = asks("obeys", now_s)
    assert told is not None
    asks("obeys", now_s + told.wait_s)
    assert advice.kept_ratio() > before


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


@pytest.mark.long
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
