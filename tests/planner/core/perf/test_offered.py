"""Offered work: rates over windows, lengths that stay, work by the size of what ended."""

from __future__ import annotations

import pytest

from planner.core.perf.capacity import Demand
from planner.core.perf.offered import LENGTHS_S, Offered, marginal_s
from planner.core.types import Traffic
from tests.planner.core.perf.test_capacity import line

LINE = line(0.01, 1e-4, 1e-7)


def told(requests: float, isl: float = 1000.0, ended: float = 10.0) -> Traffic:
    return Traffic(5.0, requests, isl, 100.0, 0.5, ended=ended)


def test_work_by_hand() -> None:
    """500 new tokens take 0.05 s; 100 steps over 1,050 tokens of KV take 0.0105 s."""
    assert marginal_s(LINE, Demand(9.0, 1000.0, 100.0, 0.5)) == pytest.approx(0.0605)
    half = Demand(9.0, 1000.0, 100.0, 0.5, accept_length=2.0)
    assert marginal_s(LINE, half) == pytest.approx(0.05525)


def test_a_rate_is_of_its_window() -> None:
    offered = Offered()
    for tick, requests in enumerate((50, 50, 10, 20), 1):
        offered.add(5.0 * tick, told(requests))
    assert offered.rate(10.0) == pytest.approx(3.0)
    assert offered.rate(60.0) == pytest.approx(6.5), "as long as it has been"


def test_what_ended_counts_by_its_size() -> None:
    offered = Offered()
    offered.add(5.0, told(10, 1000.0, ended=10))
    offered.add(10.0, told(10, 3000.0, ended=30))
    typical = offered.typical()
    assert typical == Demand(1.0, 2500.0, 100.0, 0.5)
    assert typical is not None
    alike = offered.ended_rate(10.0, LINE, typical)
    assert alike == pytest.approx(4.0), "40 ended in 10 s, with these lengths in the mean"
    by_hand = 30 * (0.15 + 100 * 3050e-7) / (0.125 + 100 * 2550e-7) / 5
    assert offered.ended_rate(5.0, LINE, typical) == pytest.approx(by_hand)
    assert offered.ended_rate(5.0, LINE, Demand(1.0, 0.0, 0.0)) == 0.0


def test_silence_keeps_lengths_and_forgets_rates() -> None:
    offered = Offered()
    offered.add(5.0, Traffic(5.0, 3.0))
    assert offered.typical() is None, "nothing has ended yet"
    offered.add(10.0, told(10))
    later_s = 10.0 + 2 * LENGTHS_S
    offered.add(later_s, Traffic(5.0, 0.0))
    assert offered.typical() == Demand(1.0, 1000.0, 100.0, 0.5)
    assert offered.rate(LENGTHS_S) == 0.0
