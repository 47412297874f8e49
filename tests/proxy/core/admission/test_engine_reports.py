"""A report that stays the same is believed as long as nothing speaks against it."""

from __future__ import annotations

import pytest

from proxy.core.admission.engine_reports import ANSWERS, FROZEN_S, IN_USE_S, ReportHistory


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
