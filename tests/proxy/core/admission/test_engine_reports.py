"""A report that stays the same is believed as long as nothing speaks against it."""

from __future__ import annotations

import pytest

from proxy.core.admission.engine_reports import ANSWERS, FROZEN_S, IN_USE_S, Reports


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
    reports = Reports()
    assert not reports.observe("a", 1, 0.0, answers=5, is_in_use=is_in_use)
    found = reports.observe("a", 1, seconds, answers=5 + answers, is_in_use=is_in_use)
    assert found is expected
    assert reports.frozen == ({"a"} if expected else set())
    assert not reports.observe("a", 2, seconds + 1, answers=5 + answers, is_in_use=is_in_use)
    assert not reports.frozen


def test_a_restart_is_another_engine() -> None:
    reports = Reports()
    for now_s in (0.0, IN_USE_S):
        reports.observe("a", 1, now_s, answers=0, is_in_use=True)
    reports.forget("a")
    assert not reports.frozen
    assert not reports.observe("a", 1, IN_USE_S + 1, answers=0, is_in_use=True)
