"""Answers that served nobody: what counts, for how long, and how it is priced."""

from __future__ import annotations

import pytest

from proxy.core.fleet.events import InstanceEvents
from proxy.core.fleet.health import DOUBT_TRIAL_S, FAULTS, Change, State
from proxy.core.fleet.hollow import ALONE_S, FADE_S, FEW, REFUSALS, SPARED, Hollow
from proxy.core.fleet.members import Fleet
from proxy.core.types import FailureKind, Instance

ABORT, REFUSED = "finish reason abort", "status 400"


def fleet_of(*names: str) -> tuple[Fleet, InstanceEvents]:
    fleet = Fleet()
    events = InstanceEvents(fleet, lambda: None)
    for name in names:
        fleet.add(Instance(name, f"http://{name}"))
        events.probe_answered(name, 0.0)
    return fleet, events


def weights(fleet: Fleet, now_s: float) -> list[float] | None:
    return fleet.doubts(fleet.members(), "a", now_s)


def test_a_few_refusals_are_taken_for_right_then_another_is_asked() -> None:
    hollow = Hollow()
    assert [hollow.refused("a", 0.0) for _ in range(REFUSALS + 2)] == [False] * REFUSALS + [
        True,
        True,
    ]
    hollow.acquitted()
    assert not any(hollow.refused("a", 0.0) for _ in range(REFUSALS))
    hollow.served(0.0)
    assert not hollow.refused("a", 0.0)


def test_those_of_several_clients_are_asked_about_sooner() -> None:
    for is_redirect in (False, True):
        hollow = Hollow()
        asked = [hollow.refused(f"c{i}", 0.0, is_redirect=is_redirect) for i in range(FEW + 2)]
        assert asked == [False] * FEW + [True, True]
        hollow.served(0.0)
        assert not hollow.refused("c0", 0.0)


def test_those_beside_what_peers_serve_are_asked_about_sooner() -> None:
    for is_redirect in (False, True):
        hollow = Hollow()
        asked = [hollow.refused("a", 0.0, i, is_redirect=is_redirect) for i in range(FEW + 2)]
        assert asked == [False] * FEW + [True, True]


def test_what_peers_have_served_before_says_nothing() -> None:
    hollow = Hollow()
    assert not any(hollow.refused("a", 0.0, 100) for _ in range(REFUSALS))


def test_one_clients_redirections_are_its_own_fault_whatever_their_number() -> None:
    hollow = Hollow()
    assert not any(hollow.refused("a", 0.0, is_redirect=True) for _ in range(1000))


def test_refusals_alone_price_and_doubt_nobody() -> None:
    fleet, events = fleet_of("a", "b")
    for _ in range(1000):
        events.refused("a", "m", "c", 0.0)
    assert weights(fleet, 0.0) is None
    member = fleet.get("a")
    assert member is not None
    assert member.health.state(1.0) is State.HEALTHY
    assert not member.health.trial_due(1.0)


def test_one_that_counts_is_priced_and_makes_a_trial_due() -> None:
    fleet, events = fleet_of("a", "b")
    events.hollowed("a", None, ABORT, 1.0)
    member = fleet.get("a")
    assert member is not None
    assert member.health.state(1.0) is State.SUSPECT
    assert not member.health.trial_due(1.0)
    assert member.health.trial_due(1.0 + ALONE_S), "priced, it may get no second request"
    assert member.health.last_error == ABORT
    assert fleet.doubted() == fleet.recently_failed() == {"a"}
    assert weights(fleet, 1.0) == [0.5, 0.0]


def test_two_in_a_row_make_a_trial_due_at_once() -> None:
    fleet, events = fleet_of("a", "b")
    member = fleet.get("a")
    assert member is not None
    events.hollowed("a", None, ABORT, 1.0)
    events.served("a", 1.2)
    events.hollowed("a", None, ABORT, 1.5)
    assert not member.health.trial_due(1.5)
    events.hollowed("a", None, ABORT, 1.6)
    assert member.health.trial_due(1.6)


def test_what_began_before_the_trouble_clears_nobody() -> None:
    fleet, events = fleet_of("a", "b")
    events.hollowed("a", None, ABORT, 1.0)
    events.served("a", 0.5)
    assert fleet.doubted() == {"a"}
    events.served("a", 1.5)
    assert fleet.doubted() == set()


def test_the_price_grows_with_each_and_fades() -> None:
    fleet, events = fleet_of("a", "b")
    seen = []
    for _ in range(5):
        events.hollowed("a", None, ABORT, 1.0)
        seen.append((weights(fleet, 1.0) or [0.0])[0])
    assert seen == sorted(seen)
    assert seen[-1] > 0.9
    assert (weights(fleet, 1.0 + FADE_S / 2) or [0.0])[0] == seen[-1] / 2
    assert weights(fleet, 1.0 + FADE_S) is None
    events.served("a", 1.0)
    assert (weights(fleet, 1.0) or [0.0])[0] == seen[-1] / 2, "half of its answers are good"


def test_a_trial_that_fails_ejects_it_and_one_that_passes_clears_it() -> None:
    fleet, events = fleet_of("a", "b")
    events.hollowed("a", None, ABORT, 1.0)
    assert events.trial_ended("a", "late", 1.0, FailureKind.TIMEOUT) is None
    assert events.trial_ended("a", ABORT, 1.0, FailureKind.HOLLOW) is Change.OPENED
    member = fleet.get("a")
    assert member is not None
    assert member.health.hollow.doubts, "an operator sees why it is out"
    assert events.trial_ended("a", ABORT, 11.0, FailureKind.HOLLOW) is None
    assert weights(fleet, 20.0) == [1.0, 0.0], "in a panic it is the last to be used"
    assert events.trial_ended("a", None, 21.0) is Change.BACK
    assert weights(fleet, 20.0) == [0.0, 0.0]
    events.hollowed("a", None, ABORT, 20.0)
    events.trial_ended("a", None, 20.0)
    assert fleet.doubted() == set()
    assert weights(fleet, 20.0) == [0.0, 0.0]


def test_one_that_has_passed_may_refuse_what_newer_ones_serve() -> None:
    """A client's request that only some engines understand makes none look bad."""
    fleet, events = fleet_of("old", "new")
    events.hollowed("old", None, REFUSED, 1.0, is_refusal=True, server="new")
    events.trial_ended("old", None, 1.0)
    for _ in range(20 * SPARED):
        events.hollowed("old", None, REFUSED, 2.0, is_refusal=True, server="new")
        events.trial_ended("old", None, 2.0 + DOUBT_TRIAL_S)
        events.served("old", 2.5)
    assert weights(fleet, 2.0) == [0.0, 0.0]
    assert fleet.is_up("old")
    for _ in range(SPARED + 1):
        events.hollowed("old", None, REFUSED, 3.0, is_refusal=True, server="new")
    assert (weights(fleet, 3.0) or [0.0])[0] > 0, "it serves nothing at all"


def test_one_clients_are_priced_for_it_alone_and_for_all_from_two() -> None:
    fleet, events = fleet_of("i", "j")
    member = fleet.get("i")
    assert member is not None

    def priced(client: str) -> tuple[list[float] | None, set[str]]:
        return fleet.doubts(fleet.members(), client, 1.5), fleet.recently_failed(client)

    for _ in range(3):
        for _ in range(2 * FAULTS):
            assert events.hollowed("i", "mallory", ABORT, 1.0) is None
        assert priced("alice") == ([0.0, 0.0], set()), "before and after a passed trial"
        assert fleet.doubted() == fleet.failing("mallory") == {"i"}
        assert not fleet.failing("alice")
        assert (priced("mallory")[0] or [0.0])[0] > 0.9
        assert member.health.trial_due(1.5)
        events.trial_ended("i", None, 1.5)
    events.hollowed("i", "mallory", ABORT, 1.5)
    events.served("i", 1.2, "carol")
    events.hollowed("i", "bob", ABORT, 1.5)
    weights, failed = priced("alice")
    assert weights == [0.0, 0.0], "it has served another one since mallory's first"
    assert not failed
    events.hollowed("i", "dan", ABORT, 1.5)
    weights, failed = priced("alice")
    assert weights is not None
    assert weights[0] >= 0.45, "two have had one, with nothing served in between"
    assert failed == fleet.failing("alice") == {"i"}


@pytest.mark.parametrize("clients", [1, 2, 8])
@pytest.mark.parametrize("is_refusal", [False, True])
def test_one_that_is_hollow_to_everybody_is_avoided_at_once(
    clients: int, *, is_refusal: bool
) -> None:
    """Clients that all count as one, too."""
    fleet, events = fleet_of("i", "j")
    hollow = 0
    for at in range(400):
        client, now_s = (f"c{at % clients}" if clients > 1 else ""), 1.0 + 0.02 * at
        sick, well = fleet.doubts(fleet.members(), client, now_s) or [0.0, 0.0]
        if sick <= well:
            hollow += 1
            events.hollowed("i", client, ABORT, now_s, is_refusal=is_refusal, server="j")
        else:
            events.served("j", now_s, client)
    assert hollow <= 2


def test_one_clients_hollow_answers_open_no_breaker_where_trials_tell_nothing() -> None:
    fleet, events = fleet_of("i", "j")
    for at in range(4 * FAULTS):
        events.hollowed("i", "mallory", REFUSED, 1.0, is_refusal=True, server="j")
        events.trial_ended("i", None, 1.0, is_blind=True)
        assert fleet.is_up("i"), at
    changes = [
        events.hollowed("i", f"c{at}", REFUSED, 2.0, is_refusal=True, server="j")
        for at in range(FAULTS)
    ]
    assert changes[-1] is Change.OPENED


@pytest.mark.parametrize("client", [None, ""])
def test_where_trials_tell_nothing_requests_decide(client: str | None) -> None:
    _, events = fleet_of("a", "b")
    events.hollowed("a", client, REFUSED, 1.0, is_refusal=True, server="b")
    assert events.trial_ended("a", None, 1.0, is_blind=True) is None
    hollowed = [
        events.hollowed("a", client, REFUSED, 2.0, is_refusal=True, server="b")
        for _ in range(FAULTS)
    ]
    assert hollowed == [None] * (FAULTS - 1) + [Change.OPENED]


def test_a_refused_key_makes_a_trial_due_and_prices_nobody() -> None:
    fleet, events = fleet_of("a", "b")
    events.key_refused("a", "status 401 to the proxy's own key", 0.5)
    member = fleet.get("a")
    assert member is not None
    assert member.health.trial_due(1.0)
    assert member.health.state(1.0) is State.SUSPECT
    assert weights(fleet, 1.0) is None


def test_another_process_is_not_doubted() -> None:
    fleet, events = fleet_of("a", "b")
    events.hollowed("a", None, ABORT, 1.0)
    events.restarted("a", 1.5)
    assert fleet.doubted() == set()
    assert weights(fleet, 1.5) == [0.0, 0.0]


def test_one_that_is_not_there_is_no_matter() -> None:
    fleet, events = fleet_of("a")
    assert events.hollowed("x", None, ABORT, 1.0) is None
    assert not events.refused("x", "m", "c", 0.0)
    events.key_refused("x", "", 0.5)
    events.acquitted("x")
    events.served("x", 1.0)
    assert weights(fleet, 1.0) is None
