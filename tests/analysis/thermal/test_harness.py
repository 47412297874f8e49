"""The founding document's harness, computed here: its own rows, and fewer hot seconds with ours."""

from dataclasses import replace

import pytest

from analysis.thermal.harness import (
    BASELINE,
    BURST_S,
    CONTROLLED,
    HOT_CELSIUS,
    LEAST_BATCH,
    OURS,
    RECORDED,
    compare_harness,
    no_control,
    run_harness,
)
from proxy.core.thermal.laws import LAWS


def test_its_own_rows_are_what_it_prints() -> None:
    rows = compare_harness()
    for row, recorded in zip(rows[:2], RECORDED, strict=True):
        for name, digits in (("peak_celsius", 2), ("batch", 1), ("p99_ms", 0)):
            assert round(row[name], digits) == recorded[name]
        assert row["above_s"] == recorded["above_s"]
        assert round(row["throughput_tps"]) == recorded["throughput_tps"]


@pytest.mark.parametrize("seed", range(7, 12))
def test_ours_has_fewer_hot_seconds_and_yields_more(seed: int) -> None:
    baseline, own, ours = compare_harness(seed=seed)
    assert ours["above_s"] < min(own["above_s"], 97)
    assert ours["throughput_tps"] > 181
    assert ours["throughput_tps"] > 0.99 * own["throughput_tps"]
    assert baseline["above_s"] > 170


def test_over_ten_minutes_it_is_a_third_of_the_hot_seconds_at_the_same_yield() -> None:
    _baseline, own, ours = compare_harness(seconds=600)
    assert ours["above_s"] < 97 < own["above_s"] / 2
    assert ours["throughput_tps"] > max(181, 0.99 * own["throughput_tps"])
    assert ours["directions"] <= 6


def test_no_batch_is_cool_in_the_burst() -> None:
    for batch in (LEAST_BATCH, 40, 100, 152, 256):
        rows = run_harness(CONTROLLED, lambda *_, batch=batch: batch)
        burst = rows[BURST_S[0] + 5 : BURST_S[1] + 1]
        assert min(row.celsius for row in burst) > HOT_CELSIUS


@pytest.mark.parametrize("law", [*LAWS])
def test_every_law_stays_within_its_bounds(law: str) -> None:
    found = compare_harness(replace(OURS, law=law))[2]
    assert LEAST_BATCH <= found["batch"] <= 256


def test_equal_seeds_give_equal_rows() -> None:
    assert run_harness(BASELINE, no_control, 50) == run_harness(BASELINE, no_control, 50)
