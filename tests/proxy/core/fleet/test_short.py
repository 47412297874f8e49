"""Answers with next to nothing in them: they speak against one instance, beside its peers, only."""

from __future__ import annotations

from proxy.core.fleet.events import InstanceEvents
from proxy.core.fleet.health import Change, State
from proxy.core.fleet.members import Fleet, Member
from proxy.core.fleet.short import FADE_S, MOST_RECENT, RECENT, REST_S, WHY
from proxy.core.types import FailureKind, Instance, RequestFacts

PATH = "/v1/chat/completions"


class Scene:
    """Engines and how long their answers are, second by second."""

    def __init__(self, *names: str) -> None:
        self.fleet = Fleet()
        self.events = InstanceEvents(self.fleet, lambda: None)
        self._turn = False
        for name in names:
            self.fleet.add(Instance(name, f"http://{name}"))
            self.events.probe_answered(name, 0.0)

    def ends(self, name: str, now_s: float, client: str = "", *, is_short: bool) -> str:
        """Of the client, or of two in turn."""
        self._turn = not self._turn
        who = client or ("alice" if self._turn else "bob")
        facts = RequestFacts("m", who, 1, [], 64.0)
        return self.events.ended(name, facts, PATH, now_s, is_short=is_short, streams=True)

    def member(self, name: str) -> Member:
        member = self.fleet.get(name)
        assert member is not None
        return member

    def doubted(self) -> set[str]:
        return self.fleet.doubted()


def test_one_that_gives_only_short_answers_is_in_doubt() -> None:
    it = Scene("a", "b", "c")
    for name in ("a", "b", "c"):
        for _ in range(RECENT):
            assert not it.ends(name, 1.0, is_short=False)
    told = [it.ends("a", 2.0, is_short=True) for _ in range(RECENT)]
    assert told == [""] * (MOST_RECENT - 1) + [WHY] * (RECENT - MOST_RECENT + 1)
    health = it.member("a").health
    assert health.state(2.0) is State.SUSPECT
    assert health.last_error == WHY
    assert health.trial_due(2.0)
    assert it.fleet.has_failed_lately("a", "any client"), "no session stays there"
    doubts = it.fleet.doubts
    assert doubts(it.fleet.members(), "any client", 2.0) == [1.0, 0.0, 0.0]
    assert doubts(it.fleet.members(), "any client", 2.0 + FADE_S) is None


def test_one_clients_short_answers_are_priced_for_that_client_alone() -> None:
    it = Scene("a", "b")
    for _ in range(RECENT):
        it.ends("b", 1.0, is_short=False)
        it.ends("a", 2.0, "mallory", is_short=True)
    assert it.member("a").health.trial_due(2.0), "which decides for all"
    doubts, members = it.fleet.doubts, it.fleet.members()
    assert doubts(members, "mallory", 2.0) == [1.0, 0.0]
    assert doubts(members, "alice", 2.0) == [0.0, 0.0]
    assert it.fleet.has_failed_lately("a", "mallory")
    assert not it.fleet.has_failed_lately("a", "alice")
    it.ends("a", 3.0, "alice", is_short=True)
    assert doubts(members, "bob", 3.0) == [1.0, 0.0]
    assert it.fleet.has_failed_lately("a", "bob")


def test_at_the_start_one_is_in_doubt_before_its_peers_have_answered() -> None:
    it = Scene("a", "b")
    for _ in range(MOST_RECENT):
        it.ends("a", 1.0, is_short=True)
    assert it.doubted() == {"a"}


def test_one_that_now_and_then_gives_an_answer_is_found_as_well() -> None:
    it = Scene("a", "b")
    for i in range(20):
        it.ends("b", 1.0, is_short=False)
        it.ends("a", 1.0, is_short=i % 5 != 4)
    assert it.doubted() == {"a"}


def test_clients_of_one_word_answers_everywhere_cost_no_instance_anything() -> None:
    it = Scene("a", "b", "c", "d")
    for _ in range(100):
        for name in ("a", "b", "c", "d"):
            assert name == "a" or not it.ends(name, 1.0, is_short=True)
        for name in ("b", "c", "d"):
            it.ends(name, 1.0, is_short=False)
        assert not it.ends("a", 1.0, is_short=True)
    assert it.doubted() == set()


def test_some_short_answers_among_others_speak_against_nobody() -> None:
    it = Scene("a", "b")
    for i in range(100):
        it.ends("b", 1.0, is_short=False)
        assert not it.ends("a", 1.0, is_short=i % 2 == 0)
    assert it.doubted() == set()


def test_where_nobody_else_serves_nobody_is_in_doubt() -> None:
    it = Scene("a")
    assert not any(it.ends("a", 1.0, is_short=True) for _ in range(100))


def test_a_passed_trial_lets_short_answers_rest_ever_longer() -> None:
    """As where all classification goes to the instance that has its prompt."""
    it, trials, now_s = Scene("a", "b"), 0, 0.0
    while now_s < 300.0:
        now_s += 0.1
        it.ends("b", now_s, is_short=False)
        it.ends("a", now_s, is_short=True)
        if it.member("a").health.trial_due(now_s):
            trials += 1
            it.events.trial_ended("a", None, now_s)
            assert it.doubted() == set()
            assert it.member("a").health.state(now_s) is State.HEALTHY
    assert 3 <= trials <= 300.0 / REST_S / 3


def test_a_failed_trial_ejects_it_and_a_passed_one_brings_it_back() -> None:
    it = Scene("a", "b")
    for _ in range(MOST_RECENT):
        it.ends("a", 1.0, is_short=True)
    assert it.events.trial_ended("a", WHY, 1.1, FailureKind.HOLLOW) is Change.OPENED
    assert not it.member("a").health.is_up
    assert it.events.trial_ended("a", WHY, 11.1, FailureKind.HOLLOW) is None
    assert it.events.trial_ended("a", None, 21.1) is Change.BACK
    assert it.doubted() == set()
    for _ in range(MOST_RECENT):
        it.ends("a", 22.0, is_short=True)
    assert it.doubted() == {"a"}, "it fails again at once"


def test_another_process_starts_anew() -> None:
    it = Scene("a", "b")
    for _ in range(MOST_RECENT):
        it.ends("a", 1.0, is_short=True)
    it.events.restarted("a", 2.0)
    assert it.doubted() == set()
    assert not it.ends("a", 2.0, is_short=True)
