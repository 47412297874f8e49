"""A stream that has begun and goes on elsewhere: who is asked, what is charged, when it ends."""

from __future__ import annotations

from proxy.core.routing.actions import LegFailure, SendDecode
from proxy.core.routing.request_flow import MOVE_STOP_S, State
from proxy.core.types import FailureKind, Unmoved
from tests.proxy.core.routing.test_request_flow import LOST, PROMPT_TOKENS, Driver

REST_S = 1000.0


def streaming(*names: str, moves: int = 2, prefill: str | None = None) -> Driver:
    """A flow whose stream has given tokens on the first of these instances."""
    it = Driver(*names, moves=moves, prefill=prefill)
    it.flow.begin(0.0)
    if prefill:
        it.flow.prefill_answered(0.5)
    it.flow.decode_answered(1.0)
    it.flow.first_token(1.0)
    return it


def test_it_goes_on_behind_the_tokens_that_the_client_has() -> None:
    it = streaming("a", "b")
    told = it.told(it.flow.stream_lost(50, REST_S, 2.0, LOST))
    assert told == ["a failed", "decode on b again"]
    assert it.router.known.ledger.load("a").is_idle
    assert it.router.known.ledger.load("b").prefill_tokens == PROMPT_TOKENS + 50
    it.flow.decode_answered(3.0)
    it.flow.first_token(3.0)
    assert it.router.known.ledger.load("b").decode_tokens == PROMPT_TOKENS + 50
    assert it.flow.route.home is None
    it.flow.end(4.0)
    assert it.has_nothing_left()


def test_the_session_moves_along() -> None:
    it = streaming("a", "b")
    it.flow.stream_lost(50, REST_S, 2.0, LOST)
    home = it.router.known.sessions.home("s", 2.0)
    assert home == "b"


def test_an_offloaded_one_goes_on_without_its_p() -> None:
    it = streaming("a", "p", prefill="p")
    assert it.told(it.flow.stream_lost(5, REST_S, 2.0, LOST)) == ["a failed", "decode on p again"]
    assert it.flow.route.prefill is None
    it.flow.end(3.0)
    assert it.has_nothing_left()


def test_with_a_limit_of_none_it_ends_as_before() -> None:
    it = streaming("a", "b", moves=0)
    assert it.told(it.flow.stream_lost(5, REST_S, 2.0)) == ["not moved: limit"]
    assert it.flow.state is State.STREAMING
    it.flow.end(3.0)
    assert it.has_nothing_left()


def test_each_leg_counts_and_the_one_that_was_lost_is_not_asked() -> None:
    it = streaming("a", "b", "c", moves=2)
    it.flow.stream_lost(5, REST_S, 2.0)
    assert it.told(it.flow.move_failed(LOST, 5, REST_S, 3.0)) == ["b failed", "decode on c again"]
    told = it.told(it.flow.move_failed(LOST, 5, REST_S, 4.0))
    assert told == ["c failed", "not moved: limit"]
    assert it.flow.state is State.FAILED
    it.flow.end(5.0)
    assert it.has_nothing_left()


def test_where_there_is_no_other_it_ends() -> None:
    it = streaming("a")
    assert it.told(it.flow.stream_lost(5, REST_S, 2.0)) == ["not moved: no_instance"]


def test_one_that_gave_tokens_since_may_be_asked_again() -> None:
    it = streaming("a", "b", moves=2)
    it.flow.stream_lost(5, REST_S, 2.0)
    it.flow.decode_answered(3.0)
    it.flow.first_token(3.0)
    assert it.told(it.flow.stream_lost(9, REST_S, 4.0)) == ["decode on a again"]


def test_a_busy_one_is_left_alone_and_another_asked() -> None:
    it = streaming("a", "b", "c")
    it.flow.stream_lost(5, REST_S, 2.0)
    busy = LegFailure(FailureKind.BUSY, busy_s=5.0)
    assert it.told(it.flow.move_failed(busy, 5, REST_S, 2.5)) == ["decode on c again"]


def test_it_is_not_moved_where_the_time_does_not_suffice() -> None:
    it = streaming("a", "b")
    assert it.told(it.flow.stream_lost(5, 1.0, 2.0)) == ["not moved: time"]
    assert it.flow.moves == 0
    it.flow.end(3.0)
    assert it.has_nothing_left()


def test_one_that_is_to_leave_stays_where_nobody_goes_on_with_it() -> None:
    it = streaming("a", "b", moves=1)
    assert it.told(it.flow.move_asked(5, REST_S, 2.0)) == ["decode on b again"]
    assert it.flow.has_other(2.0) is False
    told = it.told(it.flow.move_failed(LOST, 5, REST_S, 3.0))
    assert told == ["b failed", "not moved: limit"]
    assert (it.flow.state, it.flow.route.decode.name) == (State.STREAMING, "a")
    assert it.router.known.ledger.load("a").decode_tokens == PROMPT_TOKENS + 5
    assert it.router.known.sessions.home("s", 3.0) == "a"
    it.flow.end(4.0)
    assert it.has_nothing_left()


def test_one_without_a_token_is_not_asked_to_leave() -> None:
    it = Driver("a", "b", moves=1)
    it.flow.begin(0.0)
    it.flow.decode_answered(1.0)
    assert it.told(it.flow.move_asked(0, REST_S, 2.0)) == ["not moved: no_ids"]


def leaving(moves: int = 1, tokens: int = PROMPT_TOKENS) -> tuple[Driver, SendDecode]:
    """A stream that was asked to leave its instance, and what was sent to the next one."""
    it = streaming("a", "b", "c", moves=moves)
    it.facts.prompt_tokens = tokens
    send = it.flow.move_asked(50, REST_S, 2.0)
    assert isinstance(send, SendDecode)
    return it, send


def test_a_short_prompt_lets_the_stream_stand_still_for_a_second() -> None:
    it, send = leaving(moves=2, tokens=1000)
    assert (send.warms, send.limit.seconds, send.limit.cap_s) == (False, MOVE_STOP_S, MOVE_STOP_S)
    late = LegFailure(FailureKind.TIMEOUT)
    warms = it.flow.move_failed(late, 50, REST_S, 3.0).next
    assert isinstance(warms, SendDecode)
    assert (warms.instance.name, warms.warms, it.flow.moves) == ("b", True, 1), "it takes longer"
    assert it.router.known.ledger.load("a").decode_tokens == 1000 + 50, "where the stream runs on"
    again = it.flow.move_again(70, 9.0).next
    assert isinstance(again, SendDecode)
    assert (again.warms, again.limit.seconds) == (False, MOVE_STOP_S)
    told = it.told(it.flow.move_failed(late, 70, REST_S, 10.0))
    assert told == ["not moved: time"], "nobody is blamed, and no other one asked"
    assert (it.flow.state, it.flow.route.decode.name) == (State.STREAMING, "a")
    assert it.router.known.ledger.load("b").is_idle
    it.flow.end(4.0)
    assert it.has_nothing_left()


def test_a_long_prompt_is_computed_while_the_stream_runs_on() -> None:
    it, send = leaving()
    assert send.warms
    assert send.limit.cap_s > MOVE_STOP_S
    on_a, on_b = it.router.known.ledger.load("a"), it.router.known.ledger.load("b")
    assert on_a.decode_tokens == on_b.prefill_tokens == PROMPT_TOKENS + 50
    it.flow.route.lease.grow(16)
    assert it.router.known.ledger.load("a").decode_tokens == PROMPT_TOKENS + 66
    again = it.flow.move_again(70, 9.0).next
    assert isinstance(again, SendDecode)
    assert (again.instance.name, again.warms, again.limit.seconds) == ("b", False, MOVE_STOP_S)
    assert it.router.known.ledger.load("a").is_idle
    assert it.flow.moves == 1, "the same instance counts once"
    it.flow.decode_answered(9.5)
    it.flow.first_token(9.5)
    assert it.router.known.ledger.load("b").decode_tokens == PROMPT_TOKENS + 70
    it.flow.end(10.0)
    assert it.has_nothing_left()


def test_one_that_ends_while_another_computes_is_charged_where_it_was() -> None:
    it, _ = leaving()
    assert it.told(it.flow.move_needless(Unmoved.FINISHED, 80, 3.0)) == ["not moved: finished"]
    assert it.router.known.ledger.load("a").decode_tokens == PROMPT_TOKENS + 80
    assert it.router.known.ledger.load("b").is_idle
    it.flow.end(4.0)
    assert it.has_nothing_left()


def test_one_whose_instance_is_lost_while_another_computes_goes_on_there() -> None:
    it, _ = leaving()
    told = it.told(it.flow.move_again(80, 3.0, LOST, is_lost=True))
    assert told == ["a failed", "decode on b again"]
    assert it.router.known.ledger.load("a").is_idle
    told = it.told(it.flow.move_failed(LOST, 80, REST_S, 4.0))
    assert told == ["b failed", "not moved: limit"]
    assert it.flow.state is State.FAILED
    it.flow.end(5.0)
    assert it.has_nothing_left()
