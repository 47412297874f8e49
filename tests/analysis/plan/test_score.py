"""Scores, and the frontier of what is known to be reachable."""

from __future__ import annotations

import pytest

from analysis.plan import score
from analysis.plan.measured import CLAIRVOYANT, Run
from tests.analysis.plan.runs_for_tests import run

BEST = run(CLAIRVOYANT, 4.0, 0.99, is_best=True)
KNOWN = [
    BEST,
    run(CLAIRVOYANT, 3.0, 0.90),
    run("static:4", 3.5, 0.80),
    run("static:5", 4.5, 0.995),
]


def reference(*runs: Run) -> score.Reference:
    found = score.Reference.of(runs)
    assert found is not None
    return found


def test_the_frontier_is_what_nothing_cheaper_beats() -> None:
    points = [(3.0, 0.9), (3.5, 0.8), (4.0, 0.99), (4.0, 0.98), (2.0, 0.1), (5.0, 0.99)]
    found = score.frontier(points)
    assert found == [(2.0, 0.1), (3.0, 0.9), (4.0, 0.98), (4.0, 0.99)]
    assert score.at_least(found, 0.9) == 3.0
    assert score.at_least(found, 0.91) == 4.0
    assert score.at_least(found, 0.999) is None


def test_a_point_of_attainment_is_five_percent_of_gpu_hours() -> None:
    found = reference(*KNOWN)
    assert found.score(BEST) == 1.0
    assert found.score(run("rule", 4.4, 0.99)) == pytest.approx(1.10)
    assert found.score(run("rule", 4.0, 0.97)) == pytest.approx(1.10)
    assert found.score(run("rule", 4.0, 1.00)) == 1.0  # more than the clairvoyant earns nothing


def test_a_rule_is_compared_at_its_own_attainment() -> None:
    found = reference(*KNOWN)
    assert found.at_same(run("rule", 6.0, 0.85)) == pytest.approx(2.0)
    assert found.at_same(run("rule", 9.0, 0.995)) == pytest.approx(2.0)  # a fixed fleet does it
    assert found.at_same(run("rule", 9.0, 1.0)) is None
    assert score.Reference.of(KNOWN[1:]) is None
