"""Figures of the page."""

import pandas as pd

from analysis.bench.phases import PHASES
from analysis.report.plots import axis, phase_bars, waterfall
from tests.support.runs import placed, run


def test_every_tick_of_a_log_axis_has_its_number():
    wide = axis(pd.Series([3.0, 700.0, None, 0.0]))
    assert wide["ticktext"] == ["5", "10", "20", "50", "100", "200", "500"]
    assert axis(pd.Series([3.0, 14.0])) == {}
    assert axis(pd.Series([], dtype=float)) == {}


def drawn(figure, bar):
    """One bar: the length of each phase in milliseconds."""
    return {one.name: one.x[one.y.index(bar)] for one in figure.data if one.x[one.y.index(bar)]}


def test_the_phases_of_a_class_are_stacked_to_its_mean():
    slow = {"decide": 0.25, "first_token": 2.75, "stream": 2.0}
    summary = run(placed("a"), placed("b", phases_s=slow), placed("c", "HEAVY_P2P"))
    figure = phase_bars(summary["phases"])
    assert figure.layout.barmode == "stack"
    assert [one.name for one in figure.data] == [name.replace("_", " ") for name in PHASES]
    assert figure.data[0].y == ("HEAVY_P2P (1)", "WARM (2)")  # the first is drawn lowest
    assert drawn(figure, "WARM (2)") == {"decide": 250, "first token": 1750, "stream": 2000}


def test_the_waterfall_has_the_slowest_on_top_and_no_two_in_one_bar():
    summary = run(placed("a"), placed("a", "HEAVY_P2P", phases_s={"prefill_leg": 3, "stream": 1}))
    figure = waterfall(summary["slowest"])
    assert figure.data[0].y == ("a #2", "a #1")
    assert drawn(figure, "a #1") == {"prefill leg": 3000, "stream": 1000}
    assert figure.data[0].customdata == ("WARM, ok", "HEAVY_P2P, ok")
