"""A request of a replay and one of a virtual run are told by the same fields and figures."""

from dataclasses import replace
from typing import Any

import pytest

from analysis.bench.finished import (
    Finished,
    goodput_ratio,
    of_row,
    of_virtual,
    summary,
    times,
)
from proxy.core.latency.slo import Slo
from replayer.virtual.requests import VirtualRow

FOUND = Finished(True, 1.0, 0.25, 2.0, "HEAVY_P2P", "p_idle_d_busy")
LOST = Finished(False, None, None, None, "HEAVY_P2P", "p_idle_d_busy")
SAID = {"route_class": "HEAVY_P2P", "offload_decision_reason": "p_idle_d_busy"}
ROW = {"outcome": "ok", "sent_s": 1.0, "first_token_s": 2.0, "end_s": 3.0, "completion_tokens": 5}


def _virtual(**changed: Any) -> VirtualRow:
    row = VirtualRow(0, "s", 1.0, 100, 5, 100, ttft_s=1.0, end_s=3.0)
    row.route_class, row.reason = FOUND.route_class, FOUND.reason
    for name, value in changed.items():
        setattr(row, name, value)
    return row


def test_a_row_and_a_virtual_request_become_the_same() -> None:
    assert of_row(ROW | SAID) == FOUND
    kept = of_virtual(_virtual(), Slo(tpot_s=0.25))
    assert kept == replace(FOUND, keeps_slo=True)
    assert of_virtual(_virtual(), Slo(tpot_s=0.2)).keeps_slo is False


def test_one_that_was_cut_has_no_times() -> None:
    assert of_row(ROW | SAID | {"outcome": "disconnect_mid"}) == LOST
    cut = of_virtual(_virtual(outcome="failed", end_s=None), Slo())
    assert (cut.ok, cut.ttft_s, cut.e2e_s, cut.keeps_slo) == (False, None, None, False)


def test_a_row_without_the_proxys_record_has_no_class() -> None:
    assert of_row({"outcome": "skipped"}) == Finished(False, None, None, None, "", "")


@pytest.mark.parametrize(
    ("answered", "told"),
    [
        (False, {"p50": 1.0, "p90": None, "mean": None}),
        (True, {"p50": 1.0, "p90": 1.0, "mean": 1.0}),
    ],
)
def test_a_failed_request_is_infinitely_late_or_left_out(
    answered: bool, told: dict[str, Any]
) -> None:
    assert times([FOUND, LOST], "ttft_s", "p50", "p90", "mean", answered=answered) == told
    assert times([], "ttft_s", "p50", answered=answered) == {"p50": None}


def test_means_are_plain_sums() -> None:
    assert summary([0.1] * 10, "mean") == {"mean": sum([0.1] * 10) / 10}


def test_goodput_is_of_those_that_were_judged() -> None:
    judged = [of_virtual(_virtual(), Slo(tpot_s=limit)) for limit in (0.25, 0.2)]
    assert goodput_ratio([*judged, FOUND]) == 0.5
    assert goodput_ratio([FOUND]) is None
