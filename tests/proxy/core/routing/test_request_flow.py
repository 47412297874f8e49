"""Each path of a request's life as a transcript: what the driver reports, what it is told to do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.fleet.health import DOUBT_KINDS, FAULTS
from proxy.core.fleet.hollow import REFUSALS
from proxy.core.fleet.retries import Budget
from proxy.core.known.fleet_state import FleetState
from proxy.core.placement.decision import Choice, PlacementView, chosen
from proxy.core.routing.actions import (
    AwaitHedge,
    CancelDecode,
    CancelHedge,
    CancelPrefill,
    FellBack,
    GiveUp,
    HangUpPrefill,
    HedgeEnded,
    IllegalStepError,
    InstanceFailed,
    KeepDecode,
    KvUnreleased,
    LeftKv,
    Leg,
    LegCaps,
    LegFailure,
    NotMoved,
    Pause,
    ReleaseKv,
    ReleaseResult,
    Retried,
    Retry,
    RetryRefused,
    SendDecode,
    SendHedge,
    SendPrefill,
    Step,
)
from proxy.core.routing.request_flow import (
    MAX_WAITS,
    STEPS,
    Event,
    RequestFlow,
    State,
)
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import (
    FailureKind,
    Fallback,
    Instance,
    Reason,
    Reject,
    RejectReason,
    RequestFacts,
    RouterConfig,
    Unmoved,
)

CAPS = LegCaps(ttft_s=120.0, prefill_s=120.0, transfer_s=30.0, idle_s=300.0, answer_s=600.0)
LOST = LegFailure(FailureKind.RESET, "lost")
PROMPT_TOKENS = 30_000


class Driver:
    """A flow with its router; each call returns what it was told to do, in words."""

    def __init__(
        self,
        *names: str,
        prefill: str | None = None,
        streams: bool = True,
        kv_connector: str = "mooncake",
        moves: int = 0,
    ) -> None:
        def choose(view: PlacementView) -> Choice:
            """D is the first instance that is free; P as the test wants it."""
            by_name = {c.instance.name: c for c in view.free}
            d = next(by_name[name] for name in names if name in by_name)
            p = by_name.get(prefill) if prefill else None
            return chosen(view, d, p, Reason.P_IDLE_D_BUSY, placed=True)

        self.router = Router(
            FleetState(RouterConfig(prefill_throughput=20_000.0, kv_connector=kv_connector)), choose
        )
        for name in names:
            self.router.known.add(Instance(name, f"http://{name}", f"http://{name}:8998"))
            self.router.known.events.probe_answered(name, 0.0)
        self.budget = Budget()
        self.facts = RequestFacts("m", "s", PROMPT_TOKENS, [], 64.0)
        route = self.router.admit(self.facts, 0.0)
        assert isinstance(route, Route)
        caps = replace(CAPS, moves=moves)
        self.flow = RequestFlow(
            self.router, self.budget, self.facts, route, caps, 0.0, streams=streams
        )

    def told(self, answer: object) -> list[str]:
        """What an event has returned, in words: effects, what comes next, or both."""
        if isinstance(answer, Step):
            return [*self.told(answer.effects), _words(answer.next)]
        if isinstance(answer, Sequence):
            return [_words(effect) for effect in answer]
        return [] if answer is None else [_words(answer)]

    def unreleased(self, name: str, now_s: float) -> int:
        """Tokens that may still be pinned on an instance."""
        return self.router.known.unreleased_kv.on(name, now_s)[1]

    def has_nothing_left(self) -> bool:
        loads = [
            self.router.known.ledger.load(m.instance.name)
            for m in self.router.known.fleet.members()
        ]
        return self.router.known.ledger.live == 0 and all(load.is_idle for load in loads)


def after(flow: RequestFlow, failure: LegFailure, now_s: float) -> Retry:
    """What comes after a failed decode leg, and after its pause if there is one."""
    then = flow.decode_failed(failure, now_s, 0.5).next
    return flow.pause_over(now_s, 0.5).next if isinstance(then, Pause) else then


def _words(said: object) -> str:
    if isinstance(said, SendDecode):
        repeat = " again" if said.is_repeat else ""
        fetch = f" from {said.fetch_from.name}" if said.fetch_from else ""
        return f"decode on {said.instance.name}{fetch}{repeat}"
    named: list[tuple[type, Callable[[Any], str]]] = [
        (SendPrefill, lambda a: f"prefill on {a.instance.name}"),
        (SendHedge, lambda a: f"hedge on {a.instance.name}"),
        (AwaitHedge, lambda a: "await hedge"),
        (CancelHedge, lambda a: "cancel hedge"),
        (CancelPrefill, lambda a: "cancel prefill"),
        (Pause, lambda a: "pause"),
        (GiveUp, lambda a: "give up"),
        (NotMoved, lambda a: f"not moved: {a.why.value}"),
        (FellBack, lambda a: f"fell back: {a.why.value}"),
        (HedgeEnded, lambda a: f"hedge won by {a.winner}"),
        (Retried, lambda a: f"retried after {a.kind.value}"),
        (RetryRefused, lambda a: "retry refused"),
        (InstanceFailed, lambda a: f"{a.name} failed"),
        (HangUpPrefill, lambda a: "hang up on p"),
        (KeepDecode, lambda a: "keep decode"),
        (CancelDecode, lambda a: "cancel decode"),
        (ReleaseKv, lambda a: f"release on {a.prefill.name} by {', '.join(a.ask)}"),
        (KvUnreleased, lambda a: f"unreleased: {a.result.value}"),
    ]
    return next(words(said) for kind, words in named if isinstance(said, kind))


def test_computed_where_it_decodes() -> None:
    it = Driver("d")
    assert it.told(it.flow.begin(0.0)) == ["decode on d"]
    assert it.told(it.flow.decode_answered(1.0)) == []
    it.flow.first_token(1.0)
    it.flow.completed(None)
    it.flow.end(2.0, 100)
    assert it.has_nothing_left()


def test_a_step_has_what_is_done_now_and_apart_what_comes_next() -> None:
    it = Driver("a")
    it.flow.begin(0.0)
    step = it.flow.decode_failed(LOST, 1.0, 0.5)
    assert it.told(step.effects) == ["a failed"]
    assert isinstance(step.next, Pause)
    step = it.flow.pause_over(1.1, 0.5)
    assert it.told(step.effects) == ["retried after reset"]
    assert isinstance(step.next, SendDecode)


def test_handed_over() -> None:
    it = Driver("d", "p", prefill="p")
    assert it.told(it.flow.begin(0.0)) == ["prefill on p"]
    assert it.told(it.flow.prefill_answered(1.5)) == ["decode on d from p"]
    assert it.told(it.flow.decode_answered(1.0)) == []
    it.flow.first_token(2.0)
    it.flow.end(3.0, 10)
    assert it.has_nothing_left()


def test_p_fails_and_d_computes() -> None:
    it = Driver("d", "p", prefill="p")
    it.flow.begin(0.0)
    told = it.told(it.flow.prefill_failed(Fallback.P_ERROR, 1.0, LOST))
    assert told == ["p failed", "fell back: p_error", "decode on d again"]
    assert it.flow.route.prefill is None


def test_p_is_late_and_answers_first() -> None:
    it = Driver("d", "p", prefill="p")
    it.flow.begin(0.0)
    assert it.told(it.flow.prefill_late(5.0)) == ["hedge on d"]
    told = it.told(it.flow.prefill_answered(5.5))
    assert told == ["hedge won by peer", "cancel hedge", "decode on d from p"]
    it.flow.end(6.0)
    assert it.has_nothing_left()


def test_p_is_late_and_d_answers_first() -> None:
    it = Driver("d", "p", prefill="p")
    it.flow.begin(0.0)
    it.flow.prefill_late(5.0)
    told = it.told(it.flow.hedge_answered(6.0))
    assert told == ["hedge won by local", "fell back: p_late", "cancel prefill"]
    it.flow.first_token(6.0)
    it.flow.end(7.0)
    assert it.has_nothing_left()


def test_p_is_late_and_fails_while_d_computes() -> None:
    it = Driver("d", "p", prefill="p")
    it.flow.begin(0.0)
    it.flow.prefill_late(5.0)
    told = it.told(it.flow.prefill_failed(Fallback.P_GONE, 5.5))
    assert told == ["fell back: p_gone", "await hedge"]
    assert it.told(it.flow.decode_answered(1.0)) == ["hedge won by local"]


def test_p_is_late_and_both_fail() -> None:
    it = Driver("d", "p", prefill="p")
    it.flow.begin(0.0)
    it.flow.prefill_late(5.0)
    it.flow.prefill_failed(Fallback.P_GONE, 5.5)
    told = it.told(it.flow.decode_failed(LOST, 6.0, 0.5))
    assert told == ["d failed", "retried after reset", "decode on p again"]


def test_p_is_late_and_ds_own_attempt_fails() -> None:
    it = Driver("d", "p", prefill="p")
    it.flow.begin(0.0)
    it.flow.prefill_late(5.0)
    told = it.told(it.flow.hedge_failed(LOST, 5.5))
    assert told == ["hedge won by none", "d failed"]
    assert it.told(it.flow.prefill_answered(6.0)) == ["decode on d from p"]


def test_d_may_not_compute_beside_p() -> None:
    it = Driver("d", "p", prefill="p")
    it.flow.begin(0.0)
    it.router.hedges.switch(is_on=False)
    assert it.told(it.flow.prefill_late(5.0)) == []
    assert it.flow.state is State.PREFILLING


def test_an_answer_in_one_piece_is_not_hedged() -> None:
    it = Driver("d", "p", prefill="p", streams=False)
    prefill = it.flow.begin(0.0)
    assert isinstance(prefill, SendPrefill)
    assert prefill.hedge_at_s == math.inf


@pytest.mark.parametrize("kind", [FailureKind.PEER_GONE, FailureKind.TIMEOUT, FailureKind.LATE])
def test_kv_does_not_come_over_which_is_not_ds_fault(kind: FailureKind) -> None:
    it = Driver("d", "p", prefill="p")
    it.flow.begin(0.0)
    it.flow.prefill_answered(1.0)
    it.flow.decode_sent()
    told = it.told(it.flow.decode_failed(LegFailure(kind), 2.0, 0.5))
    why = it.flow.route.fallback
    assert why is not None
    assert told == [f"fell back: {why.value}", f"retried after {kind.value}", "decode on d again"]


def test_d_is_lost_while_it_fetches() -> None:
    it = Driver("d", "p", "q", prefill="p")
    it.flow.begin(0.0)
    it.flow.prefill_answered(1.0)
    it.flow.decode_sent()
    told = it.told(it.flow.decode_failed(LOST, 2.0, 0.5))
    assert told[:2] == ["d failed", "fell back: d_failed"]
    assert told[2:] == ["retried after reset", "decode on p again"]


def test_twice_elsewhere_with_a_pause_then_the_last_word() -> None:
    it = Driver("a", "b", "c")
    assert it.told(it.flow.begin(0.0)) == ["decode on a"]
    told = it.told(it.flow.decode_failed(LOST, 1.0, 0.5))
    assert told == ["a failed", "retried after reset", "decode on b again"]
    assert it.told(it.flow.decode_failed(LOST, 2.0, 0.5)) == ["b failed", "pause"]
    assert it.told(it.flow.pause_over(2.1, 0.5)) == ["retried after reset", "decode on c again"]
    assert it.told(it.flow.decode_failed(LOST, 3.0, 0.5)) == ["c failed", "give up"]
    it.flow.end(3.0)
    assert it.has_nothing_left()
    assert it.budget.in_flight == 0


def test_the_same_one_after_a_pause_where_there_is_no_other() -> None:
    it = Driver("a")
    it.flow.begin(0.0)
    assert it.told(it.flow.decode_failed(LOST, 1.0, 0.5)) == ["a failed", "pause"]
    assert it.told(it.flow.pause_over(1.1, 0.5)) == ["retried after reset", "decode on a again"]


def test_busy_is_left_alone_and_is_no_failure() -> None:
    it = Driver("a", "b")
    it.flow.begin(0.0)
    told = it.told(it.flow.decode_failed(LegFailure(FailureKind.BUSY, "", 5.0), 1.0, 0.5))
    assert told == ["retried after busy", "decode on b again"]
    assert it.router.known.busy("a", "m", 1.0) is None, "it may be the request's own fault"
    it.flow.decode_answered(1.0)
    busy = it.router.known.busy("a", "m", 1.0)
    assert busy is not None
    assert busy.free_in_s == 5.0


def test_an_instance_that_is_busy_to_one_client_is_open_to_others() -> None:
    it = Driver("a", "b")
    busy, now_s = LegFailure(FailureKind.BUSY, "", 30.0), 1.0

    def asks(tenant: str, *refusals: str) -> str | None:
        nonlocal now_s
        now_s += 0.1
        facts = RequestFacts("m", None, 100, [], 64.0, tenant=tenant)
        route = it.router.admit(facts, now_s)
        if isinstance(route, Reject):
            return None
        flow = RequestFlow(it.router, it.budget, facts, route, CAPS, now_s, streams=True)
        flow.begin(now_s)
        for _ in range(len(refusals)):
            assert flow.route.decode.name in refusals
            flow.decode_failed(busy, now_s, 0.5)
        flow.decode_answered(now_s)
        flow.end(now_s)
        return flow.route.decode.name

    it.flow.end(0.5)
    assert asks("wide", "a") == "b"
    assert asks("wide") == "b", "to it a is closed"
    assert asks("narrow") == "a", "and this opens it again, to all"
    assert asks("wide") == "a"
    assert asks("wide", "a") == "b"
    assert asks("narrow", "a") == "b", "two clients: it is full"
    assert asks("third") == "b"
    assert it.has_nothing_left()


def test_a_request_that_all_refuse_as_busy_waits_alone() -> None:
    it = Driver("a", "b")
    failing(it.flow, dict.fromkeys("ab", LegFailure(FailureKind.BUSY, "", 5.0)), 1.0)
    assert it.flow.may_wait
    it.flow.end(1.0)
    refused = it.router.admit(it.facts, 2.0)
    assert isinstance(refused, Reject)
    assert (refused.reason, refused.wait_s) == (RejectReason.UPSTREAM_BUSY, 4.0)
    other = RequestFacts("m", "other", 100, [], 64.0)
    route = it.router.admit(other, 2.0)
    assert isinstance(route, Route), "both are open to all others"
    it.router.finish(route, 2.0)
    again = it.router.admit(it.facts, 6.0)
    assert isinstance(again, Route), "and to it, once its time is over"
    it.router.finish(again, 6.0)
    assert it.has_nothing_left()


def test_a_request_that_all_refuse_as_busy_may_wait_twice() -> None:
    it = Driver("a", "b", "c", "d")
    busy = LegFailure(FailureKind.BUSY, "", 5.0)
    flow, asked = it.flow, []
    for waits in range(MAX_WAITS + 1):
        now_s = 10.0 * waits
        leg: Leg | Retry = flow.begin(now_s)
        while isinstance(leg, SendDecode):
            asked.append(leg.instance.name)
            leg = after(flow, busy, now_s)
        assert flow.may_wait is (waits < MAX_WAITS)
        assert flow.retries == 2, "over all attempts"
        flow.end(now_s)
        route = it.router.admit(it.facts, now_s + 10.0)
        assert isinstance(route, Route)
        flow = RequestFlow(
            it.router, it.budget, it.facts, route, CAPS, now_s + 10.0, streams=True, before=flow
        )
    assert len(asked) == 3 + MAX_WAITS
    flow.end(100.0)
    assert it.has_nothing_left()


def failing(flow: RequestFlow, failures: dict[str, LegFailure], now_s: float) -> None:
    """Every instance that the flow asks fails in its own way, until it gives up."""
    leg: Leg | Retry = flow.begin(now_s)
    while isinstance(leg, SendDecode):
        leg = after(flow, failures[leg.instance.name], now_s)


def test_what_it_has_seen_before_it_waited_counts() -> None:
    """Two instances give the same status, one before the wait and one after it: a poison."""
    it = Driver("a", "b")
    failed = LegFailure(FailureKind.SERVER_ERROR, "x", status=500)
    first = it.flow.route.decode.name
    failures = dict.fromkeys("ab", LegFailure(FailureKind.BUSY, "", 5.0)) | {first: failed}
    failing(it.flow, failures, 1.0)
    assert it.flow.may_wait
    assert not it.flow.is_poison
    it.flow.end(2.0)
    route = it.router.admit(it.facts, 20.0)
    assert isinstance(route, Route)
    again = RequestFlow(
        it.router, it.budget, it.facts, route, CAPS, 20.0, streams=True, before=it.flow
    )
    again.retries = 0  # so that it comes to both again
    failing(again, dict.fromkeys("ab", failed), 20.0)
    assert again.is_poison
    again.end(23.0)
    doubts = {m.instance.name: m.health.unjudged.count for m in it.router.known.fleet.members()}
    assert doubts == {"a": 1, "b": 1}, "each once for one request"
    assert it.has_nothing_left()


@pytest.mark.parametrize("kind", sorted(DOUBT_KINDS))
def test_what_breaks_after_the_first_byte_counts_for_two_clients(kind: FailureKind) -> None:
    """No other instance will be asked, so nobody could judge it: a trial is due."""
    it = Driver("a", "b")
    it.flow.begin(0.0)
    it.flow.decode_answered(0.5)
    failed = LegFailure(kind, "x", status=500)
    it.flow.failed("a", failed, 1.0, has_begun=True)
    assert not it.router.known.fleet.recently_failed()
    assert it.router.known.fleet.doubted() == {"a"}
    assert not it.router.known.fleet.failing("another"), "others' repetitions may go there"
    for _ in range(FAULTS):
        again = RequestFlow(it.router, it.budget, it.facts, it.flow.route, CAPS, 1.0, streams=True)
        again.failed("a", failed, 1.0, has_begun=True)
    assert not it.router.known.fleet.recently_failed(), "the same client's"
    facts = RequestFacts("m", "other", 100, [], 64.0)
    other = RequestFlow(it.router, it.budget, facts, it.flow.route, CAPS, 1.0, streams=True)
    other.failed("a", failed, 1.0, has_begun=True)
    assert it.router.known.fleet.recently_failed() == {"a"}


@pytest.mark.parametrize("kind", sorted(DOUBT_KINDS))
def test_what_a_request_may_cause_counts_once_another_has_served_it(kind: FailureKind) -> None:
    it = Driver("a", "b")
    it.flow.begin(0.0)
    failed = LegFailure(kind, "x", status=500)
    told = it.told(it.flow.decode_failed(failed, 1.0, 0.5))
    assert told == ["a failed", f"retried after {kind}", "decode on b again"]
    assert not it.router.known.fleet.recently_failed()
    assert it.told(it.flow.decode_answered(2.0)) == ["a failed"]
    assert it.router.known.fleet.doubted() == {"a"}
    assert not it.router.known.fleet.recently_failed(), "one client's request has failed"


def test_what_failed_one_client_keeps_it_away_until_it_is_served() -> None:
    it = Driver("a", "b")
    it.flow.end(0.0)
    for i in range(2):
        _judged(it, it.facts, 1.0 + i)
    members = it.router.known.fleet.members()
    assert it.router.known.fleet.doubts(members, it.facts.asker, 2.0) == [0.5, 0.0]
    assert it.router.known.fleet.doubts(members, "another", 2.0) == [0.0, 0.0]
    route = it.router.admit(it.facts, 3.0)
    assert isinstance(route, Route)
    flow = RequestFlow(it.router, it.budget, it.facts, route, CAPS, 3.0, streams=True)
    flow.begin(3.0)
    flow.decode_answered(3.0)
    flow.completed(None)
    flow.end(3.0)
    assert it.router.known.fleet.doubts(members, it.facts.asker, 3.0) == [0.0, 0.0]


def test_two_clients_requests_open_the_breaker_without_a_trial() -> None:
    it = Driver("a", "b")
    it.flow.end(0.0)
    for i in range(FAULTS):
        assert not it.router.known.fleet.open()
        _judged(it, RequestFacts("m", f"s{i}", PROMPT_TOKENS, [], 64.0), 1.0)
    assert it.router.known.fleet.open() == {"a"}


def _judged(it: Driver, facts: RequestFacts, now_s: float) -> None:
    """The first instance resets a request, the second serves it."""
    route = it.router.admit(facts, now_s)
    assert isinstance(route, Route)
    flow = RequestFlow(it.router, it.budget, facts, route, CAPS, now_s, streams=True)
    flow.begin(now_s)
    flow.decode_failed(LegFailure(FailureKind.RESET, "x"), now_s, 0.5)
    flow.decode_answered(now_s)
    flow.end(now_s)


def test_one_clients_requests_alone_open_no_breaker() -> None:
    """Whatever they make of it: every one fails on each instance that is asked."""
    it = Driver("a", "b", "c")
    it.flow.end(0.0)
    for i in range(4 * FAULTS):
        kind = sorted(DOUBT_KINDS)[i % len(DOUBT_KINDS)]
        route = it.router.admit(it.facts, 1.0)
        assert isinstance(route, Route)
        flow = RequestFlow(it.router, it.budget, it.facts, route, CAPS, 1.0, streams=True)
        failing(flow, dict.fromkeys("abc", LegFailure(kind, "x", status=500)), 1.0)
        flow.end(1.0)
    assert not it.router.known.fleet.open()
    assert it.router.known.fleet.doubted(), "a trial decides"
    assert it.has_nothing_left()


def _fails(it: Driver, tenant: str, *names: str) -> RequestFlow:
    """A tenant's request that these instances reset; its flow behind the last of them."""
    facts = RequestFacts("m", None, 100, [], 64.0, tenant=tenant)
    route = it.router.admit(facts, 1.0)
    assert isinstance(route, Route)
    flow = RequestFlow(it.router, it.budget, facts, route, CAPS, 1.0, streams=True)
    leg: Leg | Retry = flow.begin(1.0)
    while isinstance(leg, SendDecode) and leg.instance.name in names:
        leg = after(flow, LOST, 1.0)
    return flow


def test_what_one_client_makes_fail_everywhere_takes_no_others_second_chance() -> None:
    it = Driver("a", "b", "c", "d")
    it.flow.end(0.0)
    for _ in range(4 * FAULTS):
        _fails(it, "mallory", *"abcd").end(1.0)
    while it.budget.take():
        pass
    flow = _fails(it, "alice", "a")
    assert flow.state is State.COMPUTING, "on another instance, outside the budget"
    flow.decode_answered(1.0)
    flow.end(1.0)
    assert it.has_nothing_left()


@pytest.mark.parametrize("tenant", ["", "the only key"])
def test_where_all_are_in_doubt_one_repetition_is_left_in_the_budget(tenant: str) -> None:
    it = Driver("a", "b", "c", "d")
    it.flow.end(0.0)
    for _ in range(4 * FAULTS):
        _fails(it, tenant, *"abcd").end(1.0)
    flow = _fails(it, tenant, "a")
    assert flow.state is State.COMPUTING
    assert it.budget.in_flight == 1
    assert isinstance(flow.decode_failed(LOST, 1.0, 0.5).next, Pause)
    assert it.told(flow.pause_over(1.0, 0.5)) == ["give up"], "one only"
    flow.end(1.0)
    while it.budget.take():
        pass
    refused = _fails(it, tenant, "a")
    assert refused.state is State.FAILED
    refused.end(1.0)
    assert it.has_nothing_left()


def test_nobody_who_listens_counts_at_once() -> None:
    it = Driver("a", "b")
    it.flow.begin(0.0)
    it.flow.decode_failed(LegFailure(FailureKind.CONNECT, "refused"), 1.0, 0.5)
    assert it.router.known.fleet.recently_failed() == {"a"}


def test_only_a_busy_answer_lets_a_request_wait() -> None:
    it = Driver("a")
    it.flow.begin(0.0)
    it.flow.decode_failed(LegFailure(FailureKind.SERVER_ERROR, "x", status=500), 1.0, 0.5)
    assert not it.flow.may_wait


def test_the_budget_is_used_up() -> None:
    it = Driver("a", "b")
    it.flow.begin(0.0)
    it.router.known.events.failed(
        "b", FailureKind.RESET, "lost", 0.5
    )  # so the retry is not a free one
    while it.budget.take():
        pass
    told = it.told(it.flow.decode_failed(LOST, 1.0, 0.5))
    assert told == ["a failed", "retry refused", "give up"]


def test_a_denied_model_is_tried_only_where_another_may_serve_it() -> None:
    it = Driver("a")
    it.flow.begin(0.0)
    denied = LegFailure(FailureKind.NO_MODEL)
    assert it.told(it.flow.decode_failed(denied, 1.0, 0.5))[-1] == "give up"


def test_a_redirection_is_nobodys_fault_and_not_repeated() -> None:
    it = Driver("a", "b")
    it.flow.begin(0.0)
    moved = LegFailure(FailureKind.REDIRECT)
    assert it.told(it.flow.decode_failed(moved, 1.0, 0.5)) == ["a failed", "give up"]
    assert not it.router.known.fleet.recently_failed()


BOOM = LegFailure(FailureKind.SERVER_ERROR, "status 500", status=500)


def test_a_server_error_counts_once_another_instance_has_served_the_request() -> None:
    it = Driver("a", "b")
    it.flow.begin(0.0)
    told = it.told(it.flow.decode_failed(BOOM, 1.0, 0.5))
    assert told == ["a failed", "retried after server_error", "decode on b again"]
    assert not it.router.known.fleet.has_failed_lately("a"), "the request may be the cause"
    assert it.told(it.flow.decode_answered(2.0)) == ["a failed"]
    assert it.router.known.fleet.doubted() == {"a"}


def test_a_server_error_does_not_count_where_another_says_that_the_client_is_wrong() -> None:
    it = Driver("a", "b")
    it.flow.begin(0.0)
    it.flow.decode_failed(BOOM, 1.0, 0.5)
    assert it.told(it.flow.decode_answered(2.0, is_served=False)) == []
    assert not it.router.known.fleet.recently_failed()


def test_the_same_server_error_twice_is_the_requests_own_fault() -> None:
    it = Driver("a", "b", "c")
    it.flow.begin(0.0)
    it.flow.decode_failed(BOOM, 1.0, 0.5)
    assert it.told(it.flow.decode_failed(BOOM, 2.0, 0.5)) == ["b failed", "give up"]
    assert it.flow.is_poison
    assert not it.router.known.fleet.recently_failed()
    it.flow.end(2.0)
    assert it.has_nothing_left()
    assert it.budget.in_flight == 0


EMPTY = LegFailure(FailureKind.HOLLOW, "it has nothing in it", status=200)
REFUSED = LegFailure(FailureKind.HOLLOW, "status 400", status=400)


def test_a_hollow_answer_counts_once_another_instance_has_served_the_request() -> None:
    it = Driver("a", "b")
    it.flow.begin(0.0)
    assert it.flow.asks_about(EMPTY, 1.0)
    told = it.told(it.flow.decode_failed(EMPTY, 1.0, 0.5))
    assert told == ["a failed", "retried after hollow", "decode on b again"]
    assert not it.router.known.fleet.has_failed_lately("a"), "the request may be the cause"
    assert it.told(it.flow.decode_answered(2.0)) == ["a failed"]
    assert it.router.known.fleet.doubted() == {"a"}
    it.flow.end(3.0)
    assert it.has_nothing_left()


def test_a_hollow_answer_that_another_gives_too_is_the_requests_own_fault() -> None:
    it = Driver("a", "b", "c")
    it.flow.begin(0.0)
    it.flow.decode_failed(EMPTY, 1.0, 0.5)
    assert not it.flow.asks_about(EMPTY, 2.0)
    assert it.told(it.flow.decode_answered(2.0, is_served=False)) == []
    assert not it.flow.failed("b", EMPTY, 3.0, has_begun=True), "not at its end either"
    it.flow.completed(None)
    assert not it.router.known.fleet.doubted()


def test_a_refusal_is_asked_about_after_some_in_a_row() -> None:
    it = Driver("a", "b")
    asked = [it.flow.asks_about(REFUSED, 1.0) for _ in range(REFUSALS + 1)]
    assert asked == [False] * REFUSALS + [True]
    assert not it.router.known.fleet.doubted()


def test_where_nobody_else_is_there_nobody_is_asked() -> None:
    it = Driver("a")
    it.flow.begin(0.0)
    assert not it.flow.asks_about(EMPTY, 1.0)


def test_a_hollow_answer_is_passed_on_where_the_other_attempt_fails() -> None:
    it = Driver("a", "b")
    it.flow.begin(0.0)
    it.flow.decode_failed(EMPTY, 1.0, 0.5)
    assert it.told(it.flow.decode_failed(LOST, 2.0, 0.5)) == ["b failed", "pause"]
    assert it.told(it.flow.pause_over(2.1, 0.5)) == ["give up"]
    answers = it.router.known.events.answers("b")
    assert it.told(it.flow.decode_answered(4.0, is_served=False)) == []
    assert str(it.flow.state) == str(State.ANSWERED)
    assert it.router.known.events.answers("b") == answers, "it is not b's"
    it.flow.end(5.0)
    assert it.has_nothing_left()


def measured(it: Driver) -> object:
    """The time of its prefill, which is about to be learned."""
    return it.flow.route.measured


def test_an_end_by_abort_counts_at_once_and_teaches_no_time() -> None:
    it = Driver("a", "b")
    it.flow.begin(0.0)
    it.flow.decode_answered(1.0)
    it.flow.first_token(1.0)
    assert measured(it) is not None
    assert it.told(it.flow.failed("a", EMPTY, 1.1, has_begun=True)) == ["a failed"]
    assert measured(it) is None
    assert it.router.known.fleet.doubted() == {"a"}


def test_a_key_that_is_refused_is_doubted_with_or_without_others() -> None:
    it = Driver("a")
    it.flow.begin(0.0)
    refused = LegFailure(FailureKind.KEY_REFUSED, "status 401", status=401)
    assert not it.flow.asks_about(refused, 1.0)
    it.flow.failed("a", refused, 1.0)
    it.flow.decode_answered(1.0, is_served=False)
    assert it.router.known.fleet.doubted() == {"a"}


def test_a_key_that_two_refuse_is_the_clients_own_matter() -> None:
    """The engine may refuse this client's request, of a model or a user, whatever the key."""
    it = Driver("a", "b", "c")
    it.flow.begin(0.0)
    refused = LegFailure(FailureKind.KEY_REFUSED, "status 403", status=403)
    assert it.flow.asks_about(refused, 1.0)
    it.flow.decode_failed(refused, 1.0, 0.5)
    assert not it.router.known.fleet.doubted(), "another instance is asked first"
    assert not it.flow.asks_about(refused, 1.0)
    it.flow.failed("b", refused, 1.0)
    it.flow.decode_answered(1.0, is_served=False)
    assert not it.router.known.fleet.doubted()


def test_a_key_that_another_takes_is_doubted_at_once() -> None:
    it = Driver("a", "b")
    it.flow.begin(0.0)
    refused = LegFailure(FailureKind.KEY_REFUSED, "status 403", status=403)
    it.flow.decode_failed(refused, 1.0, 0.5)
    it.flow.decode_answered(1.0)
    member = it.router.known.fleet.get("a")
    assert member is not None
    assert member.health.trial_due(1.0)


def test_a_list_that_still_has_a_denied_model_is_no_excuse() -> None:
    it = Driver("a", "b")
    for name in ("a", "b"):
        it.router.known.observe_models(name, ["m"], {})
    for is_known in (False, True):
        flow = RequestFlow(it.router, it.budget, it.facts, it.flow.route, CAPS, 0.0, streams=True)
        flow.begin(0.0)
        flow.decode_failed(LegFailure(FailureKind.NO_MODEL, "denied", status=404), 1.0, 0.5)
        flow.decode_answered(2.0)
        assert it.router.known.fleet.doubted() == ({"a"} if is_known else set())
        it.router.known.observe_models("a", ["m"], {})
        flow.route.decode = it.router.known.fleet.members()[0].instance
        flow.route.tried.clear()


def test_two_server_errors_that_differ_are_tried_on_a_third() -> None:
    it = Driver("a", "b", "c")
    it.flow.begin(0.0)
    it.flow.decode_failed(BOOM, 1.0, 0.5)
    other = LegFailure(FailureKind.SERVER_ERROR, "status 502", status=502)
    assert it.told(it.flow.decode_failed(other, 2.0, 0.5)) == ["b failed", "pause"]
    it.flow.pause_over(2.1, 0.5)
    assert not it.flow.is_poison
    assert it.told(it.flow.decode_answered(3.0)) == ["a failed", "b failed"]


class Requests:
    """Requests one after the other over some instances, of which `broken` fails on every one."""

    def __init__(self, count: int, broken: str | None = None) -> None:
        config = RouterConfig(prefill_throughput=20_000.0, placement="round-robin")
        self.router, self.budget, self.broken = Router(FleetState(config)), Budget(), broken
        self.now_s = 0.0
        self.errors: Counter[str] = Counter()
        for i in range(count):
            self.router.known.add(Instance(f"i{i}", f"http://i{i}"))
            self.router.known.events.probe_answered(f"i{i}", 0.0)

    def run(self, *, is_poison: bool) -> bool:
        """One request; whether it was served."""
        facts = RequestFacts("m", None, 100, [], 64.0, offloadable=False)
        route = self.router.admit(facts, self.now_s)
        assert isinstance(route, Route)
        router, budget, now_s = self.router, self.budget, self.now_s
        flow = RequestFlow(router, budget, facts, route, CAPS, now_s, streams=True)
        leg: Leg | Retry = flow.begin(now_s)
        while isinstance(leg, SendDecode):
            name = leg.instance.name
            if is_poison or name == self.broken:
                self.errors[name] += 1
                leg = after(flow, BOOM, now_s)
            else:
                flow.decode_answered(now_s)
                flow.end(now_s)
                return True
        flow.end(now_s)
        return False

    def try_out(self) -> None:
        """The proxy's own request to each instance that is in doubt."""
        for member in self.router.known.fleet.members():
            name = member.instance.name
            if member.health.is_up and member.health.trial_due(self.now_s):
                member.health.trial_begins(self.now_s)
                error = "status 500" if name == self.broken else None
                self.router.known.events.trial_ended(name, error, self.now_s)


steps = st.lists(st.tuples(st.booleans(), st.floats(0.0, 3.0)), max_size=60)


@given(st.integers(1, 4), steps)
def test_a_poison_ejects_nobody(count: int, plan: list[tuple[bool, float]]) -> None:
    """However many there are, among however few others: who works is up, and serves."""
    them = Requests(count)
    for is_poison, wait_s in plan:
        them.now_s += wait_s
        assert them.run(is_poison=is_poison) is not is_poison
        them.try_out()
        fleet = them.router.known.fleet
        assert len(fleet.up()) == count
        assert not fleet.open()
        assert not fleet.recently_failed()
        assert them.budget.in_flight == 0


@given(st.integers(2, 4), steps)
def test_one_that_is_broken_is_found_among_poisons(
    count: int, plan: list[tuple[bool, float]]
) -> None:
    them = Requests(count, broken="i0")
    for is_poison, wait_s in plan:
        them.now_s += wait_s
        them.run(is_poison=is_poison)
        them.try_out()
    up = {member.instance.name for member in them.router.known.fleet.up()}
    assert up - {"i0"} == {f"i{i}" for i in range(1, count)}, "of the others nobody is out"
    health = them.router.known.fleet.get("i0")
    assert health is not None
    in_a_row = them.errors["i0"] >= 2 * FAULTS and max((w for _, w in plan), default=0) < 1.0
    assert not (health.health.is_up and in_a_row)


@pytest.mark.parametrize(("has_budget", "runs"), [(False, 110), (True, 210)])
def test_where_all_are_broken_each_request_soon_runs_once_and_again_in_the_budget(
    runs: int, *, has_budget: bool
) -> None:
    them = Requests(3)
    while not has_budget and them.budget.take():
        pass
    for _ in range(100):
        assert not them.run(is_poison=True)
    assert sum(them.errors.values()) <= runs


def test_an_instance_is_blamed_once_per_request() -> None:
    it = Driver("a")
    it.flow.begin(0.0)
    assert it.told(it.flow.failed("a", LOST, 1.0)) == ["a failed"]
    assert it.told(it.flow.failed("a", LOST, 2.0)) == []


def test_a_repeated_stream_has_the_time_that_is_left() -> None:
    it = Driver("a", "b")
    it.flow.begin(0.0)
    leg = it.flow.decode_failed(LOST, 100.0, 0.5).next
    assert isinstance(leg, SendDecode)
    assert leg.limit.cap_s == 20.0
    assert leg.limit.whole_s == 120.0, "what an error names"


def test_each_attempt_at_an_answer_in_one_piece_has_all_its_time() -> None:
    it = Driver("a", "b", streams=False)
    first = it.flow.begin(0.0)
    again = it.flow.decode_failed(LOST, 100.0, 0.5).next
    for leg in (first, again):
        assert isinstance(leg, SendDecode)
        assert (leg.limit.option, leg.limit.seconds) == ("answer", 600.0)
        assert leg.limit.kind is FailureKind.TIMEOUT


LATE_WHOLE = LegFailure(FailureKind.TIMEOUT, "no answer in 600 s")


@pytest.mark.parametrize(("others", "blamed"), [(0, ["a failed"]), (1, [])])
def test_an_answer_in_one_piece_that_is_late_is_not_computed_again(
    others: int, blamed: list[str]
) -> None:
    it = Driver("a", "b", streams=False)
    it.flow.begin(0.0)
    for _ in range(others):
        it.router.known.events.answered("a")
    assert it.told(it.flow.decode_failed(LATE_WHOLE, 600.0, 0.5)) == [*blamed, "give up"]
    it.flow.end(600.0)
    assert it.has_nothing_left()


def test_one_that_waits_for_a_peers_kv_is_not_computed_again_either() -> None:
    it = Driver("d", "p", prefill="p", streams=False)
    it.flow.begin(0.0)
    it.flow.prefill_answered(1.0)
    it.flow.decode_sent()
    assert it.told(it.flow.decode_failed(LATE_WHOLE, 600.0, 0.5))[-1] == "give up"
    it.flow.end(600.0)
    assert it.has_nothing_left()


def test_a_d_that_was_never_asked_leaves_kv_to_release() -> None:
    it = Driver("d", "p", "q", prefill="p")
    it.flow.begin(0.0)
    it.flow.prefill_sent()
    it.flow.prefill_answered(1.0)
    told = it.told(it.flow.decode_failed(LOST, 2.0, 0.5))
    assert told[0] == "release on p by q, d"
    it.flow.release_over(ReleaseResult.RELEASED, 3.0)
    assert it.unreleased("p", 3.0) == 0


def test_the_client_leaves_while_p_computes() -> None:
    """P stops when it hears that nobody listens; it may have ended just then."""
    it = Driver("d", "p", prefill="p")
    it.flow.begin(0.0)
    assert it.told(it.flow.prefill_left()) == ["cancel prefill"], "it was not sent yet"
    it.flow.prefill_sent()
    assert it.told(it.flow.prefill_left()) == ["hang up on p"]
    it.flow.end(0.5)
    assert it.has_nothing_left()
    assert it.told(it.flow.left_prefill_over(0.6, LeftKv.NONE)) == []
    late = it.told(it.flow.left_prefill_over(100.0, LeftKv.NONE))
    assert late == ["unreleased: unknown"]
    assert it.unreleased("p", 100.0) == PROMPT_TOKENS


def test_the_client_leaves_and_p_answers_all_the_same() -> None:
    it = Driver("d", "p", prefill="p")
    it.flow.begin(0.0)
    it.flow.prefill_sent()
    it.flow.prefill_left()
    it.flow.end(0.5)
    assert it.told(it.flow.left_prefill_over(1.5, LeftKv.NAMED)) == ["release on p by d"]
    it.flow.release_over(ReleaseResult.FAILED, 2.0)
    assert it.unreleased("p", 2.0) == PROMPT_TOKENS


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize(
    ("left", "told"),
    [
        (LeftKv.NONE, []),
        (LeftKv.NAMED, ["release on p by d"]),
        (LeftKv.UNNAMED, ["unreleased: stranded"]),
    ],
)
def test_kv_behind_an_answer_that_cannot_be_used(
    left: LeftKv, told: list[str], is_left: bool
) -> None:
    """It is released where it can be named; else it counts as used for a while."""
    it = Driver("d", "p", prefill="p")
    it.flow.begin(0.0)
    it.flow.prefill_sent()
    if is_left:
        it.flow.prefill_left()
        it.flow.end(0.2)
        assert it.told(it.flow.left_prefill_over(0.3, left)) == told
    else:
        answer = it.told(it.flow.prefill_failed(Fallback.P_ERROR, 0.3, None, left))
        assert answer == [*told, "fell back: p_error", "decode on d again"]
    booked = PROMPT_TOKENS if left is LeftKv.UNNAMED else 0
    assert it.unreleased("p", 0.3) == booked


def test_d_answers_first_and_p_all_the_same() -> None:
    """The route has no P any more, but its KV is there."""
    it = Driver("d", "p", prefill="p")
    it.flow.begin(0.0)
    it.flow.prefill_sent()
    it.flow.prefill_late(5.0)
    assert it.told(it.flow.prefill_left()) == ["hang up on p"]
    it.flow.hedge_answered(6.0)
    it.flow.first_token(6.0)
    assert it.told(it.flow.left_prefill_over(6.5, LeftKv.NAMED)) == ["release on p by d"]


@pytest.mark.parametrize("why", [Fallback.KV_PARAMS, Fallback.P_ERROR, Fallback.P_TIMEOUT])
def test_kv_that_no_d_can_fetch_is_booked_once(why: Fallback) -> None:
    it = Driver("d", "p", prefill="p")
    it.flow.begin(0.0)
    it.flow.prefill_failed(why, 0.2, None, LeftKv.UNNAMED)
    assert it.unreleased("p", 0.3) == PROMPT_TOKENS


@pytest.mark.parametrize(
    ("kind", "was_sent", "booked"),
    [
        (FailureKind.TIMEOUT, True, True),
        (FailureKind.LATE, True, True),
        (FailureKind.RESET, True, True),
        (FailureKind.WENT_DOWN, True, True),
        (FailureKind.SERVER_ERROR, True, False),
        (FailureKind.PEER_GONE, True, False),
        (FailureKind.TIMEOUT, False, False),
        (FailureKind.CONNECT, False, False),
    ],
)
def test_what_a_d_that_fails_while_it_fetches_leaves_on_p(
    kind: FailureKind, was_sent: bool, booked: bool
) -> None:
    it = Driver("d", "p", prefill="p")
    it.flow.begin(0.0)
    it.flow.prefill_answered(1.0)
    if was_sent:
        it.flow.decode_sent()
    told = it.told(it.flow.decode_failed(LegFailure(kind, "gone"), 2.0, 0.5))
    assert ("release on p by d" in told) is not was_sent
    assert it.unreleased("p", 2.0) == (PROMPT_TOKENS if booked else 0)


def test_the_client_leaves_while_d_fetches() -> None:
    """D's leg goes on, and its lease; both end together."""
    it = Driver("d", "p", prefill="p")
    it.flow.begin(0.0)
    it.flow.prefill_answered(1.0)
    it.flow.decode_sent()
    assert it.told(it.flow.decode_left()) == ["keep decode"]
    it.flow.end(1.5)
    assert it.router.known.ledger.live == 1
    assert it.told(it.flow.left_decode_over(2.0, has_begun=True)) == []
    assert it.has_nothing_left()
    assert it.unreleased("p", 2.0) == 0


def test_d_was_left_and_never_began() -> None:
    """Nobody has told P that its KV may go."""
    it = Driver("d", "p", prefill="p")
    it.flow.begin(0.0)
    it.flow.prefill_answered(1.0)
    it.flow.decode_sent()
    it.flow.decode_left()
    it.flow.end(1.5)
    assert it.told(it.flow.left_decode_over(2.0, has_begun=False)) == ["unreleased: unknown"]
    assert it.has_nothing_left()
    assert it.unreleased("p", 2.0) == PROMPT_TOKENS


def test_the_client_leaves_before_d_was_asked() -> None:
    it = Driver("d", "p", prefill="p")
    it.flow.begin(0.0)
    it.flow.prefill_answered(1.0)
    assert it.told(it.flow.decode_left()) == ["cancel decode"]
    it.flow.end(1.5)
    assert it.has_nothing_left()
    assert it.told(it.flow.left_decode_over(1.5, has_begun=False)) == ["release on p by d"]


def test_a_connector_that_pins_nothing_has_nothing_to_release() -> None:
    it = Driver("d", "p", prefill="p", kv_connector="implicit")
    it.flow.begin(0.0)
    it.flow.prefill_sent()
    it.flow.end(0.5)
    assert it.told(it.flow.left_prefill_over(1.5, LeftKv.NAMED)) == []
    assert it.told(it.flow.left_prefill_over(1.5, LeftKv.UNNAMED)) == []
    assert it.unreleased("p", 1.5) == 0


@pytest.mark.parametrize("state", State)
def test_the_end_may_come_in_any_state(state: State) -> None:
    ends = State.LEFT if state is State.LEFT else State.ENDED
    assert STEPS[state, Event.END] == {ends}


def test_what_is_not_in_the_table_is_refused() -> None:
    it = Driver("d")
    for state, event in product(State, Event):
        assert all(isinstance(to, State) for to in STEPS.get((state, event), ()))
    with pytest.raises(IllegalStepError, match="prefill_answered while placed"):
        it.flow.prefill_answered(0.0)


def _sent_and_left(flow: RequestFlow, now_s: float) -> None:
    """D was asked to fetch, and its client leaves."""
    del now_s
    flow.decode_sent()
    flow.decode_left()


_EVENTS: dict[State, list[Callable[[RequestFlow, float], object]]] = {
    State.PLACED: [lambda f, t: f.begin(t)],
    State.PREFILLING: [
        lambda f, t: f.prefill_late(t),
        lambda f, t: f.prefill_answered(t),
        lambda f, t: f.prefill_failed(Fallback.P_ERROR, t, LOST),
    ],
    State.HEDGED: [
        lambda f, t: f.prefill_answered(t),
        lambda f, t: f.prefill_failed(Fallback.P_GONE, t),
        lambda f, t: f.hedge_answered(t),
        lambda f, t: f.hedge_failed(LOST, t),
    ],
    State.FETCHING: [
        lambda f, t: f.decode_answered(t),
        _sent_and_left,
        lambda f, t: f.decode_failed(LOST, t, 0.1),
        lambda f, t: f.decode_failed(LegFailure(FailureKind.LATE), t, 0.1),
    ],
    State.COMPUTING: [
        lambda f, t: f.decode_answered(t),
        lambda f, t: f.decode_failed(LOST, t, 0.1),
        lambda f, t: f.decode_failed(LegFailure(FailureKind.BUSY), t, 0.1),
    ],
    State.PAUSED: [lambda f, t: f.pause_over(t, 0.9)],
    State.ANSWERED: [
        lambda f, t: f.first_token(t),
        lambda f, t: f.came_whole(t),
        lambda f, t: f.stream_lost(0, 100.0, t, LOST),
        lambda f, t: f.move_asked(0, 100.0, t),
    ],
    State.STREAMING: [
        lambda f, t: f.stream_lost(5, 100.0, t, LOST),
        lambda f, t: f.move_asked(5, 100.0, t),
        lambda f, t: f.stream_lost(5, 0.0, t),
        lambda f, t: f.move_asked(5, 0.0, t),
    ],
    State.MOVING: [
        lambda f, t: f.decode_answered(t),
        lambda f, t: f.move_failed(LOST, 5, 100.0, t),
        lambda f, t: f.move_failed(LegFailure(FailureKind.BUSY), 5, 100.0, t),
        lambda f, t: f.move_failed(LOST, 5, 0.0, t),
        lambda f, t: f.move_failed(LegFailure(FailureKind.TIMEOUT), 5, 100.0, t),
        lambda f, t: f.move_again(9, t),
        lambda f, t: f.move_again(9, t, LOST, is_lost=True),
        lambda f, t: f.move_needless(Unmoved.FINISHED, 9, t),
    ],
}


@given(st.sampled_from([None, "p"]), st.lists(st.integers(0, 7), max_size=20))
def test_on_every_path_all_is_given_back(prefill: str | None, choices: list[int]) -> None:
    """Whatever is reported, and wherever it ends: no lease and no repetition is left."""
    it = Driver("d", "p", "q", prefill=prefill, moves=3)
    now_s = 0.0
    for choice in choices:
        events = _EVENTS.get(it.flow.state)
        if events is None:
            break
        now_s += 1.0
        events[choice % len(events)](it.flow, now_s)
        assert it.router.known.ledger.drift() == 0
    it.flow.end(now_s)
    it.flow.end(now_s)
    if it.flow.state is State.LEFT:
        it.flow.left_decode_over(now_s, has_begun=prefill is None)
    assert it.has_nothing_left()
    assert it.budget.in_flight == 0
    assert it.router.hedges.live == 0
