"""Where a body ends, however its bytes are cut; and what is no body is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol.framing import (
    SMALL_CHUNKS,
    Chunked,
    FramingError,
    Length,
    SmallChunksError,
    UntilClose,
    wrap,
)

END = b"0\r\n\r\n"
TRAILED = b"000;last\r\nX-Sum: 1\r\nY: \r\n\r\n"
datas = st.lists(
    st.one_of(st.binary(min_size=1, max_size=40), st.just(b"\n" * 300), st.just(b"0\r\n\r\n")),
    max_size=6,
)
size_lines = st.sampled_from(["%x\r\n", "%X\r\n", "00%x\r\n", "%x;a=b\r\n", "%x \t;ext\r\n"])


def cut(wire: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cuts), len(wire)]
    return [wire[a:b] for a, b in pairwise(edges) if a < b]


def chunked(bodies: list[bytes], lines: list[str], end: bytes) -> bytes:
    sizes = [lines[i % len(lines)] % len(b) for i, b in enumerate(bodies)]
    return b"".join(s.encode() + b + b"\r\n" for s, b in zip(sizes, bodies, strict=True)) + end


@given(
    datas,
    st.lists(size_lines, min_size=1, max_size=3),
    st.sampled_from([END, TRAILED]),
    st.binary(max_size=5),
    st.lists(st.integers(0, 2000), max_size=12),
)
def test_chunks_in_any_segmentation(
    bodies: list[bytes], lines: list[str], end: bytes, excess: bytes, cuts: list[int]
) -> None:
    """The body is the same, end and excess are found to the byte, and what is whole is whole."""
    wire = chunked(bodies, lines, end)
    framing, got, seen = Chunked(), b"", 0
    for piece in cut(wire + excess, cuts):
        body = framing.feed(piece)
        got += body
        seen += len(piece)
        if framing.is_whole:
            alone = Chunked()
            assert alone.feed(piece) == body
            assert (alone.is_whole, alone.feed(END), alone.is_done) == (True, b"", True)
        if framing.is_done:
            assert seen - len(piece) + framing.end == len(wire)
            break
    assert framing.is_done
    assert got == b"".join(bodies)


@given(st.binary(max_size=50), st.integers(0, 50), st.lists(st.integers(0, 80), max_size=5))
def test_a_length_in_any_segmentation(wire: bytes, length: int, cuts: list[int]) -> None:
    framing, got, seen = Length(length), b"", 0
    for piece in cut(wire, cuts):
        got += framing.feed(piece)
        seen += len(piece)
        if framing.is_done:
            assert not length or seen - len(piece) + framing.end == length
            break
    assert got == wire[:length]
    assert framing.is_done == (len(wire) >= length)


def test_until_close_takes_everything() -> None:
    framing = UntilClose()
    assert framing.feed(b"0\r\n\r\n") == b"0\r\n\r\n"
    assert framing.is_whole
    assert not framing.is_done


@pytest.mark.parametrize(
    "wire",
    [
        b"\r\n",
        b"x\r\n",
        b"-1\r\n",
        b"+1\r\na\r\n",
        b"0x1\r\na\r\n",
        b"1_0\r\n",
        b" 1\r\na\r\n",
        b"1\na\r\n",
        b"1\r\nab\r\n",
        b"1\r\na\n",
        b"1;a\rb\r\na\r\n",
        b"f" * 16 + b"\r\n",
        b"1;" + b"a" * 300,
        b"0\r\nno colon\r\n\r\n",
        b"0\r\n: no name\r\n\r\n",
        b"0\r\nA: b\rc\r\n\r\n",
        b"0\r\nA: b\n\r\n",
        b"0\r\nA: " + b"b" * 9000,
        b"0\r\n" + b"A: b\r\n" * 2000 + b"\r\n",
    ],
)
def test_what_are_no_chunks(wire: bytes) -> None:
    for size in (len(wire), 1, 7):
        with pytest.raises(FramingError):
            feed(wire, size)


def feed(wire: bytes, size: int) -> None:
    framing = Chunked()
    for at in range(0, len(wire), size):
        framing.feed(wire[at : at + size])


def test_a_size_line_seen_before_is_still_checked() -> None:
    Chunked().feed(wrap(b"abc"))
    for bad in (b"3\rXabc\r\n", b"3\r\nabcXX", b"3\rabc\r\n\r\n"):
        with pytest.raises(FramingError):
            Chunked().feed(bad)


@pytest.mark.parametrize("size", [4, 7 * 6, SMALL_CHUNKS * 7])
def test_small_chunks_have_an_end_in_any_segmentation(size: int) -> None:
    """But for pieces of one chunk: each is a read, which costs its sender as much."""
    wire, framing = b"1\r\na\r\n" * SMALL_CHUNKS * 2, Chunked()
    pieces = [wire[at : at + size] for at in range(0, len(wire), size)]
    few = len(wire) // 3 // size
    assert b"".join(map(framing.feed, pieces[:few])).strip(b"a") == b""
    with pytest.raises(SmallChunksError):
        list(map(framing.feed, pieces[few:]))


def test_larger_chunks_make_up_for_small_ones() -> None:
    framing = Chunked()
    for _ in range(3):
        framing.feed(b"1\r\na\r\n" * (SMALL_CHUNKS - SMALL_CHUNKS // 16))
        framing.feed(wrap(b"a" * (1 << 20)) * 2)
    framing.feed(END)
    assert framing.is_done
