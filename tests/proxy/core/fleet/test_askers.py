"""What one client's requests say about an instance, for itself and for all others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.fleet.askers import (
    AGREED,
    DOUBTS,
    FADE_MOST_S,
    FADE_S,
    KEPT_S,
    MOST,
    Askers,
    Unjudged,
)
from proxy.core.fleet.events import InstanceEvents
from proxy.core.fleet.health import DOUBT_KINDS, FAULTS, Change, Health, State
from proxy.core.fleet.members import Fleet
from proxy.core.types import FailureKind, Instance

KINDS = sorted(DOUBT_KINDS)


def fleet_of(*names: str) -> tuple[Fleet, InstanceEvents]:
    fleet = Fleet()
    events = InstanceEvents(fleet, lambda: None)
    for name in names:
        fleet.add(Instance(name, f"http://{name}"))
        events.probe_answered(name, 0.0)
    return fleet, events


def doubts(fleet: Fleet, client: str, now_s: float) -> list[float]:
    return fleet.doubts(fleet.members(), client, now_s) or [0.0] * len(fleet.members())


def test_two_in_a_row_keep_their_client_away_and_nobody_else() -> None:
    it = Askers()
    it.failed("a", 1.0)
    assert it.weight("a", 1.0) == 0.0, "a single one says nothing"
    it.failed("a", 1.0)
    assert it.weight("a", 1.0) == 0.5
    assert it.weight("b", 1.0) == 0.0
    it.failed("b", 1.0)
    assert it.weight("c", 1.0) == 0.0
    it.failed("b", 1.0)
    assert it.weight("c", 1.0) == 0.5, "two clients say so"


def test_a_newer_whole_answer_takes_half_and_an_older_one_nothing() -> None:
    it = Askers()
    for _ in range(4):
        it.failed("a", 2.0)
    before = it.weight("a", 2.0)
    it.served("a", 1.9)
    it.served("b", 3.0)
    assert it.weight("a", 2.0) == before
    it.served("a", 2.0)
    assert it.weight("a", 2.0) == 0.0
    it.served("a", 2.0)
    it.served("a", 2.0)
    assert len(it) == 0


def test_what_others_are_served_says_that_it_works_for_them() -> None:
    it = Askers()
    for client in "aabb":
        it.failed(client, 2.0)
    it.served("c", 1.9)
    assert it.is_any(2.0)
    assert it.weight("d", 2.0) == 0.5
    it.served("c", 2.1)
    assert not it.is_any(2.1)
    assert it.weight("d", 2.1) == 0.0
    assert it.weight("a", 2.1) > 0.4, "not for those whom it has failed"
    it.failed("a", 20.0)
    assert it.is_any(20.0), "it has begun anew"


def test_each_failure_after_the_time_is_over_doubles_it() -> None:
    it = Askers()
    it.failed("a", 0.0)
    it.failed("a", 0.0)
    now_s, away_s = 0.0, FADE_S
    for _ in range(5):
        assert it.is_any(now_s + 0.99 * away_s)
        assert not it.is_any(now_s + away_s)
        now_s, away_s = now_s + away_s, min(FADE_MOST_S, 2 * away_s)
        it.failed("a", now_s)
    it.failed("a", now_s + KEPT_S + 1.0)
    assert not it.is_any(now_s + KEPT_S + 1.0), "forgotten"


def test_a_trial_that_is_late_keeps_away_who_is_kept_away() -> None:
    it = Askers()
    it.goes_on(0.0)
    it.failed("a", 0.0)
    it.failed("a", 0.0)
    it.failed("b", 0.0)
    it.goes_on(0.9 * FADE_S)
    assert it.weight("a", 0.9 * FADE_S) == 0.5
    it.goes_on(2.0 * FADE_S)
    assert it.weight("a", 2.0 * FADE_S) == 0.0


def test_a_few_clients_are_kept_those_that_failed_last() -> None:
    it = Askers()
    for i in range(3 * MOST):
        it.failed(f"c{i}", 0.0)
        it.failed(f"c{i}", 0.0)
    assert len(it) == MOST
    assert it.weight("c0", 0.0) == it.weight(f"c{3 * MOST - 1}", 0.0) == 0.5


@pytest.mark.parametrize("way", ["broke", "judged"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("client", ["", "the only key"])
def test_an_engine_that_fails_and_passes_its_trial_is_avoided_whoever_asks(
    client: str, kind: FailureKind, way: str
) -> None:
    """Where it costs nothing: ten requests in a second, which prefer it to its peers."""
    fleet, events = fleet_of("sick", "well")
    failed = 0
    for i in range(1_200):
        now_s = 0.1 * i
        sick, well = doubts(fleet, client, now_s)
        if sick <= well and fleet.is_up("sick"):
            failed += 1
            events.doubted("sick", client, kind, "x", now_s)
            if way == "broke":
                events.broke("sick", client, kind, "x", now_s)
            else:
                events.judged("sick", client, kind, "x", now_s)
        else:
            events.served("well", now_s, client)
        member = fleet.get("sick")
        assert member is not None
        if member.health.trial_due(now_s):
            events.trial_ended("sick", None, now_s)
    assert failed <= 2 * FAULTS, "of 1,200"


def happen(events: InstanceEvents, step: str, kind: FailureKind, now_s: float) -> Change | None:
    """A request of mallory's, or an answer to alice's, on one instance."""
    match step:
        case "b":
            return events.broke("i", "mallory", kind, "x", now_s)
        case "j":
            events.doubted("i", "mallory", kind, "x", now_s)
            return events.judged("i", "mallory", kind, "x", now_s)
        case "d":
            events.doubted("i", "mallory", kind, "x", now_s)
        case "s" | "o":
            events.served("i", now_s, "mallory" if step == "s" else "alice")
        case _:
            events.answered("i", is_served=step == "a")
    return None


@given(
    st.lists(st.tuples(st.sampled_from("bjdsaeto"), st.sampled_from(KINDS), st.floats(0.0, 8.0)))
)
def test_one_clients_requests_neither_eject_nor_price_for_another(
    steps: list[tuple[str, FailureKind, float]],
) -> None:
    """Whatever it makes of them, and however those of others and trials fall in between."""
    fleet, events = fleet_of("i", "j")
    member = fleet.get("i")
    assert member is not None
    now_s = 0.0
    for step, kind, later_s in steps:
        now_s += later_s
        if step == "t":
            if member.health.trial_due(now_s):
                events.trial_ended("i", None, now_s)
        else:
            assert happen(events, step, kind, now_s) is None
        assert fleet.is_up("i")
        assert not member.health.is_suspect
        assert not any(doubts(fleet, "alice", now_s))


def test_what_nobody_has_judged_is_believed_for_its_client_and_from_two() -> None:
    fleet, events = fleet_of("i", "j")

    def doubted(client: str, times: int) -> None:
        for _ in range(times):
            events.doubted("i", client, FailureKind.RESET, "x", 1.0)

    doubted("mallory", 3 * DOUBTS)
    assert fleet.doubted() == fleet.failing("mallory") == {"i"}, "a trial is due by the total"
    assert not fleet.failing("alice")
    doubted("bob", AGREED - 1)
    assert not fleet.failing("alice"), "one that is about to be judged"
    doubted("bob", 1)
    assert fleet.failing("alice") == fleet.failing("bob") == {"i"}
    for _ in range(AGREED):
        events.judged("i", "bob", FailureKind.RESET, "x", 1.0)
    assert not fleet.failing("alice"), "its own are judged"
    assert fleet.failing("mallory") == {"i"}
    doubted("", DOUBTS)
    assert fleet.failing("alice") == {"i"}
    events.answered("i")
    assert not fleet.failing("mallory")


@pytest.mark.parametrize("clients", [1, 2, 5, 100])
def test_an_engine_that_nobody_is_served_by_gets_no_repetition(clients: int) -> None:
    """Whether they count as one, or each for itself; the table of them is bounded."""
    fleet, events = fleet_of("i", "j")
    names = [f"c{i}" if i else "" for i in range(clients)]
    for i in range(max(clients, 2 * DOUBTS)):
        events.doubted("i", names[i % clients], FailureKind.RESET, "x", 1.0)
    assert all(fleet.failing(name) == {"i"} for name in names)
    for name in names * (2 * DOUBTS):
        events.judged("i", name, FailureKind.RESET, "x", 1.0)
    assert not fleet.failing("")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2 * MOST))))
def test_unjudged_failures_are_never_more_than_there_were(
    steps: list[tuple[bool, int]],
) -> None:
    it, count = Unjudged(), 0
    for is_judged, client in steps:
        if is_judged:
            it.judged(f"c{client}")
        else:
            it.failed(f"c{client}")
            count += 1
        assert 0 <= it.count <= count
        assert len(it) <= MOST


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 8.0))))
def test_what_fails_alike_everywhere_prices_nobody(steps: list[tuple[bool, float]]) -> None:
    fleet, events = fleet_of("i", "j", "k")
    now_s = 0.0
    for is_served, later_s in steps:
        now_s += later_s
        for name in "ijk":
            if is_served:
                events.served(name, now_s, "mallory")
            else:
                events.broke(name, "mallory", FailureKind.RESET, "x", now_s)
        assert not any(doubts(fleet, "mallory", now_s))


def test_two_clients_failures_open_the_breaker() -> None:
    fleet, events = fleet_of("i", "j")
    changes = [
        events.judged("i", ("a", "b")[at % 2], FailureKind.RESET, "x", 0.1 * at)
        for at in range(FAULTS)
    ]
    assert changes == [None] * (FAULTS - 1) + [Change.OPENED]
    assert not fleet.is_up("i")


def test_a_trial_decides_on_what_another_has_served() -> None:
    health = Health(was_seen=True)
    for _ in range(2):
        assert not health.judged("a", FailureKind.RESET, "x", 1.0)
    assert health.trial_due(1.0)
    assert health.state(1.0) is State.SUSPECT
    assert health.trial_failed("reset", 1.0, FailureKind.RESET) is Change.OPENED
    health.trial_answered(100.0)
    assert health.state(100.0) is State.HEALTHY


@pytest.mark.parametrize("kind", KINDS)
def test_a_clients_errors_end_no_doubt(kind: FailureKind) -> None:
    health = Health(was_seen=True)
    for i in range(DOUBTS):
        health.doubted("a", kind, "x", 0.1 * i)
        health.answered(is_served=False)
    assert health.trial_due(1.0)
    changes = []
    for i in range(FAULTS):
        health.answered(is_served=False)
        changes.append(health.failed(kind, "x", 1.0 + 0.1 * i))
    assert changes[-1] is Change.OPENED
    assert health.answers == DOUBTS + FAULTS
