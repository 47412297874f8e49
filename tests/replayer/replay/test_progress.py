"""The live line shows the tally as it stands when it is drawn."""

import io

from rich.console import Console

from replayer.replay.client import ReplayOutcome, TimedExchange
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
