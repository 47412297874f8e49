"""What is noted of a request's legs: which take whose place, and when each ends."""

from __future__ import annotations

from proxy.core.types import Instance
from proxy.protocol.names.trace_parent import parent_of
from proxy.telemetry.tracing.trace import (
    DECODE,
    HEDGE,
    MOST_LEGS,
    MOVE,
    PREFILL,
    SUPERSEDED,
    WARM,
    Trace,
)

A, B = Instance("a", "http://a:1"), Instance("b", "http://b:1")


def traced() -> Trace:
    return Trace("1" * 32, None, "", is_sampled=True)


def ends(trace: Trace) -> list[tuple[str, float | None, str | None]]:
    return [(leg.kind, leg.ended_s, leg.result) for leg in trace.legs]


def test_a_prefill_is_followed_by_the_leg_that_fetches() -> None:
    trace = traced()
    trace.begin(PREFILL, B, None, 1.0).end(2.0)
    trace.begin(DECODE, A, "b", 2.0)
    trace.answered(3.0)
    assert ends(trace) == [(PREFILL, 2.0, None), (DECODE, None, None)]


def test_the_loser_of_a_hedge_ends_when_the_other_counts() -> None:
    trace = traced()
    trace.begin(PREFILL, B, None, 1.0)
    trace.begin(HEDGE, A, None, 2.0)
    trace.answered(3.0)
    assert ends(trace) == [(PREFILL, 3.0, SUPERSEDED), (HEDGE, None, None)]
    trace = traced()
    trace.begin(PREFILL, B, None, 1.0).end(3.0)
    trace.begin(HEDGE, A, None, 2.0)
    trace.begin(DECODE, A, "b", 3.0)
    assert ends(trace)[1] == (HEDGE, 3.0, SUPERSEDED)


def test_a_stream_that_leaves_goes_on_until_the_next_one_answers() -> None:
    trace = traced()
    trace.begin(DECODE, A, None, 1.0)
    trace.answered(2.0)
    trace.begin(WARM, B, None, 3.0).end(4.0)
    trace.begin(DECODE, B, None, 4.0)
    assert ends(trace) == [(DECODE, None, None), (WARM, 4.0, None), (MOVE, None, None)]
    trace.answered(5.0)
    assert ends(trace)[0] == (DECODE, 5.0, SUPERSEDED)


def test_the_first_end_counts_and_all_times_move() -> None:
    trace = traced()
    trace.begin(DECODE, A, None, 1.0)
    trace.stop(2.0, "lost")
    trace.stop(3.0, "silent")
    trace.begin(DECODE, B, None, 3.0)
    trace.move_times(10.0)
    assert ends(trace) == [(DECODE, 12.0, "lost"), (DECODE, None, None)]
    assert [leg.began_s for leg in trace.legs] == [11.0, 13.0]


def test_legs_are_bounded_and_each_is_sent_its_own_parent() -> None:
    trace = traced()
    sent = {trace.lines(trace.begin(DECODE, A, None, 1.0)) for _ in range(MOST_LEGS + 9)}
    assert (len(sent), len(trace.legs)) == (MOST_LEGS + 9, MOST_LEGS)
    for line in sent:
        found = parent_of([line.decode().strip().partition(": ")[2]])
        assert found is not None
        assert found[::2] == ("1" * 32, True)
