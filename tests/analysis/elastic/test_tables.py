"""The tables: means over seeds, failures, the founding text's claims beside the measured ones."""

import io
import math
from typing import Any

import pytest
from rich.console import Console

from analysis.elastic.tables import print_experiment, regime, summarise


def _row(rule: str, sessions: int, seed: int = 0, **changes: Any) -> dict[str, Any]:
    times = {"p50": 1.0, "p90": 2.0}
    row = {
        "rule": rule,
        "sessions": sessions,
        "seed": seed,
        "requests": 100,
        "success_ratio": 1.0,
        "goodput_ratio": 0.5,
        "ttft_s": times,
        "ttft_ok_s": times,
        "tpot_s": {"p50": 0.010, "p90": 0.012},
        "e2e_s": times,
        "heavy": 10,
        "heavy_offloaded": 0,
        "heavy_reasons": {"d_idle": 10},
    }
    return {**row, **changes}


def test_rows_are_averaged_over_seeds_and_shares_over_requests() -> None:
    (one,) = summarise(
        [
            _row("always", 8, 0, heavy=30, heavy_offloaded=30, heavy_reasons={}),
            _row("always", 8, 1, ttft_s={"p50": 3.0, "p90": None}, goodput_ratio=None),
        ]
    )
    assert (one["ttft_s.p50"], one["ttft_s.p90"]) == (2.0, math.inf)
    assert math.isnan(one["goodput_ratio"])
    assert math.isnan(one["hit_ratio"])
    assert (one["heavy"], one["offloaded_ratio"]) == (40, 0.75)
    assert one["heavy_reasons"] == {"d_idle": 10}


@pytest.mark.parametrize(
    ("sessions", "claimed"), [(2, "most"), (8, "about half"), (32, "almost none")]
)
def test_the_claimed_share_depends_on_the_load(sessions: int, claimed: str) -> None:
    assert regime(sessions) == claimed


def _printed(*rows: dict[str, Any]) -> str:
    out = io.StringIO()
    print_experiment(rows, Console(file=out, width=300))
    return out.getvalue()


def _cells(printed: str, what: str) -> list[str]:
    line = next(line for line in printed.splitlines() if line.strip().startswith(what))
    return [cell for cell in line.split("  ") if cell.strip()]


def test_claims_are_beside_what_was_measured() -> None:
    lost = {"p50": 0.5, "p90": None}
    heuristic = _row(
        "seed-heuristic", 8, ttft_s=lost, success_ratio=0.75, heavy_offloaded=3, heavy_reasons={}
    )
    printed = _printed(_row("never", 8), heuristic, _row("never", 2))
    assert [c.strip() for c in _cells(printed, "TTFT p50, of the answered")][2:] == [
        *("-49 %", "+0 %", "-")
    ]
    assert "inf %" in printed
    assert [c.strip() for c in _cells(printed, "requests answered")][2:] == ["75 %", "75.0 %", "-"]
    assert "30 % (about half)" in printed
    assert "d_idle 100" in printed


def test_without_the_baseline_nothing_is_relative() -> None:
    printed = _printed(_row("seed-heuristic", 8))
    assert "-/-" in printed
    assert "-49 %" in printed
