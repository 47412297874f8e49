"""One policy on one load, and its figures."""

import pytest

from analysis.league.fleet import EngineFleet, engines
from analysis.league.simulate import figures, run_policy, working_set_tokens
from replayer.virtual.arrivals import plan
from replayer.virtual.load import load_source
from replayer.virtual.requests import VirtualRow
from tests.support.league import RULES
from tests.support.traces import SAMPLE


def test_a_context_counts_from_its_request_to_the_next() -> None:
    rows = [
        VirtualRow(0, "a", 50.0, 100, 1, 1, end_s=60.0),
        VirtualRow(1, "a", 75.0, 200, 1, 1, end_s=100.0),
        VirtualRow(2, "b", 0.0, 1000, 1, 1, end_s=40.0),
    ]
    assert working_set_tokens(rows, 100.0) == pytest.approx((25 * 100 + 25 * 200) / 50)


def test_figures_of_a_run() -> None:
    source = load_source(SAMPLE)
    planned = plan(source, RULES)
    fleet = EngineFleet(engines(2, 400_000, source.block_tokens))
    run = run_policy("session-sticky", planned, fleet, source.block_tokens)
    row = figures(run, planned, RULES, fleet.kv_tokens)
    assert row["requests_run"] == len(planned) > row["requests"] > 0
    assert row["failures"] == row["offloads"] == row["moved_bytes"] == row["drift"] == 0
    assert 0.0 < row["hit_ratio"] < 1.0
    assert row["ttft_s"]["p50"] <= row["ttft_s"]["p90"] <= row["ttft_s"]["p99"]
    assert 0.0 <= row["goodput_ratio"] <= 1.0
