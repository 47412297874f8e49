"""What the self-benchmark sends: lengths that grow by a factor, batches that fit into the KV."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.profiling.grid import (
    GROWTH_TOKENS,
    LEAST_TOKENS,
    OUTPUT_TOKENS,
    SHARE,
    Grid,
    GridOptions,
    grid_of,
)
from replayer.arguments import InputError


def test_by_hand() -> None:
    """Prompts to 0.9 x 10,000 tokens; contexts to 10,000 - 256, which 9,000 is below.

    0.9 x 40,000 KV tokens hold 93 streams of 128 + 256 tokens, 27 of 1,073 + 256, 3 of 9,256.
    """
    grid = grid_of(GridOptions(4, 3, 64), 10_000, 40_000)
    assert grid.prompts == (128, 528, 2181, 9000)
    assert grid.streams == (
        *((128, 64), (128, 8), (128, 1)),
        *((1073, 27), (1073, 5), (1073, 1)),
        *((9000, 3), (9000, 2), (9000, 1)),
    )


def test_sixteen_and_six_are_usual() -> None:
    grid = grid_of(GridOptions(), 131_072, 450_000)
    assert len(grid.prompts) == 16
    assert len({context for context, _ in grid.streams}) == 6
    assert len(grid.streams) <= 36


def test_the_time_is_that_of_tokens_and_steps() -> None:
    """A cache has a context's smaller batches: 300 + 4 x 100 tokens, and 2 x 2 x 32 steps."""
    grid = Grid((100, 200), ((100, 4), (100, 2)))
    assert grid.expected_s(1000.0, 0.01) == pytest.approx(0.7 + 2 * 2 * OUTPUT_TOKENS * 0.01)


@given(
    st.integers(2, 40),
    st.integers(2, 12),
    st.integers(1, 1000),
    st.integers(600, 1 << 20),
    st.integers(600, 1 << 24),
)
def test_all_of_it_fits(prefill: int, decode: int, seqs: int, length: int, kv_tokens: int) -> None:
    grid = grid_of(GridOptions(prefill, decode, seqs), length, kv_tokens)
    assert 2 <= len(grid.prompts) <= prefill
    assert LEAST_TOKENS == grid.prompts[0] < grid.prompts[-1] <= SHARE * min(length, kv_tokens)
    for context, batch in grid.streams:
        assert LEAST_TOKENS <= context <= length - GROWTH_TOKENS
        assert 1 <= batch <= seqs
        assert batch * (context + GROWTH_TOKENS) <= max(SHARE * kv_tokens, context + GROWTH_TOKENS)


@pytest.mark.parametrize(
    ("length", "kv_tokens", "most"),
    [(400, 10_000, None), (10_000, 400, None), (10_000, 10_000, 255)],
)
def test_an_engine_without_room(length: int, kv_tokens: int, most: int | None) -> None:
    with pytest.raises(InputError, match="contexts must reach 256 tokens: the engine takes"):
        grid_of(GridOptions(max_length=most), length, kv_tokens)
