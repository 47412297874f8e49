"""When an engine's "busy" closes its instance for all, and when it is one client's own matter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.accounts.refusals import OWN, Refusals

BUSY_S = 30.0


def test_the_first_word_is_no_state_of_the_engine() -> None:
    assert Refusals().refused("mallory", BUSY_S, 1.0) == 0.0


def test_another_instance_that_serves_the_request_tells() -> None:
    it = Refusals()
    it.refused("alice", BUSY_S, 1.0)
    assert it.judged("alice", BUSY_S, 1.0) == BUSY_S


def test_refusals_of_two_clients_close_it_for_as_long_as_it_says() -> None:
    it = Refusals()
    it.refused("alice", BUSY_S, 1.0)
    assert it.refused("bob", BUSY_S, 1.1) == BUSY_S
    assert not it.served("carol", 0.5), "an older request says nothing against two"
    assert it.served("carol", 1.1), "it takes new ones"


def test_refusals_of_one_client_in_a_row_close_it_ever_longer() -> None:
    for client in ("mallory", ""):
        it = Refusals()
        closed = [it.refused(client, BUSY_S, float(i)) for i in range(8)]
        assert closed == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def closed_to(it: Refusals, *clients: str, now_s: float) -> list[bool]:
    return [it.until_s(client, 1000.0) > now_s for client in clients]


def test_what_one_client_was_told_closes_it_to_that_one_alone() -> None:
    it = Refusals()
    it.refused("mallory", BUSY_S, 1.0)
    it.judged("mallory", BUSY_S, 1.0)
    assert closed_to(it, "mallory", "alice", "", now_s=1.5) == [True, False, False]
    assert it.is_own("mallory")
    it.refused("alice", BUSY_S, 1.5)
    assert closed_to(it, "mallory", "alice", "bob", "", now_s=1.9) == [True] * 4, "it is full"
    assert not it.is_own("mallory")


@given(st.sampled_from(["mallory", ""]), st.sampled_from(["mallory", "alice", ""]))
def test_what_was_refused_before_a_newer_one_was_served_closes_nothing(
    client: str, other: str
) -> None:
    """A wide request that no engine takes, and a small one of the same client beside it."""
    it = Refusals()
    it.refused(client, BUSY_S, 1.0)
    it.served(other, 1.1)
    assert it.judged(client, BUSY_S, 1.6) == 0.0
    assert it.tries_s() == []
    assert it.refused("bob", BUSY_S, 1.7) == 0.0, "it is the first word again"


def test_one_that_is_served_elsewhere_late_is_kept_away_from_then_on() -> None:
    it = Refusals()
    it.refused("alice", BUSY_S, 1.0)
    it.judged("alice", BUSY_S, 9.0)
    assert it.until_s("alice", 31.0) == 10.0
    assert it.tries_s() == [10.0]


def test_clients_without_a_name_are_one() -> None:
    it = Refusals()
    it.refused("", BUSY_S, 1.0)
    it.judged("", BUSY_S, 1.0)
    assert closed_to(it, "", "alice", now_s=1.5) == [True, False]
    assert not it.is_own(""), "who waits for it is like all the others"


def test_a_closed_one_is_tried_ever_later() -> None:
    it, tried = Refusals(), list[float]()
    it.refused("mallory", BUSY_S, 0.0)
    it.refused("alice", BUSY_S, 0.0)
    at_s = 0.0
    for _ in range(6):
        assert it.refused("alice", BUSY_S, at_s) == BUSY_S
        at_s = it.until_s("alice", 1000.0)
        tried.append(at_s)
        for _ in range(5):
            it.refused("alice", BUSY_S, at_s - 0.5)  # on its way before
        assert closed_to(it, "alice", now_s=at_s - 0.1) == [True]
        assert closed_to(it, "alice", now_s=at_s) == [False]
    assert tried == [1.0, 3.0, 7.0, 15.0, 31.0, 63.0]
    assert it.until_s("alice", 40.0) == 40.0, "never for longer than it says"
    assert closed_to(it, "mallory", "bob", "", now_s=0.9) == [True] * 3
    assert closed_to(it, "mallory", "bob", "", now_s=1.0) == [False] * 3, "they have not tried"
    it.refused("bob", BUSY_S, 63.0)
    assert closed_to(it, "carol", "", now_s=64.9) == [True] * 2, "others have tried"
    assert it.served("carol", 65.0)
    it.refused("alice", BUSY_S, 70.0)
    assert it.until_s("alice", 1000.0) == 71.0


def test_the_end_of_an_answer_is_a_sign_of_room() -> None:
    it, tried = Refusals(), list[float]()
    it.ended(0.5)
    it.refused("alice", BUSY_S, 1.0)
    it.refused("bob", BUSY_S, 1.0)
    it.ended(1.05)
    assert it.tries_s() == [1.1] * 3
    assert it.until_s("carol", 100.0) == 1.1
    for _ in range(5):
        it.refused("bob", BUSY_S, it.until_s("bob", 100.0))
        it.ended(0.0)
        tried.append(round(it.until_s("bob", 100.0), 1))
    assert tried == [1.3, 1.7, 2.5, 4.1, 7.3], "ends alone do not have it asked for ever"
    it.refused("bob", BUSY_S, 7.4)
    it.ended(14.0)
    assert it.until_s("bob", 100.0) == 14.0


def test_an_answer_to_anybody_else_opens_it() -> None:
    it = Refusals()
    it.refused("mallory", BUSY_S, 1.0)
    it.refused("mallory", BUSY_S, 2.0)
    assert not it.served("mallory", 0.5), "older than its refusals"
    assert it.served("alice", 0.5)
    assert it.served("", 0.5), "nobody knows that it is the same one"


def test_a_client_that_is_refused_beside_others_that_are_served() -> None:
    it = Refusals()
    it.refused("mallory", BUSY_S, 1.0)
    it.served("alice", 1.5)
    closed = []
    for i in range(OWN + 2):
        closed.append(it.refused("mallory", BUSY_S, 2.0 + i))
        assert (it.judged("mallory", BUSY_S, 1.0) == 0.0) is (i < OWN)
    assert closed == [0.0] * (OWN + 1) + [1.0], "in the end it is full all the same"


def test_nobody_is_refused_for_another_ones_requests_while_others_are_served() -> None:
    it = Refusals()
    for i in range(50):
        assert it.refused("mallory", BUSY_S, float(i)) == 0.0
        assert it.served("alice", i + 0.5)
    assert it.refused("alice", BUSY_S, 60.0) == 0.0
    assert it.refused("mallory", BUSY_S, 61.0) == BUSY_S, "two clients: it is full"


def test_one_that_is_served_again_is_as_any_other() -> None:
    it = Refusals()
    it.refused("mallory", BUSY_S, 1.0)
    it.served("alice", 1.5)
    it.refused("mallory", BUSY_S, 2.0)
    assert it.served("mallory", 2.5)
    it.refused("mallory", BUSY_S, 3.0)
    assert it.judged("mallory", BUSY_S, 1.0) == BUSY_S


@pytest.mark.long
@given(st.lists(st.tuples(st.sampled_from(["a", "b", ""]), st.booleans(), st.floats(0, 60))))
def test_never_longer_than_it_says(events: list[tuple[str, bool, float]]) -> None:
    it = Refusals()
    for at, (client, is_refused, busy_s) in enumerate(events):
        if is_refused:
            assert 0.0 <= it.refused(client, busy_s, float(at)) <= busy_s
            assert it.judged(client, busy_s, float(at)) in (0.0, busy_s)
        else:
            it.served(client, float(at))
