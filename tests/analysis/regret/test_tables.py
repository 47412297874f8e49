"""Regret in words and tables."""

import pytest

from analysis.regret.tables import explain
from tests.support.regret import Watched


@pytest.mark.long
def test_the_worst_are_told_in_words(watched: Watched) -> None:
    decisions, _run = watched
    one = max(decisions, key=lambda d: d.gap_s)
    text = explain(7, one)
    assert "\n" not in text
    for part in ("seed 7", f"of {one.session_id}", "realised", "Better:", "queue", "Gap"):
        assert part in text
