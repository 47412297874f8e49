"""The wait queue: who is let in when, who is refused, and that nobody is lost or counted twice."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from proxy.core.admission.queue import (
    CAUTION,
    PATIENCE,
    DrainRate,
    Entry,
    Priority,
    QueueLimits,
    WaitQueue,
)
from proxy.core.types import RejectReason
from tests.support.examples import examples

HIGH, NORMAL, LOW = Priority
PRIOR_TPS = 1e6


def entry(tenant: str = "", tokens: int = 100, **more: Any) -> Entry:
    model, size = more.get("model", "m"), more.get("size_bytes", 10)
    charged = more.get("charged", 0)
    return Entry(model, tenant, more.get("priority", NORMAL), tokens, size, charged)


def queue(requests: int = 10_000, size: int = 1 << 30, seconds: float = 10.0, **w: float) -> Any:
    return WaitQueue(QueueLimits(requests, size, seconds), w)


def put(q: WaitQueue, *entries: Entry, now_s: float = 0.0) -> None:
    for e in entries:
        assert q.offer(e, 0.0, PRIOR_TPS, now_s).refused is None


def test_a_wait_is_promised_as_it_is_predicted() -> None:
    q, first, second = queue(), entry(tokens=1_000), entry(tokens=1_000)
    put(q, first)
    assert q.offer(second, 0.5, PRIOR_TPS, 0.0).refused is None
    assert first.promised_s == 0.0
    assert second.promised_s == pytest.approx(0.5 + 1_000 / PRIOR_TPS)


def served(q: WaitQueue, count: int, now_s: float = 0.0) -> list[Entry]:
    got = []
    for _ in range(count):
        e = q.next((), now_s)
        assert e is not None
        q.served(e, now_s)
        got.append(e)
    return got


class TestFairness:
    def test_weights_of_four_to_one(self) -> None:
        q = queue(a=4.0, b=1.0)
        put(q, *[entry(t) for _ in range(400) for t in "ab"])
        counts = Counter(e.tenant for e in served(q, 320))
        assert abs(counts["a"] - 256) <= 16, counts
        assert abs(counts["b"] - 64) <= 16, counts

    def test_who_seems_too_long_for_any_context_pays_as_much(self) -> None:
        """Nobody waits for it, as an engine may refuse it at once; its tenant had all turns."""
        q = queue(seconds=1e9)
        put(q, *[entry("a", tokens=0, charged=12_000) for _ in range(100)])
        put(q, *[entry("b", tokens=12_000) for _ in range(100)])
        counts = Counter(e.tenant for e in served(q, 100))
        assert abs(counts["a"] - counts["b"]) <= 2, counts

    @pytest.mark.parametrize("tokens", [[100], [10, 5000, 300], [1, 100_000]])
    def test_equal_tenants_get_equal_tokens(self, tokens: list[int]) -> None:
        """Jain's index over what was served while all of them wait."""
        q = queue(1_000_000, seconds=1e9)
        names = "abcdefgh"
        put(q, *[entry(t, tokens[i % len(tokens)]) for i in range(600) for t in names])
        got: Counter[str] = Counter()
        for e in served(q, 2000):
            got[e.tenant] += e.tokens
        shares = [got[name] for name in names]
        jain = sum(shares) ** 2 / (len(shares) * sum(s * s for s in shares))
        assert jain >= 0.95

    def test_nobody_starves_in_any_window_of_64(self) -> None:
        """Not the light one, not who sends one at a time, not the low band."""
        q = queue(seconds=1e9, big=8.0, small=1.0)
        put(q, *[entry("big", priority=HIGH) for _ in range(2000)])
        put(q, *[entry("small", priority=HIGH) for _ in range(300)])
        put(q, *[entry("small", priority=LOW) for _ in range(300)])
        put(q, entry("single", priority=HIGH))
        order = []
        for _ in range(1000):
            (e,) = served(q, 1)
            order.append((e.tenant, e.priority))
            if e.tenant == "single":
                put(q, entry("single", priority=HIGH))
        for start in range(len(order) - 64):
            assert len(set(order[start : start + 64])) == 4

    def test_to_come_again_is_not_cheaper_than_to_stay(self) -> None:
        """Who has one waiting at a time does not get ahead of its share."""
        q = queue(seconds=1e9, a=4.0)
        put(q, *[entry("a") for _ in range(500)], entry("one"))
        counts: Counter[str] = Counter()
        for e in (served(q, 1)[0] for _ in range(300)):
            counts[e.tenant] += 1
            if e.tenant == "one":
                put(q, entry("one"))
        assert abs(counts["one"] - 60) <= 5

    def test_bands_are_strict_up_to_patience(self) -> None:
        q = queue(seconds=1e9)
        put(q, *[entry(priority=p) for p in (LOW, NORMAL, HIGH) for _ in range(200)])
        order = [e.priority for e in served(q, 300)]
        assert order[:PATIENCE] == [HIGH] * PATIENCE
        for band in (NORMAL, LOW):
            places = [i for i, p in enumerate(order) if p is band]
            assert max(b - a for a, b in pairwise(places)) <= PATIENCE + 2
        assert order[:200].count(HIGH) > 150

    def test_models_take_turns(self) -> None:
        q = queue()
        put(q, *[entry(model=m) for m in "mn" for _ in range(3)])
        assert [e.lane for e in served(q, 6)] == ["m", "n"] * 3

    @pytest.mark.parametrize("at_home", [0, 1])
    def test_many_models_are_no_more_turns(self, at_home: int) -> None:
        """Whether or not the tenant with many waits beside the other one too."""
        q = queue(seconds=1e9, c=2.0)
        models = [f"m{i}" for i in range(20)]
        put(q, *[entry("many", model=m) for _ in range(40) for m in models[1 - at_home :]])
        put(q, *[entry(t, model="m0") for _ in range(200) for t in "ac"])
        counts = Counter(e.tenant for e in served(q, 400))
        for tenant, share in {"many": 100, "a": 100, "c": 200}.items():
            assert abs(counts[tenant] - share) <= 5, counts

    def test_what_a_tenant_has_elsewhere_costs_it_no_turn_at_another_model(self) -> None:
        """Models may have instances of their own."""
        q = queue(seconds=1e9)
        put(q, *[entry(t, model="m") for _ in range(100) for t in "ab"])
        put(q, *[entry("a", model="n") for _ in range(1000)])
        order = []
        for _ in range(50):
            for blocked in ({"m"}, {"m"}, {"m"}, {"n"}):
                e = q.next(blocked, 0.0)
                assert e is not None
                q.served(e, 0.0)
                order += [e.tenant] if e.lane == "m" else []
        assert abs(order.count("a") - order.count("b")) <= 1

    def test_one_model_waiting_does_not_hold_up_another(self) -> None:
        q = queue()
        put(q, entry(model="m"), entry(model="n"))
        found = q.next({"m"}, 0.0)
        assert found is not None
        assert found.lane == "n"
        assert q.next({"m", "n"}, 0.0) is None


class TestOrderWithinATenant:
    def test_first_come_first_served(self) -> None:
        q = queue()
        entries = [entry() for _ in range(5)]
        put(q, *entries)
        assert served(q, 5, 5.0) == entries

    def test_newest_first_once_the_oldest_is_half_through_its_time(self) -> None:
        q = queue(seconds=10.0)
        old, middle, new = entry(), entry(), entry()
        put(q, old)
        put(q, middle, now_s=3.0)
        put(q, new, now_s=4.0)
        assert served(q, 3, 5.001) == [new, middle, old]


class TestBounds:
    def test_requests(self) -> None:
        q = queue(2)
        put(q, entry(), entry())
        assert q.offer(entry(), 0.0, PRIOR_TPS, 0.0).refused is RejectReason.QUEUE_FULL
        assert len(q) == 2

    def test_bytes(self) -> None:
        q = queue(size=100)
        put(q, entry(size_bytes=60))
        assert q.offer(entry(size_bytes=41), 0.0, PRIOR_TPS, 0.0).refused
        put(q, entry(size_bytes=40))
        assert q.bytes == 100

    def test_none_may_wait(self) -> None:
        assert queue(0).offer(entry(), 0.0, PRIOR_TPS, 0.0).refused is RejectReason.QUEUE_FULL

    def test_who_would_wait_too_long_is_refused_at_once(self) -> None:
        q = queue(seconds=10.0)
        late = RejectReason.QUEUE_DEADLINE
        assert q.offer(entry(), 10.1, PRIOR_TPS, 0.0).refused is late
        put(q, entry(tokens=9000))
        assert q.offer(entry(), 0.5, CAUTION * 900.0, 0.0).refused is late
        assert q.offer(entry(), 0.5, CAUTION * 1000.0, 0.0).refused is None

    def test_the_wait_counts_only_who_is_served_before(self) -> None:
        q = queue(seconds=1e9)
        put(q, *[entry("a", 1000) for _ in range(10)], entry("l", 50_000, priority=LOW))
        assert q.wait_s(entry("b"), 1.0, 1000.0, 0.0) == pytest.approx(1.0)
        assert q.wait_s(entry("a"), 1.0, 1000.0, 0.0) == pytest.approx(11.0)
        assert q.wait_s(entry("z", priority=HIGH), 1.0, 1000.0, 0.0) == pytest.approx(1.0)
        low_s = q.wait_s(entry("z", priority=LOW), 1.0, 1000.0, 0.0)
        assert low_s == pytest.approx(1.0 + PATIENCE), "then it is its band's turn"

    def test_a_tenant_cannot_fill_it_for_others(self) -> None:
        q = queue(8)
        put(q, *(hog := [entry("hog") for _ in range(8)]))
        for i in range(4):
            offer = q.offer(entry("b"), 0.0, PRIOR_TPS, 0.0)
            assert offer.displaced == [hog[-1 - i]], "the newest of who holds most"
        assert q.offer(entry("b"), 0.0, PRIOR_TPS, 0.0).refused
        assert q.offer(entry("hog"), 0.0, PRIOR_TPS, 0.0).refused
        assert Counter(e.tenant for e in q.entries()) == {"hog": 4, "b": 4}

    def test_a_higher_band_takes_a_lower_ones_place(self) -> None:
        q = queue(2)
        low, normal = entry(priority=LOW), entry()
        put(q, normal, low)
        assert q.offer(entry(priority=HIGH), 0.0, PRIOR_TPS, 0.0).displaced == [low]
        assert q.offer(entry(priority=LOW), 0.0, PRIOR_TPS, 0.0).refused
        assert q.offer(entry("else", priority=HIGH), 0.0, PRIOR_TPS, 0.0).displaced == [normal]

    @pytest.mark.parametrize("sizes", [[20] * 5, [1_000_000], [70, 10, 10, 10]])
    def test_a_tenant_cannot_fill_its_bytes_for_others(self, sizes: list[int]) -> None:
        """Not with many, not with a large one, not with small ones behind large ones."""
        room = sum(sizes)
        q = queue(100, size=room)
        put(q, *(hog := [entry("hog", size_bytes=size) for size in sizes]))
        offer = q.offer(mine := entry("b", size_bytes=room * 3 // 10), 0.0, PRIOR_TPS, 0.0)
        assert offer.refused is None
        assert offer.displaced == hog[len(hog) - len(offer.displaced) :][::-1], "the newest first"
        assert mine.is_waiting

    def test_nobody_leaves_in_vain(self) -> None:
        """Who would not be let in for it displaces nobody."""
        q = queue(10, size=100)
        put(q, *[entry("hog", size_bytes=20) for _ in range(5)])
        assert q.offer(entry("b", size_bytes=61), 0.0, PRIOR_TPS, 0.0).refused
        assert q.offer(entry("b", size_bytes=101), 0.0, PRIOR_TPS, 0.0).refused
        assert q.offer(entry("hog", size_bytes=5, priority=LOW), 0.0, PRIOR_TPS, 0.0).refused
        assert len(q) == 5

    def test_to_call_all_high_takes_nobody_elses_place(self) -> None:
        """A priority is what a client says of itself: it is weighed within its tenant."""
        q = queue(8, seconds=1e9)
        put(q, *[entry("b") for _ in range(4)])
        for _ in range(20):
            q.offer(entry("hog", priority=HIGH), 0.0, PRIOR_TPS, 0.0)
        assert Counter(e.tenant for e in q.entries()) == {"hog": 4, "b": 4}
        q = queue(8, seconds=1e9)
        put(q, *[entry("hog", priority=HIGH) for _ in range(8)])
        assert q.offer(entry("b", priority=LOW), 0.0, PRIOR_TPS, 0.0).refused is None

    def test_a_flood_of_high_ones_is_not_all_ahead(self) -> None:
        """One of a lower band is let in after so many: it is not refused for all of the rest."""
        q = queue(seconds=10.0)
        put(q, *[entry("hog", 1000, priority=HIGH) for _ in range(1000)])
        assert q.wait_s(entry("b"), 0.0, 1000.0, 0.0) == pytest.approx(PATIENCE)

    def test_a_thousand_tiny_prompts_do_not_starve_a_few_of_some_length(self) -> None:
        q = queue(seconds=1e9)
        put(q, *[entry("hog", 1) for _ in range(1000)], *[entry("b", 1000) for _ in range(10)])
        order = [e.tenant for e in served(q, 100)]
        assert order.count("b") == 10


class TestDrainRate:
    def test_it_starts_as_assumed_and_learns(self) -> None:
        rate = DrainRate()
        assert rate.tps(500.0, 0.0) == 500.0
        rate.began(0.0)
        for i in range(1, 101):
            rate.served(1000, i * 0.5)
        assert rate.tps(500.0, 50.0) == pytest.approx(2000.0, rel=0.15)

    def test_it_falls_while_nothing_moves_and_not_while_nobody_waits(self) -> None:
        rate = DrainRate()
        rate.began(0.0)
        rate.served(1000, 1.0)
        assert rate.tps(1000.0, 1.0) == 1000.0
        assert rate.tps(1000.0, 9.0) == 200.0
        rate.ended()
        assert rate.tps(1000.0, 1e6) == 1000.0


class Conservation(RuleBasedStateMachine):
    """Against a plain list: every entry is in until it leaves, and leaves once."""

    @initialize(requests=st.integers(1, 12), size=st.integers(10, 200), weight=st.floats(0.1, 8))
    def begin(self, requests: int, size: int, weight: float) -> None:
        self.q = WaitQueue(QueueLimits(requests, size, 10.0), {"a": weight})
        self.waiting: list[Entry] = []
        self.left: Counter[int] = Counter()
        self.keep: list[Entry] = []
        self.passed: Counter[tuple[str, Priority]] = Counter()
        self.now_s = 0.0

    def gone(self, e: Entry) -> None:
        self.waiting.remove(e)
        self.left[id(e)] += 1
        assert self.left[id(e)] == 1
        assert not e.is_waiting

    @rule(
        tenant=st.sampled_from("abc"),
        model=st.sampled_from("mn"),
        priority=st.sampled_from(Priority),
        tokens=st.integers(0, 50_000),
        size=st.integers(0, 60),
        soonest_s=st.floats(0, 12),
    )
    def offer(
        self, tenant: str, model: str, priority: Priority, tokens: int, size: int, soonest_s: float
    ) -> None:
        e = entry(tenant, tokens, model=model, priority=priority, size_bytes=size)
        self.keep.append(e)  # ids are not given away again
        offer = self.q.offer(e, soonest_s, 20_000.0, self.now_s)
        assert e.is_waiting == (offer.refused is None)
        for displaced in offer.displaced:
            assert offer.refused is None
            assert displaced.tenant != tenant or displaced.priority > priority
            self.gone(displaced)
        if offer.refused is None:
            self.waiting.append(e)

    @rule(blocked=st.sets(st.sampled_from("mn")))
    def admit(self, blocked: set[str]) -> None:
        e = self.q.next(blocked, self.now_s)
        open_to = [w for w in self.waiting if w.lane not in blocked]
        assert (e is None) == (not open_to)
        if e is None:
            return
        assert e in open_to
        assert e is self.q.next(blocked, self.now_s), "asking changes nothing"
        for band in Priority:
            beside = [w for w in self.waiting if w.lane == e.lane and w.priority is band]
            key = (e.lane, band)
            is_passed = band > e.priority and beside
            self.passed[key] = self.passed[key] + 1 if is_passed else 0
            assert self.passed[key] <= PATIENCE + 1
        self.q.served(e, self.now_s)
        self.gone(e)

    @rule(at=st.integers(0, 100))
    def leave(self, at: int) -> None:
        if self.waiting:
            e = self.waiting[at % len(self.waiting)]
            assert self.q.leave(e)
            self.gone(e)
            assert not self.q.leave(e)

    @rule(seconds=st.floats(0, 8))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def books_agree(self) -> None:
        assert len(self.q) == len(self.waiting) <= self.q.limits.requests
        assert self.q.bytes == sum(e.size_bytes for e in self.waiting) <= self.q.limits.bytes
        assert self.q.tokens == sum(e.tokens for e in self.waiting)
        assert self.q._shares.tags.keys() == {e.tenant for e in self.waiting}
        assert set(self.q.entries()) == set(self.waiting)
        for model in "mn":
            assert self.q.has(model) == any(e.lane == model for e in self.waiting)
        if not self.waiting:
            assert not self.q._lanes
            assert not any(self.q._held)
            assert not self.q._shares.tags
            assert not self.q._shares.left


Conservation.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestConservation = Conservation.TestCase
