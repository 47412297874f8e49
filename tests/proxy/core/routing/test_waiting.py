"""Requests that wait alone, as engines have refused them as busy while others may be served."""

from __future__ import annotations

import pytest

from proxy.core.admission.queue import Priority, QueueLimits
from proxy.core.fleet.named_models import MOST, OTHERS
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.routing.waiting import QueuedRequest, Waiting
from proxy.core.types import (
    Instance,
    Reject,
    RejectReason,
    RequestFacts,
    RouterConfig,
    Thresholds,
)


class Room:
    """A wait queue before two instances, of which both have refused one request until 5 and 7 s."""

    def __init__(self) -> None:
        self.router = Router(FleetState(RouterConfig(prefill_throughput=20_000.0)))
        for name in ("a", "b"):
            self.router.known.add(Instance(name, f"http://{name}"))
            self.router.known.events.probe_answered(name, 0.0)
        self.waiting = Waiting(self.router, QueueLimits(10, 1 << 20, 30.0))
        self.facts = facts("alone")
        self.facts.refuse("a", 5.0)
        self.facts.refuse("b", 7.0)

    def queued(self) -> QueuedRequest:
        reject = self.waiting.admit(self.facts, 1.0)
        assert isinstance(reject, Reject)
        assert (reject.reason, reject.wait_s) == (RejectReason.UPSTREAM_BUSY, 4.0)
        queued = self.waiting.enter(self.facts, reject, 1.0, lambda: None)
        assert isinstance(queued, QueuedRequest)
        return queued


def is_settled(queued: QueuedRequest) -> bool:
    return queued.result is not None


def facts(session: str) -> RequestFacts:
    return RequestFacts("m", session, 100, [], 64.0)


@pytest.fixture
def room() -> Room:
    return Room()


def test_it_waits_for_as_long_as_the_first_engine_said(room: Room) -> None:
    queued = room.queued()
    assert room.waiting.next_look_s(1.0) == 5.0
    room.waiting.look(4.9)
    assert not is_settled(queued)
    room.waiting.look(5.0)
    assert isinstance(queued.result, Route)
    assert queued.result.decode.name == "a", "b has said longer"
    assert not len(room.waiting.queue)


def test_it_delays_nobody(room: Room) -> None:
    queued = room.queued()
    other = facts("other")
    assert not room.waiting.is_behind(other)
    assert isinstance(room.waiting.admit(other, 1.0), Route)
    assert room.waiting.longest(9.0) is None, "it says nothing of the instances"
    room.waiting.leave(queued)
    assert room.waiting.next_look_s(1.0) is None


def test_it_waits_among_the_others_where_all_are_busy_by_then(room: Room) -> None:
    queued = room.queued()
    for name in ("a", "b"):
        room.router.known.gate.mark_busy(name, 8.0)
    room.waiting.look(7.0)
    assert not is_settled(queued)
    assert room.waiting.is_behind(facts("other"))
    assert room.waiting.longest(9.0) is not None
    room.waiting.look(8.0)
    assert isinstance(queued.result, Route)


def test_it_holds_up_nobody_behind_it(room: Room) -> None:
    """One instance has refused it for long, the other one is past a threshold."""
    room.facts.refuse("a", 100.0)
    room.facts.refuse("b", 0.0)
    room.router.known.gate.mark_busy("b", 3.0)
    reject = room.waiting.admit(room.facts, 1.0)
    assert isinstance(reject, Reject)
    first = room.waiting.enter(room.facts, reject, 1.0, lambda: None)
    assert isinstance(first, QueuedRequest)
    assert room.waiting.next_look_s(1.0) == 3.0, "the other one's time counts too"
    for name in ("a", "b"):
        room.router.known.gate.mark_busy(name, 4.0)
    room.waiting.look(3.0)
    second_facts = facts("other")
    behind = room.waiting.admit(second_facts, 3.0)
    assert isinstance(behind, Reject)
    second = room.waiting.enter(second_facts, behind, 3.0, lambda: None)
    assert isinstance(second, QueuedRequest)
    room.router.known.gate.mark_busy("b", 50.0)
    room.waiting.look(4.0)
    for queued in (first, second):
        assert isinstance(queued.result, Route)
        assert queued.result.decode.name == "a"


def test_its_time_may_be_over_before(room: Room) -> None:
    queued = room.queued()
    room.waiting.expire(queued, 4.0)
    assert isinstance(queued.result, Reject)
    assert queued.result.reason is RejectReason.QUEUE_TIMEOUT
    room.waiting.look(6.0)
    room.waiting.leave(queued)


def test_a_change_of_models_leaves_it_alone(room: Room) -> None:
    queued = room.queued()
    room.router.known.observe_models("a", ["m"], {})
    room.waiting.look(2.0)
    assert not is_settled(queued)
    assert not room.waiting.is_behind(facts("other"))
    room.waiting.close(3)
    assert isinstance(queued.result, Reject)


def test_a_client_that_is_refused_alone_delays_nobody(room: Room) -> None:
    """Both instances are closed to one client; then one of them to all."""
    gate, queued = room.router.known.gate, list[QueuedRequest]()
    for name in ("a", "b"):
        gate.refused(name, "wide", 30.0, 1.0)
        gate.judged(name, "wide", 31.0, 1.0)
    for _ in range(2):
        wide = facts("wide")
        reject = room.waiting.admit(wide, 1.5)
        assert isinstance(reject, Reject)
        entered = room.waiting.enter(wide, reject, 1.5, lambda: None)
        assert isinstance(entered, QueuedRequest)
        queued.append(entered)
        assert room.waiting.longest(1.5) is not None
    assert room.waiting.is_behind(facts("wide")), "a client's requests wait for each other"
    assert not room.waiting.is_behind(facts("narrow"))
    assert isinstance(room.waiting.admit(facts("narrow"), 1.6), Route)
    room.waiting.look(1.6)
    assert not any(map(is_settled, queued))
    gate.served("a", "narrow", 1.6)
    room.waiting.look(1.7)
    assert all(isinstance(one.result, Route) for one in queued)


def test_one_that_is_refused_alone_by_then_leaves_the_others(room: Room) -> None:
    gate, queued = room.router.known.gate, list[QueuedRequest]()
    for name in ("a", "b"):
        gate.mark_busy(name, 5.0)
    for session in ("wide", "narrow"):
        one = facts(session)
        reject = room.waiting.admit(one, 1.0)
        assert isinstance(reject, Reject)
        entered = room.waiting.enter(one, reject, 1.0, lambda: None)
        assert isinstance(entered, QueuedRequest)
        queued.append(entered)
    for name in ("a", "b"):
        gate.refused(name, "wide", 30.0, 4.5)
        gate.judged(name, "wide", 34.5, 4.5)
    room.waiting.look(5.0)
    assert not is_settled(queued[0])
    assert isinstance(queued[1].result, Route)
    assert room.waiting.next_look_s(5.0) == 5.5, "it may try"
    room.waiting.look(5.5)
    assert isinstance(queued[0].result, Route)


@pytest.mark.parametrize(
    ("tokens", "counted"), [(100, 100), (1200, 1000), (5000, 0), (27_000_000, 0)]
)
def test_others_wait_for_no_more_than_an_engine_computes(
    room: Room, tokens: int, counted: int
) -> None:
    for name in ("a", "b"):
        room.router.known.observe_models(name, ["m"], {}, {"m": 1000})
        room.router.known.gate.mark_busy(name, 8.0)
    long = RequestFacts("m", "long", tokens, [], 64.0)
    reject = room.waiting.admit(long, 1.0)
    assert isinstance(reject, Reject)
    queued = room.waiting.enter(long, reject, 1.0, lambda: None, Priority.HIGH)
    assert isinstance(queued, QueuedRequest)
    assert room.waiting.queue.tokens == counted


class Lanes:
    """An instance with many models and one request at a time; each model's next request waits."""

    def __init__(self, models: int) -> None:
        names = [f"m{n}" for n in range(models)]
        config = RouterConfig(prefill_throughput=20_000.0, thresholds=Thresholds(None, 0, None))
        self.router = Router(FleetState(config))
        self.router.known.add(Instance("a", "http://a"))
        self.router.known.events.probe_answered("a", 0.0)
        self.router.known.observe_models("a", names, {}, {})
        first = self.router.admit(RequestFacts("m0", "first", 100, [], 64.0), 0.0)
        assert isinstance(first, Route)
        self.holds = first
        self.waiting = Waiting(self.router, QueueLimits(models, 1 << 20, 30.0))
        self.queued = [self._wait(name) for name in names]

    def _wait(self, model: str) -> QueuedRequest:
        of_model = RequestFacts(model, f"session of {model}", 100, [], 64.0)
        reject = self.waiting.admit(of_model, 1.0)
        assert isinstance(reject, Reject)
        queued = self.waiting.enter(of_model, reject, 1.0, lambda: None)
        assert isinstance(queued, QueuedRequest)
        return queued


def test_a_pass_over_many_lanes_takes_turns_and_passes_over_none() -> None:
    lanes = Lanes(models=100)
    turns = []
    for _ in range(4):
        lanes.waiting.look(2.0, 32)
        turns.append(lanes.waiting.is_in_pass)
    assert turns == [True, True, True, False]
    assert not any(map(is_settled, lanes.queued))
    lanes.waiting.look(3.0, 32)
    lanes.router.finish(lanes.holds, 3.0)
    lanes.waiting.look(3.0, 32)
    admitted = [n for n, queued in enumerate(lanes.queued) if is_settled(queued)]
    assert admitted == [32], "the pass went on behind those that it had tried"


def test_the_backlog_is_what_is_under_way_and_what_waits(room: Room) -> None:
    """Two instances of 20,000 tokens/s: the rate of one counts, as the seconds are of one."""
    assert room.waiting.backlog_s(0.0) == {}, "no model is known to be served"
    for name in ("a", "b"):
        room.router.known.observe_models(name, ["m", "other"], {})
    assert room.waiting.backlog_s(0.0) == {"m": 0.0, "other": 0.0}
    tps = room.router.known.latency.prefill_tps("a")
    route = room.waiting.admit(RequestFacts("m", "long", 20_000, [], 64.0), 0.0)
    assert isinstance(route, Route)
    ((_, under_way_s, *_),) = room.router.known.latency.of(route.decode.name).own_pending()
    assert 1.0 < under_way_s <= route.predicted_prefill_s
    assert room.waiting.backlog_s(0.0) == pytest.approx({"m": under_way_s, "other": under_way_s})
    room.router.finish(route, 0.0)
    room.queued()
    assert room.waiting.backlog_s(0.0) == pytest.approx({"m": 100 / tps, "other": 0.0})
    room.router.known.observe_models("b", ["else"], {})
    assert set(room.waiting.backlog_s(0.0)) == {"m", "other", "else"}


def test_of_the_models_that_one_instance_lists_few_have_a_backlog_of_their_own(room: Room) -> None:
    room.router.known.observe_models("a", ["m"], {})
    room.router.known.observe_models("b", [f"n{n:04}" for n in range(1000)], {})
    told = room.waiting.backlog_s(0.0)
    assert set(told) == {"m", OTHERS, *[f"n{n:04}" for n in range(MOST)]}
    assert set(told.values()) == {0.0}
    waits = RequestFacts("n0999", "s", 100, [], 64.0)
    for name in ("a", "b"):
        room.router.known.gate.mark_busy(name, 8.0)
    reject = room.waiting.admit(waits, 1.0)
    assert isinstance(reject, Reject)
    assert isinstance(room.waiting.enter(waits, reject, 1.0, lambda: None), QueuedRequest)
    tps = room.router.known.latency.prefill_tps("b")
    assert room.waiting.backlog_s(1.0)[OTHERS] == pytest.approx(100 / tps)


def test_models_that_clients_invent_have_no_backlog(room: Room) -> None:
    room.router.known.observe_models("a", ["m"], {})
    invented = RequestFacts("invented", "s", 100, [], 64.0)
    for name in ("a", "b"):
        room.router.known.gate.mark_busy(name, 8.0)
    reject = room.waiting.admit(invented, 1.0)
    assert isinstance(reject, Reject)
    assert isinstance(room.waiting.enter(invented, reject, 1.0, lambda: None), QueuedRequest)
    assert room.waiting.backlog_s(0.0) == {"m": 0.0}
