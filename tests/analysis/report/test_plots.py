"""Figures of the page."""

import pandas as pd

from analysis.report.plots import axis


def test_every_tick_of_a_log_axis_has_its_number():
    wide = axis(pd.Series([3.0, 700.0, None, 0.0]))
    assert wide["ticktext"] == ["5", "10", "20", "50", "100", "200", "500"]
    assert axis(pd.Series([3.0, 14.0])) == {}
    assert axis(pd.Series([], dtype=float)) == {}
