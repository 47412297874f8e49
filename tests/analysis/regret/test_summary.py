"""Regret as a share of what the oracle's run costs."""

import pytest

from analysis.regret.summary import missed, regret_ratios
from tests.support.regret import Watched


def test_regret_is_relative_to_the_oracles_run() -> None:
    assert regret_ratios([12.0, 10.0], [10.0, 10.0]) == pytest.approx([0.2, 0.0])


def test_decisions_are_counted_by_what_would_have_been_better(watched: Watched) -> None:
    decisions, _run = watched
    found = missed(decisions)
    assert sum(kind["decisions"] for kind in found) == sum(d.gap_s > 0 for d in decisions)
