"""The tables: what there is to win, and a row per policy."""

from __future__ import annotations

import pytest
from rich.console import Console

from analysis.plan.measured import CLAIRVOYANT, UNWARNED
from analysis.plan.tables import by_policy, groups, headroom, headroom_lines, print_plan
from tests.analysis.plan.runs_for_tests import run

RUNS = [
    run(CLAIRVOYANT, 3.0, 0.99, is_best=True),
    run(CLAIRVOYANT, 2.0, 0.80),
    run(UNWARNED, 3.1, 0.70),
    run("static:10", 9.0, 1.0),
    run("static:5", 4.0, 0.995),
    run("static:4", 3.5, 0.90),
    run("founding", 4.5, 0.92, lost_tokens=12_000, broken=0),
]


def test_headroom_is_beside_the_cheapest_fleet_that_keeps_as_much() -> None:
    found = headroom(RUNS)
    assert found is not None
    assert found.fixed is not None
    assert found.fixed.policy == "static:5"
    assert found.saved_ratio == pytest.approx(0.25)
    assert headroom(RUNS[1:]) is None


def test_headroom_is_said_in_a_line() -> None:
    (line,) = headroom_lines(("step", 30.0), RUNS)
    assert line == (
        "headroom of step, start-up 30 s, seed 1: 99.0 % kept costs 4.00 GPU h as static-5, "
        "3.00 GPU h with foresight: 25 %"
    )
    (alone,) = headroom_lines(("step", 0.0), RUNS[:3])
    assert alone.endswith("no fixed fleet keeps as much")
    assert headroom_lines(("step", 0.0), RUNS[3:]) == []


def test_rows_are_the_clairvoyant_the_planners_and_fleets_by_size() -> None:
    found = by_policy(RUNS)
    assert list(found) == [
        *(CLAIRVOYANT, UNWARNED, "founding"),
        *("static:4", "static:5", "static:10"),
    ]
    assert found[CLAIRVOYANT] == [RUNS[0]]


def test_the_table_has_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    said = print_plan([*RUNS, run("founding", 1.0, 0.5, startup_s=0.0)], 2, Console(width=240))
    printed = capsys.readouterr().out
    assert len(said) == 1
    assert printed.index("headroom of step") < printed.index("attainment %")
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.split()}
    assert rows["static-5"][:2] == ["99.5", "95.0"]
    assert "step, start-up 120 s (100 requests)" in printed
    first = next(line.split() for line in printed.splitlines() if " founding" in line)
    assert first[1:8] == ["92.0", "95.0", "92.0", "4.50", "2.25", "1.50", "1.50"]
    assert first[-2:] == ["0", "12"]
    assert list(groups(RUNS)) == [("step", 120.0)]
