"""The league's verdict in words."""

import math
from typing import Any

import pytest
from rich.console import Console

from analysis.league.verdict import print_verdicts, verdicts


def summary(policy: str, goodput: float, ttft_p90: float, failures: float = 0.0) -> dict[str, Any]:
    figures = {
        "goodput_ratio": goodput,
        "ttft_s.p50": 0.2,
        "ttft_s.p90": ttft_p90,
        "tpot_s.p90": 0.03,
        "makespan_s": 900.0,
        "failures": failures,
    }
    cell = {"regime": "fits", "perturb": "none", "load": 0.8, "policy": policy}
    return cell | {name: (value, value, value) for name, value in figures.items()}


def test_the_verdict_names_the_best_and_what_it_lost(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        summary("cost", 0.6, 2.0),
        summary("session-sticky", 0.5, 4.0),
        summary("consistent-hash", 0.75, math.inf, failures=4.0),
    ]
    (verdict,) = verdicts(rows)
    assert verdict.goodput_gap == pytest.approx(-0.2)
    assert verdict.ttft_gap == 0.0
    assert verdict.against_baseline("ttft_s.p90") == pytest.approx(-0.5)
    print_verdicts(rows, Console(width=220))
    printed = capsys.readouterr().out
    assert "75.0 consistent-hash (4.0 failed)" in printed
    assert "-20.0 %" in printed
    print_verdicts(rows[1:], Console(width=220))
    assert capsys.readouterr().out == ""
