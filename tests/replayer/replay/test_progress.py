"""The live line shows the tally as it stands when it is drawn."""

import io

import pytest
from rich.console import Console

from replayer.replay.client import NO_CONNECTION, ReplayOutcome, TimedExchange
from replayer.replay.progress import ProgressLine, Tally, shown
from replayer.replay.run import Result
from replayer.trace.loaders import TraceRequest

REQUEST = TraceRequest("r", None, 0, 0.0, 1, 1, ((0, 1),), 1, 1)


def ended(tally, outcome):
    exchange = TimedExchange(sent_s=1.0, end_s=3.0, outcome=outcome)
    exchange.stream.first_token_s = 1.25
    tally.ended(Result(REQUEST, "r.run", 1.0, exchange))


def test_a_tally_counts_what_is_under_way_and_what_failed():
    tally = Tally()
    for _request in range(3):
        tally.sent()
    ended(tally, ReplayOutcome.OK)
    ended(tally, ReplayOutcome.TIMEOUT)
    tally.ended(Result(REQUEST, None, None, None))
    assert (tally.sent_count, tally.ended_count) == (3, 3)
    assert tally.line() == "in flight 1  not ok 2  TTFT p50 0.250 s (last 64)"


def test_refusals_show_while_a_run_goes_on():
    tally = Tally()
    exchange = TimedExchange(sent_s=1.0, end_s=3.0, outcome=ReplayOutcome.OK, refusals=2)
    tally.sent()
    tally.ended(Result(REQUEST, "r.run", 1.0, exchange))
    assert tally.line() == "in flight 0  not ok 0  refused 2  TTFT p50 - (last 64)"


def test_a_tally_tells_the_targets_own_time():
    tally = Tally(time_scale=4.0)
    ended(tally, ReplayOutcome.OK)
    assert "TTFT p50 1.000 s" in tally.line()


def test_each_drawing_takes_the_numbers_of_its_moment():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    tally = Tally()
    line = ProgressLine(console, tally, total=5)
    tally.sent()
    ended(tally, ReplayOutcome.OK)
    with console.capture() as captured:
        console.print(line.get_renderable())
    assert "1/5" in captured.get()


def test_nothing_is_drawn_where_nothing_is_wanted():
    file = io.StringIO()
    with shown(Console(file=file), Tally(), 5, live=False):
        pass
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("fields", "stops_after"),
    [
        ({"outcome": ReplayOutcome.HTTP_ERROR, "status": 404}, 5),
        ({"outcome": ReplayOutcome.HTTP_ERROR, "status": 401}, 5),
        ({"outcome": ReplayOutcome.HTTP_ERROR, "status": 429}, 20),
        ({"outcome": ReplayOutcome.HTTP_ERROR, "status": 500}, 20),
        ({"outcome": ReplayOutcome.REJECTED, "status": 503}, 20),
        ({"outcome": ReplayOutcome.DISCONNECT_BEFORE_FIRST}, 5),
        ({"outcome": ReplayOutcome.TIMEOUT, "error": NO_CONNECTION}, 5),
        ({"outcome": ReplayOutcome.TIMEOUT, "error": "no end after 2 s"}, 20),
        ({"outcome": ReplayOutcome.INTERRUPTED}, None),
        ({"outcome": ReplayOutcome.OK}, None),
    ],
)
def test_a_run_stops_where_none_of_the_first_answers_is_ok(fields, stops_after):
    for most in (0, 30):
        tally = Tally(max_failures=most)
        result = Result(REQUEST, "r.run", 1.0, TimedExchange(sent_s=1.0, end_s=3.0, **fields))
        told = [tally.ended(result) is not None for _ in range(40)]
        if stops_after is None:
            assert not any(told)
        else:
            assert told.index(True) + 1 == max(stops_after, most + 1)


def test_one_answer_that_is_ok_keeps_a_run_going():
    tally = Tally()
    ended(tally, ReplayOutcome.OK)
    refused = TimedExchange(sent_s=1.0, end_s=3.0, outcome=ReplayOutcome.HTTP_ERROR, status=404)
    assert not any(tally.ended(Result(REQUEST, "r", 1.0, refused)) for _ in range(40))
