"""Means over seeds with their intervals, relative changes."""

import math

from analysis.bench.stats import cells, change, figure, mean_and_interval


def test_a_figure_that_a_failure_decides_is_infinite_and_one_that_is_not_there_absent() -> None:
    row = {"ttft_s": {"p50": 2, "p90": None}, "hit_ratio": None, "requests": 3}
    assert [figure(row, name) for name in ("requests", "ttft_s.p50")] == [3.0, 2.0]
    assert figure(row, "ttft_s.p90") == math.inf
    assert math.isnan(figure(row, "hit_ratio"))
    assert math.isnan(figure(row, "tpot_s.p90"))
    assert figure(row, "hit_ratio", math.inf) == math.inf


def test_rows_of_a_cell_are_told_by_name() -> None:
    rows = [{"load": load, "policy": policy} for policy in ("cost", "hash") for load in (1, 2)]
    assert cells(rows, ("load",), "policy") == [
        {"cost": rows[0], "hash": rows[2]},
        {"cost": rows[1], "hash": rows[3]},
    ]


def test_the_mean_over_seeds_has_an_interval() -> None:
    mean, low, high = mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert 1.0 <= low < mean < high <= 3.0
    assert mean_and_interval([1.0, math.inf]) == (math.inf, 1.0, math.inf)


def test_what_is_infinite_in_both_is_equal() -> None:
    assert change(1.5, 1.0) == 0.5
    assert change(math.inf, math.inf) == 0.0
    assert change(math.inf, 1.0) == math.inf
    assert change(1.0, math.inf) == -math.inf
    assert change(1.0, 0.0) == 0.0
