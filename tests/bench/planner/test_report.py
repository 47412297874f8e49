"""The tables: scores, the frontier, the best setting of each rule."""

from __future__ import annotations

import pytest

from analysis.plan.measured import CLAIRVOYANT
from bench.planner import report
from bench.planner.results import Result
from tests.analysis.plan.runs_for_tests import run

BEST = run(CLAIRVOYANT, 4.0, 0.99, is_best=True)
KNOWN = [
    BEST,
    run(CLAIRVOYANT, 3.0, 0.90),
    run("static:4", 3.5, 0.80),
    run("static:5", 4.5, 0.995),
]


def test_the_best_setting_of_each_rule_is_shown_and_the_best_fleet() -> None:
    runs = [*KNOWN, run("keda", 5.0, 0.99, settings="a"), run("keda", 4.4, 0.985, settings="b")]
    names = [line.name for line in report.lines(runs)]
    assert names == [CLAIRVOYANT, "static:5", "keda b"]


def test_without_a_clairvoyant_attainment_ranks() -> None:
    found = report.lines([run("a", 1.0, 0.5), run("b", 9.0, 0.7)])
    assert [line.name for line in found] == ["b", "a"]
    (grid,) = report.grids(Result([run("a", 1.0, 0.5)], {}))
    row = dict(zip(grid.headers, grid.rows[0], strict=True))
    assert (row["attainment %"], row["score"], row["x clairvoyant"]) == ("50.0", "-", "-")
    assert (row["missed on drained"], row["runs"]) == ("1/3", "1")


def test_each_seed_has_its_own_clairvoyant() -> None:
    runs = [
        run(CLAIRVOYANT, 4.0, 0.99, is_best=True),
        run(CLAIRVOYANT, 2.0, 0.99, is_best=True, seed=2),
        run("rule", 6.0, 0.99),
        run("rule", 4.0, 0.99, seed=2),
    ]
    (line,) = [line for line in report.lines(runs) if line.rule == "rule"]
    assert line.score == pytest.approx((1.5 + 2.0) / 2)
    alone = report.lines([*runs, run("rule", 1.0, 0.99, seed=3)])[0]
    assert alone.rule == "rule"
    assert alone.score is None  # one seed has nothing to be compared with


def test_all_loads_are_summed_up_by_median_and_worst() -> None:
    other = {"load": "ramp"}
    runs = [*KNOWN, run("rule", 4.0, 0.99), run("x", 4.0, 0.99, load="unknown")]
    runs += [run(CLAIRVOYANT, 2.0, 0.9, is_best=True, **other), run("rule", 3.0, 0.9, **other)]
    first, second, third, summary = report.grids(Result(runs, {}))
    assert [grid.title.split(",")[0] for grid in (first, second, third)] == [
        "ramp",
        "step",
        "unknown",
    ]
    rows = {row[0]: row[1:] for row in summary.rows}
    assert rows["rule"] == ["1.25 (1.50)", "94.5 (90.0)", "1.25 (1.50)", "2"]
    assert "x" not in rows


def test_markdown_says_what_is_left_out() -> None:
    text = report.markdown(Result(KNOWN, {"dynamo-latency": "No module named 'aisimulate'"}))
    assert text.startswith("### step, start-up 120 s (100 requests)\n\n| rule (best setting) |")
    assert text.endswith("left out: dynamo-latency: No module named 'aisimulate'")


def test_a_run_is_a_line() -> None:
    line = report.line_of(run("keda", 2.0, 0.9, settings='{"running": 16}'))
    assert line.startswith('[step 1 120 s] keda {"running": 16}')
    assert "90.00 %" in line
