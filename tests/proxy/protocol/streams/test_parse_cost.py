"""What is cheap to parse, by its bytes."""

from __future__ import annotations

import pytest

from proxy.protocol.streams.parse_cost import (
    FREE_BYTES,
    MOST_NAMES,
    MOST_OPENING,
    MOST_VALUES,
    is_cheap,
)


@pytest.mark.parametrize(
    ("mark", "most"),
    [(b"[", MOST_OPENING), (b"{", MOST_OPENING), (b":", MOST_NAMES), (b",", MOST_VALUES)],
)
def test_each_mark_has_its_limit(mark: bytes, most: int) -> None:
    assert is_cheap(b" " * FREE_BYTES + mark * most)
    assert not is_cheap(b" " * FREE_BYTES + mark * (most + 1))


def test_a_short_text_is_cheap_and_a_long_one_may_be() -> None:
    assert is_cheap(b"[" * FREE_BYTES)
    assert is_cheap(b"x" * (1 << 20))
