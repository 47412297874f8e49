"""The sentences of the tour say what the two runs have shown, also where it is no gain."""

from __future__ import annotations

from typing import Any

import pytest

from replayer.demo.tour import OFFLOAD, ROUTING, gain, price, table


def summary(
    ttft_s: float | None = 1.0,
    itl_s: float = 0.1,
    wait_s: float = 1.0,
    tpot_s: float | None = 0.0118,
) -> dict[str, Any]:
    """The parts of a summary that the tour reads."""
    return {
        "requests": {"ok": 60},
        "ttft_s": {"mean": 0.5, "p90": ttft_s},
        "tpot_s": {"p90": tpot_s},
        "itl_s": {"p50": 0.02, "p99": itl_s},
        "cache": {"engine_hit_ratio": 0.84},
        "by_route_class": {"WARM": {}, "HEAVY_COLO": {"ttft_s": {"p50": wait_s}}},
    }


@pytest.mark.parametrize(
    ("default_s", "says"),
    [
        (0.42, "0.42 of round robin's: sessions stay where their KV is."),
        (1.0, "1.00 of round robin's: in this run the default gains nothing."),
        (1.3, "1.30 of round robin's: in this run the default gains nothing."),
        (None, "TTFT was not measured in both runs."),
    ],
)
def test_the_gain_is_that_of_the_runs(default_s: float | None, says: str) -> None:
    assert gain(summary(1.0), summary(default_s)).splitlines()[0].endswith(says)


@pytest.mark.parametrize(
    ("default_s", "says"),
    [
        (0.0120, "TPOT p90 is 1.20 of round robin's: later tokens come more slowly."),
        (0.01004, "TPOT p90 is 1.00 of round robin's."),
        (0.0090, "TPOT p90 is 0.90 of round robin's."),
        (None, "TPOT was not measured in both runs."),
    ],
)
def test_what_later_tokens_pay_is_said_beside_the_gain(default_s: float | None, says: str) -> None:
    first, second = gain(summary(tpot_s=0.01), summary(0.42, tpot_s=default_s)).splitlines()
    assert first.startswith("   TTFT p90 is 0.42")
    assert second == f"   {says}"


def test_an_offload_has_a_gain_and_a_price() -> None:
    text = price(summary(itl_s=0.4, wait_s=1.0), summary(itl_s=0.1, wait_s=1.3))
    assert "ITL p99 is 0.25 of what it is without;" in text
    assert "TTFT is 1.30 of it" in text


def test_an_offload_that_does_not_help_says_so() -> None:
    assert "in this run they gain nothing" in price(summary(itl_s=0.1), summary(itl_s=0.2))


def test_a_table_has_a_column_per_run() -> None:
    lines = table(("a", "b"), ROUTING, [summary(2.0), summary(None)])
    cells = [line.split() for line in lines]
    assert cells[0] == ["a", "b"]
    assert ["TTFT", "p90,", "ms", "2,000", "-"] in cells
    assert ["prompt", "tokens", "computed,", "%", "16", "16"] in cells
    assert len(table(("a", "b"), OFFLOAD, [summary(), summary()])) == len(OFFLOAD) + 1
