"""What is cheap to parse, by its bytes."""

from __future__ import annotations

import pytest

from proxy.protocol.streams.parse_cost import (
    BYTE_NS,
    FREE_BYTES,
    MARKS_NS,
    MOST_NS,
    is_cheap,
    marks,
    parse_ns,
)


@pytest.mark.parametrize(("mark", "each_ns"), MARKS_NS)
def test_each_mark_costs(mark: bytes, each_ns: int) -> None:
    most = (MOST_NS - BYTE_NS * FREE_BYTES) // (each_ns + BYTE_NS)
    assert is_cheap(b" " * FREE_BYTES + mark * most)
    assert not is_cheap(b" " * FREE_BYTES + mark * (most + 1))


def test_what_several_kinds_cost_is_added() -> None:
    text = b'{"a":["b",1]}'
    assert parse_ns(text) == BYTE_NS * len(text) + 4 * 30 + 65 + 80 + 2 * 150


def test_a_text_beyond_the_limit_is_not_counted_to_its_end() -> None:
    assert MOST_NS < parse_ns(b"," * MOST_NS) < 70 * MOST_NS


def test_a_short_text_is_cheap_and_a_long_one_may_be() -> None:
    assert is_cheap(b"[" * FREE_BYTES)
    assert is_cheap(b"x" * (1 << 20))


@pytest.mark.parametrize("one_by_one", [0, 1, 8, 1 << 20])
@pytest.mark.parametrize(
    "raw", [b"", b",", b"a" * 1000, b"a," * 1000, b"a" * 999 + b",", b"," + b"a" * 999]
)
def test_marks_are_counted_however_they_are_found(raw: bytes, one_by_one: int) -> None:
    assert marks(raw, b",", one_by_one) == raw.count(b",")
