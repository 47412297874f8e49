"""A report that stays the same is believed as long as nothing speaks against it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.accounts.engine_reports import (
    ANSWERS,
    CLIP,
    EARLY,
    ENOUGH,
    FROZEN_S,
    GAIN,
    IN_USE_S,
    OwnRatio,
    ReportHistory,
)


@pytest.mark.parametrize(
    ("seconds", "answers", "is_in_use", "expected"),
    [
        (IN_USE_S, 0, True, True),
        (FROZEN_S, ANSWERS, False, True),
        (FROZEN_S, ANSWERS - 1, False, False),
        (FROZEN_S - 1, 100, True, False),
        (IN_USE_S - 1, 0, True, False),
    ],
)
def test_the_same_for_so_long(
    seconds: float, answers: int, is_in_use: bool, expected: bool
) -> None:
    reports = ReportHistory()
    assert not reports.observe(1, 0.0, answers=5, is_in_use=is_in_use)
    found = reports.observe(1, seconds, answers=5 + answers, is_in_use=is_in_use)
    assert found is reports.is_frozen is expected
    assert not reports.observe(2, seconds + 1, answers=5 + answers, is_in_use=is_in_use)
    assert not reports.is_frozen


@given(st.lists(st.floats(0.25, 64.0), min_size=1, max_size=EARLY))
def test_the_first_reports_are_averaged(ratios: list[float]) -> None:
    own = OwnRatio()
    for ratio in ratios:
        own.observe(ratio)
    assert own.log == pytest.approx(sum(map(math.log, ratios)) / len(ratios))


@given(st.floats(0.25, 64.0), st.floats(0.25, 64.0))
def test_a_later_report_moves_the_ratio_a_little(start: float, ratio: float) -> None:
    own = OwnRatio(start)
    own.observe(ratio)
    moved = own.log - math.log(start)
    assert abs(moved) <= GAIN * CLIP * 1.0001
    assert moved * math.log(ratio / start) >= 0


@pytest.mark.parametrize(
    ("value", "reports", "instances", "is_doubted"),
    [
        (4.0, ENOUGH, 3, False),
        (7.9, ENOUGH, 3, False),
        (8.1, ENOUGH, 3, True),
        (1.9, ENOUGH, 3, True),
        (8.1, ENOUGH - 1, 3, False),
        (64.0, ENOUGH, 2, False),
    ],
)
def test_who_disagrees_is_doubted(
    value: float, reports: int, instances: int, is_doubted: bool
) -> None:
    own = OwnRatio()
    for _ in range(reports):
        own.observe(value)
    assert own.judge(4.0, instances) is is_doubted is own.is_doubted
    assert not own.judge(4.0, instances)
    if is_doubted:
        assert not own.judge(value / 1.7, instances), "not at once"
        assert own.judge(value / 1.5, instances)
        assert not own.is_doubted
