"""What an event of an instance changes: who is told, and what is forgotten with it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from proxy.core.accounts.ledger import Ledger
from proxy.core.fleet.askers import DOUBTS
from proxy.core.fleet.events import InstanceEvents
from proxy.core.fleet.health import (
    CONNECTS,
    DOUBT_TRIAL_S,
    FAULTS,
    RISE,
    Change,
    State,
)
from proxy.core.fleet.members import SAME_START_S, Fleet, Member
from proxy.core.types import FailureKind, Instance

NO_FAULTS = {
    FailureKind.BUSY,
    FailureKind.PEER_GONE,
    FailureKind.WENT_DOWN,
    FailureKind.NO_MODEL,
    FailureKind.TOO_LONG,
    FailureKind.NO_ROOM,
    FailureKind.REDIRECT,
    FailureKind.HOLLOW,
    FailureKind.KEY_REFUSED,
}
"""Not the instance's own, or no failure at all."""


class Seen:
    """Events over a fleet of two, one of which has been seen; what they told and forgot."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.ledger = Ledger(self.fleet.states)
        self.forgotten: list[str] = []
        self.told = 0
        for name in ("a", "b"):
            self.fleet.add(Instance(name, f"http://{name}"))
        self.events = InstanceEvents(self.fleet, self._tell)
        self.fleet.states.on_dropped = lambda state: self.forgotten.append(state.name)
        for _ in range(RISE):
            self.events.probe_answered("a", 0.0)
        self.told = 0

    def _tell(self) -> None:
        self.told += 1

    def member(self, name: str = "a") -> Member:
        found = self.fleet.get(name)
        assert found is not None
        return found

    def goes(self) -> None:
        """Nobody listens there any more."""
        changes = [
            self.events.probe_failed("a", "refused", float(i), is_refused=True)
            for i in range(CONNECTS)
        ]
        assert Change.GONE in changes


@pytest.fixture
def seen() -> Seen:
    return Seen()


def test_one_that_is_gone_is_forgotten_and_returns_as_another(seen: Seen) -> None:
    before = seen.member().incarnation
    seen.goes()
    assert seen.forgotten == ["a"]
    assert not seen.fleet.is_up("a")
    told = seen.told
    changes = [seen.events.probe_answered("a", 100.0 + i) for i in range(RISE)]
    assert changes[-1] is Change.BACK
    assert seen.fleet.is_up("a")
    assert seen.told > told
    assert seen.member().incarnation == before + 1


def test_one_whose_first_probe_was_slow_is_still_the_first(seen: Seen) -> None:
    """Nothing says that there was another process, so what a predecessor told of it holds."""
    state = seen.member("b").state
    state.start_s = 1000.0
    assert seen.events.probe_failed("b", "timeout", 0.0) is Change.SILENT
    assert seen.member("b").health.is_gone, "to be used by nobody"
    assert seen.events.probe_answered("b", 1.0) is Change.BACK
    assert seen.member("b").state is state
    assert (seen.member("b").incarnation, seen.forgotten) == (0, [])
    assert seen.events.observe_start("b", 2000.0, 2.0), "this is another one"
    assert (seen.member("b").incarnation, seen.forgotten) == (1, ["b"])


def test_one_that_is_slow_keeps_what_it_holds(seen: Seen) -> None:
    changes = [seen.events.probe_failed("a", "timeout", float(i)) for i in range(CONNECTS)]
    assert Change.GONE not in changes
    assert not seen.fleet.is_up("a")
    assert not seen.forgotten
    assert seen.member().incarnation == 0


def test_one_to_which_no_connection_is_made_keeps_what_it_holds(seen: Seen) -> None:
    """Only a refused connection says that nobody listens."""
    for i in range(2 * CONNECTS):
        seen.events.failed("a", FailureKind.UNREACHABLE, "not in time", i * 0.1)
    assert not seen.fleet.is_up("a")
    assert not seen.member().health.is_gone
    assert not seen.forgotten


def test_server_errors_that_nobody_judges_eject_nobody_but_want_a_trial(seen: Seen) -> None:
    health = seen.member().health
    for _ in range(DOUBTS):
        assert not health.trial_due(100.0)
        seen.events.doubted("a", "s", FailureKind.SERVER_ERROR, "status 500", 0.0)
    assert seen.fleet.doubted() == {"a"}
    assert seen.fleet.is_up("a")
    assert health.state(100.0) is State.SUSPECT
    assert health.trial_due(100.0)
    health.trial_begins(100.0)
    assert not health.trial_due(100.0 + DOUBT_TRIAL_S / 2), "one at a time"
    assert seen.events.trial_ended("a", "late", 101.0, FailureKind.TIMEOUT) is None, "a queue"
    assert seen.events.trial_ended("a", None, 101.0) is None
    assert not seen.fleet.doubted()
    assert seen.events.trial_ended("a", "status 500", 101.0) is None, "nobody doubts it any more"
    assert seen.fleet.is_up("a")


def test_trials_that_decide_nothing_come_ever_later(seen: Seen) -> None:
    health, now_s, begun = seen.member().health, 100.0, []
    for _ in range(DOUBTS):
        seen.events.doubted("a", "s", FailureKind.SERVER_ERROR, "status 500", 0.0)
    for _ in range(6):
        while not health.trial_due(now_s):
            now_s += 0.125
        begun.append(now_s)
        health.trial_begins(now_s)
        now_s += 5.0
        assert seen.events.trial_ended("a", "late", now_s, FailureKind.TIMEOUT) is None
    pauses = [later - at - 5.0 for at, later in pairwise(begun)]
    assert pauses == [2 * DOUBT_TRIAL_S, 4 * DOUBT_TRIAL_S, *[8 * DOUBT_TRIAL_S] * 3]


def test_a_trial_that_fails_ejects_one_in_doubt(seen: Seen) -> None:
    for _ in range(DOUBTS):
        seen.events.doubted("a", "s", FailureKind.SERVER_ERROR, "status 500", 0.0)
    assert seen.events.trial_ended("a", "status 500", 1.0) is Change.OPENED
    assert seen.fleet.open() == {"a"}
    assert seen.events.trial_ended("a", None, 100.0) is Change.BACK


@pytest.mark.parametrize("kind", FailureKind)
def test_only_faults_open_a_breaker(seen: Seen, kind: FailureKind) -> None:
    for i in range(FAULTS):
        seen.events.failed("a", kind, "x", i * 0.1)
    assert seen.fleet.is_up("a") is (kind in NO_FAULTS)


def test_a_trial_that_is_answered_brings_it_back(seen: Seen) -> None:
    for i in range(FAULTS):
        seen.events.failed("a", FailureKind.TIMEOUT, "x", i * 0.1)
    assert seen.events.trial_ended("a", "still nothing", 50.0) is None
    assert not seen.fleet.is_up("a")
    assert seen.events.trial_ended("a", None, 100.0) is Change.BACK
    assert seen.fleet.is_up("a")


def test_a_later_start_is_another_process(seen: Seen) -> None:
    observe = seen.events.observe_start
    assert not observe("a", None, 0.0)
    assert not observe("a", 1000.0, 0.0), "the first that is known"
    assert not observe("a", 1000.0 + SAME_START_S, 1.0), "within what one process says"
    assert not observe("a", 900.0, 2.0), "a clock that went back is no restart"
    assert not seen.forgotten
    assert observe("a", 2000.0, 3.0)
    assert seen.forgotten == ["a"]
    assert seen.member().incarnation == 1
    assert not observe("a", 2000.0, 4.0)


def test_a_model_that_is_denied_may_be_anothers(seen: Seen) -> None:
    seen.fleet.observe_models("a", {"m", "n"})
    seen.fleet.observe_models("b", {"n"})
    assert not seen.events.lacks_model("a", "m")
    assert seen.events.lacks_model("a", "n")


def test_a_model_that_is_denied_is_kept_until_the_list_says_otherwise(seen: Seen) -> None:
    seen.fleet.observe_models("a", {"m"})
    seen.events.lacks_model("a", "unknown")
    assert not seen.member().rereads_models, "its list says so already"
    seen.events.lacks_model("a", "m")
    assert (seen.member().models, seen.member().rereads_models) == (frozenset({"m"}), True)
    seen.fleet.observe_models("a", {"n"})
    assert (seen.member().models, seen.member().rereads_models) == (frozenset({"n"}), False)


def test_who_is_not_there_changes_nothing(seen: Seen) -> None:
    events = seen.events
    assert events.probe_failed("x", "e", 0.0) is None
    assert events.probe_answered("x", 0.0) is None
    assert events.failed("x", FailureKind.RESET, "e", 0.0) is None
    assert events.trial_ended("x", None, 0.0) is None
    events.answered("x")
    events.restarted("x", 0.0)
    assert not events.observe_start("x", 1.0, 0.0)
    assert (seen.told, seen.forgotten) == (0, [])


def test_a_rest_is_told_once_and_so_is_its_end(seen: Seen) -> None:
    rests = seen.events.rests
    told = seen.told
    assert [rests("a", State.ASLEEP, at) for at in (5.0, 6.0)] == [True, False]
    assert (seen.member().health.rest_s, seen.fleet.is_up("a"), seen.told) == (5.0, False, told + 1)
    assert rests("a", State.PAUSED, 7.0)
    assert seen.member().health.rest_s == 5.0, "it has not served in between"
    assert rests("a", None, 8.0)
    assert (seen.member().health.state(8.0), seen.told) == (State.HEALTHY, told + 3)
    assert not rests("x", State.ASLEEP, 9.0)
    assert seen.forgotten == [], "it is the same process"


def test_one_that_rests_gets_no_trial(seen: Seen) -> None:
    for i in range(FAULTS):
        seen.events.failed("a", FailureKind.SERVER_ERROR, "x", i * 0.1)
    assert seen.member().health.trial_due(100.0)
    seen.events.rests("a", State.ASLEEP, 100.0)
    assert not seen.member().health.trial_due(100.0)


def test_since_when_it_is_in_its_state(seen: Seen) -> None:
    health = seen.member().health
    assert health.since_s(1.0) == 0.0, "healthy since its first answer"
    seen.events.failed("a", FailureKind.RESET, "reset", 2.0)
    assert (health.state(3.0), health.since_s(3.0)) == (State.SUSPECT, 2.0)
    seen.events.failed("a", FailureKind.RESET, "reset", 4.0)
    assert health.since_s(5.0) == 2.0, "the same state all the time"
    seen.events.answered("a")
    assert health.since_s(6.0) == 6.0, "noticed when somebody looks"
    seen.goes()
    assert health.state(7.0) is State.EJECTED
    assert health.since_s(7.0) == CONNECTS - 2, "the second refused probe"
    seen.events.rests("b", State.ASLEEP, 8.0)
    assert seen.member("b").health.since_s(9.0) == 8.0


def test_a_trial_that_hangs_as_clients_requests_did_decides(seen: Seen) -> None:
    for i in range(2):
        for _ in range(DOUBTS):
            kind = FailureKind.TIMEOUT if i else FailureKind.RESET
            seen.events.doubted("a", "s", kind, "late", 0.0)
        ended = seen.events.trial_ended("a", "late", 1.0 + i, FailureKind.TIMEOUT)
        assert ended is (Change.OPENED if i else None)
