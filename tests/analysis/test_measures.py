"""Percentiles by their definition, and each metric by its formula."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.measures import (
    METRICS,
    grouped,
    in_target_time,
    is_good,
    percentile,
    samples_of,
    spread,
)

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)
ROW = {
    "outcome": "ok",
    "intended_s": 1.0,
    "sent_s": 1.5,
    "first_token_s": 2.5,
    "end_s": 6.5,
    "completion_tokens": 5,
    "itl_s": [0.5, 1.5],
    "phases_s": {"decide": 0.5, "stream": 4.0},
}
EXPECTED = {
    "ttft_s": [1.0],
    "effective_ttft_s": [1.5],
    "tpot_s": [1.0],
    "itl_s": [0.5, 1.5],
    "e2e_s": [5.0],
    "schedule_lag_s": [0.5],
}


@given(values, st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_enough_values_do_not_exceed(numbers, percent):
    ordered = sorted(numbers)
    found = percentile(ordered, percent)
    need = percent / 100 * len(ordered)
    assert sum(number <= found for number in ordered) >= need - 1e-9
    assert sum(number < found for number in ordered) < need


@pytest.mark.parametrize("percent", [1, 50, 90, 95, 99, 100])
@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_percentiles_equal_numpys(percent, size):
    ordered = [float(index * index) for index in range(size)]
    assert percentile(ordered, percent) == np.percentile(ordered, percent, method="inverted_cdf")


def test_groups_keep_the_order_in_which_they_come():
    assert list(grouped([3, 1, 4, 1, 5], lambda n: n % 2).items()) == [(1, [3, 1, 1, 5]), (0, [4])]


@given(values)
def test_a_spread_is_ordered_and_inside_its_values(numbers):
    found = spread(numbers)
    ranks = [found[name] for name in ("p50", "p90", "p95", "p99", "max")]
    assert ranks == sorted(ranks)
    assert set(ranks) <= set(numbers)
    assert found["mean"] == pytest.approx(sum(numbers) / len(numbers))


def test_failures_as_infinity_leave_the_ranks_below_alone():
    found = spread([1.0, 2.0, 3.0, 4.0, math.inf])
    assert (found["p50"], found["p90"], found["mean"]) == (3.0, "inf", "inf")
    names = ("p50", "p90", "mean")
    assert spread([math.inf, 2.0, 1.0], names, infinite=None) == dict.fromkeys(names) | {"p50": 2.0}


def test_nothing_measured_is_null():
    assert spread([]) == {"count": 0} | dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"))
    assert spread([], ("p50", "mean")) == {"p50": None, "mean": None}


@pytest.mark.parametrize("tag", METRICS)
def test_every_metric_follows_its_formula_and_bears_a_row_without_data(tag):
    metric = METRICS[tag]
    assert metric.tag == tag
    assert metric.unit == "s"
    assert metric.formula
    assert list(metric.samples(ROW)) == EXPECTED[tag]
    assert list(metric.samples({"outcome": "skipped"})) == []


@pytest.mark.parametrize("tag", METRICS)
def test_every_metric_but_the_clients_own_follows_the_targets_clock(tag):
    scale = 1.0 if tag == "schedule_lag_s" else 6.0
    scaled = samples_of(tag, in_target_time([ROW], 6.0))
    assert scaled == pytest.approx([value * scale for value in EXPECTED[tag]])
    assert ROW["sent_s"] == 1.5


def test_times_by_name_follow_the_targets_clock_too():
    [scaled] = in_target_time([ROW], 6.0)
    assert scaled["phases_s"] == {"decide": 3.0, "stream": 24.0}


def test_a_clock_that_is_the_clients_changes_no_row():
    unsent = {"outcome": "skipped", "intended_s": None}
    assert in_target_time([ROW, unsent], 1.0) == [ROW, unsent]
    assert in_target_time([unsent], 2.0) == [{**unsent, "time_scale": 2.0}]


@pytest.mark.parametrize("tokens", [None, 0, 1])
def test_tpot_is_undefined_below_two_tokens(tokens):
    assert samples_of("tpot_s", [ROW | {"completion_tokens": tokens}]) == []


@pytest.mark.parametrize(
    ("row", "slo", "good"),
    [
        (ROW, {"ttft": 1.0, "tpot": 1.0}, True),
        (ROW, {"ttft": 0.9}, False),
        (ROW, {"e2e": 4.0}, False),
        (ROW | {"completion_tokens": 1}, {"tpot": 0.1}, True),
        (ROW | {"outcome": "timeout"}, {"ttft": 9.0}, False),
    ],
)
def test_a_good_request_is_ok_and_keeps_every_defined_limit(row, slo, good):
    assert is_good(row, slo) == good
