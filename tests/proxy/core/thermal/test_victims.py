"""Whom to evict, whether it is worth it, and how many bytes may move."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.thermal.victims import (
    VICTIMS,
    MoveBudget,
    Relief,
    Victim,
    is_worth_moving,
    most_evictions,
    queue_s,
    select_victims,
    transfer_s,
)

A = Victim("a", kv_tokens=9000, last_token_s=5.0, priority=0, remaining_tokens=10, qps=3.0)
B = Victim("b", kv_tokens=100, last_token_s=1.0, priority=5, remaining_tokens=900, qps=1.0)
C = Victim("c", kv_tokens=3000, last_token_s=3.0, priority=5, remaining_tokens=2000, qps=2.0)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", "bca"),
        ("largest_kv", "acb"),
        ("lowest_priority", "cba"),
        ("longest_remaining", "cba"),
        ("least_qps", "bca"),
        ("max_relief", "cba"),
    ],
)
def test_each_policy_has_its_order(policy: str, order: str) -> None:
    chosen = select_victims(policy, [A, B, C], 3, 100.0)
    assert "".join(victim.request_id for victim in chosen) == order


@given(
    st.sampled_from(list(VICTIMS)),
    st.lists(
        st.builds(
            Victim,
            st.text("abc", min_size=1, max_size=3),
            kv_tokens=st.integers(0, 10**6),
            remaining_tokens=st.integers(0, 10**5),
            is_movable=st.booleans(),
            moves=st.integers(0, 3),
            moved_s=st.floats(0.0, 100.0),
            arrived_s=st.floats(0.0, 100.0),
        ),
        max_size=12,
        unique_by=lambda victim: victim.request_id,
    ),
    st.integers(-1, 20),
    st.booleans(),
)
def test_no_more_than_asked_and_nobody_who_must_stay(
    policy: str, running: list[Victim], count: int, may_abort: bool
) -> None:
    chosen = select_victims(policy, running, count, 100.0, may_abort=may_abort)
    assert len(chosen) <= max(0, count)
    assert len({victim.request_id for victim in chosen}) == len(chosen)
    for victim in chosen:
        assert victim in running
        assert victim.may_move(100.0) or (may_abort and not victim.is_movable)
    # The order does not depend on how the running requests come.
    assert chosen == select_victims(policy, running[::-1], count, 100.0, may_abort=may_abort)


def test_an_unknown_policy_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"policy must be one of lru, .*, not 'newest'"):
        select_victims("newest", [], 1, 0.0)


@pytest.mark.parametrize(
    "victim",
    [
        Victim("x", is_movable=False),
        Victim("x", moves=2),
        Victim("x", moves=1, moved_s=41.0),
        Victim("x", arrived_s=91.0),
    ],
)
def test_who_is_not_moved(victim: Victim) -> None:
    assert select_victims("lru", [victim], 1, 100.0) == []


def test_what_cannot_be_moved_is_ended_last_and_only_when_allowed() -> None:
    fixed = Victim("x", is_movable=False)
    assert select_victims("lru", [fixed, A], 2, 100.0, may_abort=True) == [A, fixed]


def test_16_gb_take_400_ms_and_nobody_is_moved_for_a_shorter_wait() -> None:
    move_s = transfer_s(16e9)
    assert move_s == pytest.approx(0.4)
    assert not is_worth_moving(0.4, move_s)
    assert is_worth_moving(0.41, move_s)
    assert is_worth_moving(0.41, move_s, remaining_s=0.81)
    assert not is_worth_moving(0.41, move_s, remaining_s=0.8)


@pytest.mark.parametrize(("cap", "wait_s"), [(5, 0.0), (4, 1.0), (3, 2.0), (1, 9.0), (0, 9.0)])
def test_the_next_request_waits_until_enough_have_ended(cap: int, wait_s: float) -> None:
    assert queue_s([9.0, 1.0, 4.0, 2.0], cap) == wait_s


def test_relief_is_watts_times_what_is_left_over_the_move() -> None:
    relief = Relief(3.2, 0.001, 131_072.0, 40e9)
    move_s = 0.03 + 3000 * 131_072 / 40e9
    assert relief.of(C) == pytest.approx((3.2 + 3.0) * 2000 / move_s)


def test_kv_in_the_founding_document_s_blocks() -> None:
    assert [Victim("x", kv_tokens=n).get_num_kv_blocks() for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_a_tenth_of_what_runs_may_leave_per_minute() -> None:
    assert [most_evictions(100, done) for done in (0, 9, 10, 11)] == [10, 1, 0, 0]
    assert most_evictions(3, 0) == 1


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(1e6, 60e9)), min_size=1, max_size=60))
def test_the_fleet_moves_20_gb_per_second_at_most(moves: list[tuple[float, float]]) -> None:
    budget, now_s, moved = MoveBudget(20e9), 0.0, 0.0
    largest = 0.0
    for number, (passed_s, size) in enumerate(moves):
        now_s += passed_s
        if budget.take(f"{number}", size, now_s) == 0.0:
            # What was let go before this move is never more than the rate and one burst.
            assert moved <= 20e9 * (now_s + 1.0) + largest
            moved += size
            largest = max(largest, size)


def test_a_move_waits_as_long_as_it_is_told() -> None:
    budget = MoveBudget(20e9)
    assert budget.take("ab", 20e9, 0.0) == 0.0
    wait_s = budget.take("ab", 10e9, 0.0)
    assert wait_s == pytest.approx(0.5)
    assert budget.take("ab", 10e9, wait_s) == 0.0


def test_a_link_gives_half_of_its_bandwidth() -> None:
    budget = MoveBudget(20e9)
    assert budget.take("ab", 1e9, 0.0, link_bytes_per_s=2e9) == 0.0
    assert budget.take("ab", 1e9, 0.0, link_bytes_per_s=2e9) == pytest.approx(1.0)
    assert budget.take("ac", 1e9, 0.0, link_bytes_per_s=2e9) == 0.0
    assert budget.take("ad", 1e9, 0.0) == 0.0
