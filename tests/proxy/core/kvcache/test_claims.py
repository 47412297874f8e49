"""Claims of KV events held against answers: when events are believed, and when they are again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.kvcache.claims import BELIEVED_RIGHT, BELIEVED_WRONG, Belief, Claim, Part

SIZE = 16


def claim(*tokens: int, root: int = 0) -> Claim:
    parts = [Part(rank, count, SIZE, 0, None) for rank, count in enumerate(tokens)]
    return Claim("a", parts, root, is_of_ids=True)


@pytest.mark.parametrize(
    ("tokens", "cached", "is_met"),
    [
        ([160], 160, True),
        ([160], 128, True),
        ([160], 127, False),
        ([160], 0, False),
        ([32], 0, None),
        ([33], 1, True),
        ([33], 0, False),
        ([1600], 1440, True),
        ([1600], 1439, False),
        ([1600, 64], 32, True),
        ([1600, 64], 0, False),
    ],
)
def test_what_is_found_meets_the_least_claim_but_for_some_blocks(
    tokens: Sequence[int], cached: int, *, is_met: bool | None
) -> None:
    assert claim(*tokens).is_met(cached) is is_met


def observed(*roots_and_rights: tuple[int, bool]) -> Belief:
    belief = Belief()
    for root, is_right in roots_and_rights:
        belief.observe(root, is_right=is_right)
    return belief


def test_different_prompts_must_be_wrong() -> None:
    wrong = [(root, False) for root in range(BELIEVED_WRONG)]
    assert observed(*wrong).is_lost
    assert not observed(*wrong[1:]).is_lost
    assert not observed(*[(7, False)] * 20).is_lost


def test_as_many_in_a_row_must_be_right() -> None:
    wrong, right = [(root, False) for root in range(BELIEVED_WRONG)], (0, True)
    again = [right] * BELIEVED_RIGHT
    assert observed(*wrong, *again[1:]).is_lost
    assert observed(*wrong, *again[1:], (0, False), *again[1:]).is_lost
    assert observed(*wrong, *again).is_whole


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60))
def test_belief_hangs_on_the_last_observations_only(history: list[tuple[int, bool]]) -> None:
    """Whatever came before: so many wrong prompts end it, and so many right ones give it back."""
    belief = observed(*history)
    for root in range(10, 10 + BELIEVED_WRONG):
        belief.observe(root, is_right=False)
    assert belief.is_lost
    for _ in range(BELIEVED_RIGHT):
        belief.observe(0, is_right=True)
    assert belief.is_whole


@given(st.lists(st.integers(0, 99), max_size=60))
def test_an_engine_that_is_mostly_right_is_believed(roots: list[int]) -> None:
    belief = Belief()
    for root in roots:
        belief.observe(root, is_right=False)
        belief.observe(root, is_right=True)
        assert belief.is_whole
