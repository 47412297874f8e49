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
@pytest.mark.parametrize("seconds", [180, 600])
def test_ours_has_fewer_hot_seconds_and_yields_more(seed: int, seconds: int) -> None:
    baseline, own, ours = compare_harness(seconds=seconds, seed=seed)
    assert ours["above_s"] < min(own["above_s"], 97)
    assert ours["throughput_tps"] > max(0.97 * own["throughput_tps"], 181)
    assert ours["directions"] <= 8
    assert baseline["above_s"] > seconds - 10


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
