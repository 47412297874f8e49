"""Ratios of paired runs, their intervals, and what is met."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.routing.measured import Answered
from bench.routing.report.verdict import (
    MAKESPAN,
    TTFT_MEAN,
    TTFT_P90,
    best_rival,
    gross_faults,
    ratio,
    verdicts,
)
from tests.bench.routing.runs_for_tests import result, run

OTHER = Answered("another", ttft_s=5.0, tpot_s=0.01, prompt_tokens=10, cached_tokens=0)
TIMES = st.lists(st.floats(0.01, 100.0), min_size=2, max_size=12)


@settings(max_examples=25)
@given(TIMES, st.sampled_from([0.25, 1.0, 3.0]), st.integers(1, 3))
def test_who_takes_k_times_as_long_for_each_request_has_the_ratio_k(
    ttft_s: list[float], factor: float, seeds: int
) -> None:
    ours = [run("cache-proxy", n, [factor * one for one in ttft_s], "gauges") for n in range(seeds)]
    theirs = [run("dynamo-kv", n, ttft_s) for n in range(seeds)]
    for figure in (TTFT_MEAN, TTFT_P90, MAKESPAN):
        found = ratio(figure, ours, theirs, draws=20)
        assert found is not None
        assert (found.middle, found.low, found.high) == pytest.approx((factor,) * 3)
        assert found.together == pytest.approx((factor,) * 3)
        assert found.seeds == seeds


def test_only_seeds_that_both_have_are_compared() -> None:
    ours = [run("cache-proxy", n, [1.0, 1.0], "gauges") for n in (1, 2)]
    found = ratio(TTFT_MEAN, ours, [run("dynamo-kv", 2, [2.0, 2.0])])
    assert found is not None
    assert (found.middle, found.seeds) == (0.5, 1)
    assert ratio(TTFT_MEAN, ours, [run("dynamo-kv", 3, [2.0, 2.0])]) is None


def test_a_seed_in_which_the_rival_is_far_behind_counts_over_all_requests() -> None:
    """A little slower in two of three seeds, and much quicker in one: the median is of the two."""
    ours = [run("cache-proxy", n, [1.1] * 20, "gauges") for n in range(3)]
    theirs = [run("dynamo-kv", n, [3.0 if n == 2 else 1.0] * 20) for n in range(3)]
    for figure, all_requests in ((TTFT_MEAN, 3.3 / 5.0), (TTFT_P90, 1.1 / 3.0)):
        found = ratio(figure, ours, theirs, draws=20)
        assert found is not None
        assert (found.middle, found.together[0]) == pytest.approx((1.1, all_requests))


def test_runs_that_share_no_session_are_compared_as_wholes() -> None:
    ours = replace(run("cache-proxy", 1, [1.0, 3.0], "gauges"), answered=(OTHER,))
    found = ratio(TTFT_MEAN, [ours], [run("dynamo-kv", 1, [1.0, 1.0])], draws=2)
    assert found is not None
    assert (found.middle, found.together) == (5.0, (5.0, 5.0, 5.0))


def test_an_interval_is_about_the_sessions() -> None:
    """One session in which ours is slow: the ratio is 1 or more, and its interval says so."""
    ours = [run("cache-proxy", 1, [1.0] * 18 + [9.0] * 2, "gauges")]
    found = ratio(TTFT_MEAN, ours, [run("dynamo-kv", 1, [1.0] * 20)])
    assert found is not None
    assert found.low == 1.0 < found.middle < found.high


def test_the_best_rival_is_that_of_the_figure() -> None:
    runs = [
        *(run("dynamo-kv", n, [1.0, 1.0, 1.0, 9.0]) for n in (1, 2)),
        *(run("dynamo-kv-affinity", n, [4.0, 4.0, 4.0, 4.0]) for n in (1, 2)),
        run("cache-proxy", 1, [0.1, 0.1], "gauges"),
        run("alone", 1, [0.1, 0.1], is_bound=True),
    ]
    assert best_rival(runs, TTFT_MEAN)[0] == "dynamo-kv"
    assert best_rival(runs, TTFT_P90)[0] == "dynamo-kv-affinity"
    assert best_rival([], TTFT_MEAN) == ("", [])


@pytest.mark.long
def test_the_targets_of_a_load() -> None:
    made = result(
        run("dynamo-kv", 1, [1.0, 1.0]),
        run("cache-proxy", 1, [0.9, 0.9], "gauges"),
        run("cache-proxy", 1, [1.1, 1.1], "plain"),
        run("dynamo-kv", 1, [1.0, 1.0], load="high"),
        run("cache-proxy", 1, [0.9, 0.9], "gauges", load="high"),
    )
    found = {(v.load, v.target.figure.name, v.target.mode): v for v in verdicts(made)}
    assert found["low", "TTFT mean", "gauges"].is_met
    assert found["high", "TTFT mean", "gauges"].is_met is False
    assert found["low", "TTFT p90", "gauges"].is_met
    plain = found["low", "TTFT mean", "plain"]
    assert (plain.against, plain.is_met) == ("cache-proxy gauges", False)
    assert ("high", "TTFT mean", "plain") not in found
    assert ("low", "TTFT mean", "events") not in found


def test_a_run_that_failed_is_no_figure() -> None:
    made = result(
        run("dynamo-kv", 1, [], fault="mocker0 ended"),
        run("cache-proxy", 1, [0.9, 0.9], "gauges"),
    )
    assert all(verdict.is_met is None for verdict in verdicts(made))


def test_what_is_wrong_by_an_order_of_magnitude_is_said() -> None:
    good = run("cache-proxy", 1, [1.9, 1.9], "gauges")
    bad = run("cache-proxy", 1, [2.1, 2.1], "gauges")
    rival = run("dynamo-kv", 1, [1.0, 1.0])
    assert not list(gross_faults(result(rival, good)))
    [said] = gross_faults(result(rival, bad))
    assert said == (
        "4x262k low, cache-proxy gauges: mean TTFT 2.1, more than 2 times that of dynamo-kv"
    )
