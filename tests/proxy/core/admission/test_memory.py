"""Memory levels: entered at their marks, left only below them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.admission.memory import MARGIN, MARKS, Level, Watermark


@pytest.mark.parametrize(
    ("percent", "levels"),
    [
        ([91, 92, 95, 98, 100], [0, 1, 2, 3, 3]),
        ([99, 97, 96, 95, 93, 92, 90, 89], [3, 3, 3, 2, 2, 1, 1, 0]),
        ([92, 91, 92, 91, 89], [1, 1, 1, 1, 0]),
        ([99, 50], [3, 0]),
        ([95, 98, 95, 92], [2, 3, 2, 1]),
    ],
)
def test_levels(percent: list[int], levels: list[int]) -> None:
    mark = Watermark(100)
    assert [mark.observe(p) for p in percent] == levels


def test_without_a_limit_nothing_happens() -> None:
    mark = Watermark(None)
    assert mark.observe(1 << 60) is Level.NORMAL
    assert mark.used_bytes == 1 << 60


@given(st.lists(st.integers(0, 1200), min_size=1))
def test_any_history(used: list[int]) -> None:
    """Never below what a use asks for, never kept for one that is clear of its mark."""
    mark = Watermark(1000)
    for value in used:
        before, level = mark.level, mark.observe(value)
        asked = max((lv for lv, at in MARKS.items() if value / 1000 >= at), default=Level.NORMAL)
        assert level >= asked
        if level > asked:
            assert level <= before
            assert value / 1000 >= MARKS[level] - MARGIN
