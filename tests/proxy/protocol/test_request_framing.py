"""Where a client's messages begin and end, and what their heads may say."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol.framing import (
    CHUNK_BYTES,
    FramingError,
    SmallChunksError,
    wrap,
)
from proxy.protocol.request_framing import (
    FIRST_CHUNKS,
    MORE_CHUNKS,
    RequestFraming,
    is_authority,
    is_line,
    is_target,
)

LAST = b"0\r\n\r\n"
BODIES = st.binary(max_size=40)
HEAD = b"POST /x HTTP/1.1\r\nHost: a\r\n\r\n"


@st.composite
def messages(draw):
    """(wire bytes, length or None for chunked) of one message."""
    body = draw(BODIES)
    if draw(st.booleans()):
        return HEAD + body, len(body)
    cut = draw(st.integers(0, len(body)))
    pieces = [part for part in (body[:cut], body[cut:]) if part]
    return HEAD + b"".join(map(wrap, pieces)) + b"0\r\n\r\n", None


@given(st.lists(messages(), max_size=5), st.lists(st.integers(0, 400), max_size=12))
def test_every_message_is_found_in_every_segmentation(sent, cuts):
    wire = b"".join(data for data, _ in sent)
    edges = sorted({0, len(wire), *(min(c, len(wire)) for c in cuts)})
    bounds, waiting = RequestFraming(), [length for _, length in sent]
    for start, stop in pairwise(edges):
        bounds.feed(wire[start:stop])
        while waiting and (head := bounds.head()) is not None:
            assert head == HEAD
            bounds.body(waiting.pop(0))
    assert not waiting
    assert bounds.is_between


@given(st.lists(st.binary(max_size=30), max_size=20), st.sampled_from([None, 0, 3]))
def test_any_bytes_are_followed_or_refused(pieces, length):
    bounds = RequestFraming()
    try:
        for piece in pieces:
            bounds.feed(piece)
            if bounds.head() is not None:
                bounds.body(length)
    except FramingError:
        pass
    assert bounds.left >= 0


def asked(bounds: RequestFraming, body: bytes) -> None:
    """A chunked request has come."""
    bounds.feed(HEAD + body)
    assert bounds.head() == HEAD
    bounds.body(None)


def test_chunks_of_a_connection_are_counted_over_its_requests() -> None:
    third = b"1\r\na\r\n" * (FIRST_CHUNKS // 3) + LAST
    bounds = RequestFraming()
    asked(bounds, third)
    asked(bounds, third)
    with pytest.raises(SmallChunksError):
        asked(bounds, third)


def test_large_chunks_have_no_such_end() -> None:
    bounds = RequestFraming()
    asked(bounds, wrap(b"a" * (CHUNK_BYTES + len(b"80\r\n"))) * FIRST_CHUNKS * 3 + LAST)
    assert bounds.is_between


def test_a_connection_may_have_any_number_of_requests_in_a_few_chunks() -> None:
    bounds = RequestFraming()
    for _ in range(FIRST_CHUNKS):
        asked(bounds, wrap(b"a") * (MORE_CHUNKS - 1) + LAST)


@given(st.text(max_size=20) | st.text("a1.:[]-", max_size=12))
def test_an_authority_is_decided_for_any_text(host):
    if is_authority(host) and host:
        assert not set(host) & set(" \t\r\n,/@?#\\<>\"'%")
        name, _, port = host.rpartition(":")
        if name and not host.endswith("]"):
            assert port == "" or int(port) <= 65535


@given(st.text(max_size=30))
def test_a_target_is_printable_ascii(target):
    if is_target("/" + target):
        assert all("!" <= char <= "~" and char not in "#\\" for char in target)


def test_a_line_has_two_blanks():
    assert is_line(b"GET / HTTP/1.1\r\nA: b c d\r\n")
    assert not is_line(b"GET  / HTTP/1.1\r\n")
    assert not is_line(b"GET /\r\n")
