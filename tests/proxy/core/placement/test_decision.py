"""WARM, MEDIUM, HEAVY by new tokens; why D was chosen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.placement.decision import Size, classify, place_of
from proxy.core.types import Place
from tests.support.scenes import candidate, scene_of

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


@pytest.mark.parametrize(
    ("hits", "home", "chosen", "place"),
    [
        ((900, 0), "i0", 0, Place.HOME),
        ((900, 0), "i0", 1, Place.HOME_LEFT),
        ((900, 0), "gone", 0, Place.HOME_AWAY),
        ((900, 0), None, 0, Place.PREFIX),
        ((900, 0), None, 1, Place.LOAD),
        ((900, 900), None, 0, Place.LOAD),
        ((0, 0), None, 1, Place.LOAD),
        ((900,), None, 0, Place.ONLY),
        ((900,), "i0", 0, Place.HOME),
    ],
)
def test_why_an_instance_was_chosen(
    hits: tuple[int, ...], home: str | None, chosen: int, place: Place
) -> None:
    """What all have decides nothing, and a home is named before all else."""
    free = [candidate(f"i{n}", hit) for n, hit in enumerate(hits)]
    assert place_of(scene_of(*free, home=home), free[chosen]) is place


def test_a_holder_is_no_choice() -> None:
    view = scene_of(candidate("i0"), home="i0")
    view.facts.holder = "i0"
    assert place_of(view, view.free[0]) is Place.HOLDER
