"""Where a request goes after a failure: every kind, offloaded or not, at every count of retries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.fleet.retries import (
    BACKOFF_MAX_S,
    BACKOFF_MIN_S,
    BUDGET_MIN,
    BUDGET_RATIO,
    MAX_RETRIES,
    Budget,
    Next,
    after_failure,
    backoff_s,
    busy_s,
    fallback_reason,
    is_innocent,
    may_repeat,
)
from proxy.core.types import FailureKind, Fallback

SAME, OTHER, GIVE_UP = Next.SAME_INSTANCE, Next.OTHER_INSTANCE, Next.GIVE_UP
TABLE = {
    FailureKind.CONNECT: (OTHER, OTHER, Fallback.D_FAILED),
    FailureKind.UNREACHABLE: (OTHER, OTHER, Fallback.D_FAILED),
    FailureKind.RESET: (OTHER, OTHER, Fallback.D_FAILED),
    FailureKind.BUSY: (OTHER, OTHER, Fallback.D_FAILED),
    FailureKind.SERVER_ERROR: (OTHER, SAME, Fallback.D_FAILED),
    FailureKind.TIMEOUT: (OTHER, SAME, Fallback.TRANSFER_TIMEOUT),
    FailureKind.LATE: (OTHER, SAME, Fallback.TRANSFER_TIMEOUT),
    FailureKind.MALFORMED: (OTHER, OTHER, Fallback.D_FAILED),
    FailureKind.REDIRECT: (GIVE_UP, GIVE_UP, Fallback.D_FAILED),
    FailureKind.PEER_GONE: (OTHER, SAME, Fallback.P_GONE),
    FailureKind.WENT_DOWN: (OTHER, OTHER, Fallback.D_FAILED),
    FailureKind.NO_MODEL: (OTHER, OTHER, Fallback.D_FAILED),
    FailureKind.TOO_LONG: (OTHER, OTHER, Fallback.D_FAILED),
    FailureKind.HOLLOW: (OTHER, OTHER, Fallback.D_FAILED),
    FailureKind.KEY_REFUSED: (OTHER, OTHER, Fallback.D_FAILED),
    FailureKind.NO_ROOM: (GIVE_UP, GIVE_UP, Fallback.D_FAILED),
}
ONCE = {FailureKind.TIMEOUT, FailureKind.NO_MODEL}


def test_every_kind_has_its_row() -> None:
    assert set(TABLE) == set(FailureKind)


@pytest.mark.parametrize("kind", FailureKind)
def test_while_retries_are_left(kind: FailureKind) -> None:
    colocated, offloaded, fallback = TABLE[kind]
    for retries in range(1 if kind in ONCE else MAX_RETRIES):
        assert after_failure(kind, offloaded=False, retries=retries) is colocated
        assert after_failure(kind, offloaded=True, retries=retries) is offloaded
    assert fallback_reason(kind) is fallback


@pytest.mark.parametrize("kind", FailureKind)
@pytest.mark.parametrize("retries", [MAX_RETRIES, MAX_RETRIES + 1])
def test_after_the_last_retry(kind: FailureKind, retries: int) -> None:
    """A D that waited for its peer has not run yet: computing there is not one more attempt."""
    still = after_failure(kind, offloaded=True, retries=retries)
    assert after_failure(kind, offloaded=False, retries=retries) is GIVE_UP
    assert still is (SAME if TABLE[kind][1] is SAME else GIVE_UP)


@pytest.mark.parametrize("kind", [FailureKind.TIMEOUT, FailureKind.NO_MODEL])
def test_once_is_enough_where_the_next_would_be_the_same(kind: FailureKind) -> None:
    assert after_failure(kind, offloaded=False, retries=1) is GIVE_UP


def test_the_same_instance_again_only_where_nothing_was_computed() -> None:
    again = {kind for kind in FailureKind if may_repeat(kind, 0)}
    assert again == {FailureKind.CONNECT, FailureKind.UNREACHABLE, FailureKind.RESET}
    assert not any(may_repeat(kind, 1) for kind in FailureKind)
    assert {kind for kind in FailureKind if is_innocent(kind)} == {
        kind for kind, (_, offloaded, _) in TABLE.items() if offloaded is SAME
    }


@given(st.integers(0, 1000), st.floats(0.0, 1.0))
def test_a_pause_is_within_its_bounds(retries: int, u: float) -> None:
    assert BACKOFF_MIN_S <= backoff_s(min(retries, 50), u) <= BACKOFF_MAX_S
    assert backoff_s(0, 0.0) == BACKOFF_MIN_S
    assert backoff_s(2, 1.0) == BACKOFF_MAX_S


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100)), max_size=200))
def test_the_budget_is_kept(plan: list[tuple[bool, int]]) -> None:
    """It refuses beyond the limit, and only there; nothing is lost count of."""
    budget, running = Budget(), 0
    for begins, active in plan:
        if begins:
            is_over = running >= max(BUDGET_MIN, BUDGET_RATIO * active)
            budget.active = active
            assert budget.take() is not is_over
            running += not is_over
        elif running:
            budget.give_back()
            running -= 1
        assert budget.in_flight == running


@pytest.mark.parametrize(
    ("retry_after", "seconds"),
    [
        ("7", 7),
        (" 7 ", 7),
        ("1.2", 2),
        ("0", 1),
        ("-5", 1),
        ("1000000000", 30),
        ("1e9", 30),
        ("1e999", 30),
        ("nan", 1),
        ("soon", 1),
        ("", 1),
        (None, 1),
        ("Fri, 20 Nov 2026 12:00:12 GMT", 12),
        ("Fri, 20 Nov 2026 11:00:00 GMT", 1),
        ("Fri, 20 Nov 2099 12:00:00 GMT", 30),
        ("Fri, 99 Nov 2026 12:00:12 GMT", 1),
        ("Fri, 20 Nov 2026 12:00:12 +9999", 1),
    ],
)
def test_how_long_a_busy_engine_is_left_alone(retry_after: str | None, seconds: int) -> None:
    assert busy_s(retry_after, 1795176000.0) == seconds


@given(st.text(max_size=40))
def test_any_retry_after_gives_a_time(text: str) -> None:
    assert 1 <= busy_s(text, 1795176000.0) <= 30
