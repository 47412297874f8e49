"""WARM, MEDIUM, HEAVY by new tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.placement.decision import Size, classify

ORDER = (Size.WARM, Size.MEDIUM, Size.HEAVY)


@pytest.mark.parametrize(
    ("new_tokens", "warm", "heavy", "expected"),
    [
        (0, 1500, 8192, Size.WARM),
        (1499, 1500, 8192, Size.WARM),
        (1500, 1500, 8192, Size.MEDIUM),
        (8191, 1500, 8192, Size.MEDIUM),
        (8192, 1500, 8192, Size.HEAVY),
        (1_000_000, 1500, 8192, Size.HEAVY),
        (99, 100, 100, Size.WARM),
        (100, 100, 100, Size.HEAVY),
        (0, 0, 100, Size.MEDIUM),
        (0, 0, 0, Size.HEAVY),
    ],
)
def test_thresholds_belong_to_the_larger_class(
    new_tokens: int, warm: int, heavy: int, expected: Size
) -> None:
    assert classify(new_tokens, warm, heavy) is expected


@given(*[st.integers(0, 10**6)] * 4)
def test_more_tokens_are_never_a_smaller_class(tokens: int, more: int, warm: int, gap: int) -> None:
    small, large = (classify(n, warm, warm + gap) for n in (tokens, tokens + more))
    assert ORDER.index(small) <= ORDER.index(large)
