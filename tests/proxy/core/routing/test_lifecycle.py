"""Which steps of a request teach what."""

from __future__ import annotations

import pytest

from proxy.core.accounts.instances import InstanceStates
from proxy.core.accounts.ledger import Ledger
from proxy.core.latency.slo_pressure import SloPressure
from proxy.core.routing.lifecycle import LatencyTracker
from proxy.core.routing.route import Route
from proxy.core.types import Instance, Load, Reason, RequestFacts, RouteClass
from tests.support.scenes import latency_of

D, P = Instance("d", "u"), Instance("p", "u", "b")
FACTS = RequestFacts("m", None, 10_000, [], 1.0)


def course() -> LatencyTracker:
    return LatencyTracker(latency_of("dp"), SloPressure(0.05))


def route(prefill: Instance | None = None) -> Route:
    return Route(
        decode=D,
        prefill=prefill,
        route_class=RouteClass.HEAVY_COLO,
        reason=Reason.MARGIN,
        policy="cost",
        prompt_tokens=10_000,
        hit_tokens=0,
        new_tokens=10_000,
        new_tokens_prefill=None,
        lease=Ledger(InstanceStates()).open(()),
        turn=0,
        predicted_ttft_s=0.0,
    )


def test_a_lone_prefill_teaches_its_instance() -> None:
    c = course()
    for i in range(300):
        r, now_s = route(), 10.0 * i
        c.reserve(r, D, 0, Load(), now_s)
        c.first_token(r, FACTS, now_s + 1.0)
        assert c.latency.wait_s("d", now_s + 1.0) == 0.0
        c.told(r)
    latency = c.latency
    whole_s = latency.way_s(10_000) + latency.prefill_s("d", 10_000, 0, 0, 0)
    assert whole_s == pytest.approx(1.0, rel=0.03)


def test_a_prefill_is_learned_once_its_answer_has_told_what_was_cached() -> None:
    """10,000 tokens were thought new, but 9,000 of them were cached: nothing is faster."""
    c = course()
    r = route()
    c.reserve(r, D, 0, Load(), 0.0)
    before = c.latency.prefill_s("d", 10_000, 0, 0, 0)
    c.first_token(r, FACTS, before / 10)
    assert c.latency.prefill_s("d", 10_000, 0, 0, 0) == before
    c.told(r, cached_ratio=0.9)
    assert r.measured is None
    assert c.latency.prefill_s("d", 10_000, 0, 0, 0) == pytest.approx(before, rel=0.15)
    c.told(r)


def test_one_behind_another_teaches_from_its_turn_on() -> None:
    """10,000 tokens take 1 s each; five come at once, so an instance that is never idle learns."""
    c = course()
    for i in range(40):
        burst, now_s = [route() for _ in range(5)], 10.0 * i
        for r in burst:
            c.reserve(r, D, 0, Load(), now_s)
        for n, r in enumerate(burst):
            c.first_token(r, FACTS, now_s + n + 1.0)
            c.told(r)
    assert c.latency.prefill_s("d", 10_000, 0, 0, 0) == pytest.approx(1.0, rel=0.03)


def test_a_late_prefill_makes_those_behind_it_late() -> None:
    c = course()
    first, second = route(), route()
    c.reserve(first, D, 0, Load(), 0.0)
    c.reserve(second, D, 0, Load(), 0.0)
    c.first_token(first, FACTS, 30.0)
    work_s = c.latency.prefill_s("d", 10_000, 0, 0, 0)
    assert c.latency.wait_s("d", 30.0) == pytest.approx(work_s)


def test_who_waited_for_room_or_overtook_teaches_no_prefill() -> None:
    c = course()
    before = c.latency.prefill_s("d", 10_000, 0, 0, 0)
    for i in range(20):
        roomless, first, second = route(), route(), route()
        c.reserve(roomless, D, 0, Load(), 100.0 * i, kv_wait_s=20.0)
        c.first_token(roomless, FACTS, 100.0 * i + 21.0)
        c.reserve(first, D, 0, Load(), 100.0 * i + 30.0)
        c.reserve(second, D, 0, Load(), 100.0 * i + 30.0)
        c.first_token(second, FACTS, 100.0 * i + 39.0)
        c.release_reservation(first, 100.0 * i + 40.0)
    assert c.latency.prefill_s("d", 10_000, 0, 0, 0) == before


def test_a_hand_over_teaches_its_pair() -> None:
    c = course()
    for i in range(300):
        r, now_s = route(P), 10.0 * i
        c.reserve(r, P, 0, Load(), now_s)
        c.prefill_done(r, FACTS, now_s + 0.5)
        c.first_token(r, FACTS, now_s + 2.5)
    assert 1.8 < c.latency.transfer_s("p", "d", 10_000) < 2.1


def test_only_a_whole_answer_teaches_the_step() -> None:
    c = course()
    before = c.latency.step_s("d", 0)
    r = route()
    c.finished(r, 1000, 50, 9.0)
    r.first_token_s = 1.0
    c.finished(r, 1000, None, 9.0)
    c.finished(r, 1000, 1, 9.0)
    assert c.latency.step_s("d", 0) == before
    for _ in range(300):
        c.finished(r, 1000, 101, 3.0)
    assert 0.018 < c.latency.step_s("d", 1000) < 0.022


def test_released_is_released_on_both() -> None:
    c = course()
    r = route(P)
    c.reserve(r, P, 0, Load(), 0.0)
    c.release_reservation(r, 0.1)
    assert c.latency.wait_s("p", 0.1) == 0.0


def test_a_leg_given_up_was_at_least_so_late() -> None:
    """Else hedging would teach the model that legs which are not waited for are quick."""
    c = course()
    for i in range(20):
        r, now_s = route(P), 10.0 * i
        c.reserve(r, P, 0, Load(), now_s)
        c.release_reservation(r, now_s + 4.0 * r.predicted_prefill_s)
        early = route(P)
        c.reserve(early, P, 0, Load(), now_s + 5.0)
        c.release_reservation(early, now_s + 5.001)
    assert c.latency.prefill_bound_s("p", 1.0) > 3.9


def test_a_queue_is_part_of_what_was_predicted() -> None:
    c = course()
    for i in range(20):
        now_s = 10.0 * i
        first, second = route(), route()
        c.reserve(first, D, 0, Load(), now_s)
        c.reserve(second, D, 0, Load(), now_s, kv_wait_s=0.1)
        work_s = c.latency.prefill_s("d", 10_000, 0, 0, 0)
        assert second.predicted_prefill_s == pytest.approx(first.predicted_prefill_s + work_s)
        c.first_token(first, FACTS, now_s + first.predicted_prefill_s)
        c.first_token(second, FACTS, now_s + second.predicted_prefill_s)
    assert c.latency.prefill_bound_s("d", 1.0) < 1.01


def test_an_answer_in_one_piece_teaches_no_prefill() -> None:
    c = course()
    before = c.latency.prefill_s("d", 10_000, 0, 0, 0)
    for i in range(20):
        r = route()
        c.reserve(r, D, 0, Load(), 10.0 * i)
        c.first_token(r, FACTS, 10.0 * i + 5.0, seen=False)
        assert c.latency.wait_s("d", 10.0 * i + 5.0) == 0.0
    assert c.latency.prefill_s("d", 10_000, 0, 0, 0) == before
    assert c.latency.prefill_bound_s("d", 1.0) == 2.0
