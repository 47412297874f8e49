"""Pieces that pass as they are: those that say nothing but content, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.protocol.framing import Chunked, wrap
from proxy.protocol.streams.sse import FastPath, Scanner
from tests.proxy.protocol.streams.test_sse import (
    DONE,
    KEEP_ALIVE,
    ROLE,
    TEXT,
    USAGE_CHUNK,
    delta,
    event,
    said,
)
from tests.support.examples import examples

NULL = event(choices=[{"delta": {"content": "w"}}], usage=None)
ERROR = event(error={"message": "x", "code": 500})
PLAIN = [TEXT, ROLE, NULL, delta(content="long " * 700), delta(content="data: [DONE]")]
OTHER = [
    USAGE_CHUNK,
    DONE,
    KEEP_ALIVE,
    ERROR,
    TEXT * 2,
    TEXT.replace(b"\n", b"\r\n"),
    TEXT[:-1],
    TEXT + b"\n",
    b"event: x\n" + TEXT,
    b"data:" + TEXT[6:],
    delta(content="long " * 900),
    event(choices=[], usage={"prompt_tokens": 1}, more={"usage": None}),
]


def ready() -> Scanner:
    """One that has seen content."""
    scanner = Scanner()
    scanner.feed(ROLE + TEXT)
    return scanner


class Owner:
    """Feeds its scanner what the fast path leaves, and opens that again, as a relay does."""

    def __init__(self, mark: int) -> None:
        self.scanner, self.framing, self.mark = Scanner(), Chunked(), mark
        self.written: list[bytes] = []
        self.buffer = memoryview(bytearray(65536))
        self.fast_path = FastPath(self.buffer)
        self.fast_path.rest = self.rest
        nothing: Callable[[], int] = lambda: 0  # noqa: E731
        self.fast_path.serve(self.scanner, self.written.append, nothing, nothing, nothing)

    def rest(self, wire: bytes) -> None:
        body = self.framing.feed(wire)
        self.scanner.feed(body)
        if self.framing.is_whole and body.endswith(b"\n\n") and self.scanner.is_between:
            self.fast_path.open(self.mark)
        else:
            self.fast_path.shut()

    def take(self, wire: bytes) -> bool:
        """Whether the piece was passed on."""
        before = len(self.written)
        self.buffer[: len(wire)] = wire
        self.fast_path.buffer_updated(len(wire))
        return len(self.written) > before


@pytest.mark.parametrize("body", PLAIN, ids=lambda body: repr(body[:60]))
def test_content_is_taken(body: bytes) -> None:
    scanner, fed = ready(), ready()
    assert [bool(scanner.takes(wrap(body))) for _ in range(3)] in ([False, True, True], [True] * 3)
    fed.feed(body * 2)
    if scanner.events == fed.events + 1:
        fed.feed(body)
    assert said(scanner) == said(fed)


@pytest.mark.parametrize("body", OTHER, ids=lambda body: repr(body[:60]))
def test_all_else_is_not(body: bytes) -> None:
    scanner = ready()
    before = said(scanner)
    assert not any(scanner.takes(wrap(body)) for _ in range(3))
    assert said(scanner) == before


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"\r\n",
        b'6\r\ndata: {"',
        b"0" + wrap(TEXT),
        wrap(TEXT)[:-1],
        wrap(TEXT)[1:],
        wrap(TEXT) + b"\n",
        wrap(TEXT)[:-2] + b"\n\n",
        b"7" + wrap(TEXT)[1:],
        wrap(TEXT) + wrap(TEXT),
        wrap(TEXT) + b"0\r\n\r\n",
        wrap(TEXT).replace(b"\r\n", b"\n"),
        b"%x;a\r\n%b\r\n" % (len(TEXT), TEXT),
    ],
)
def test_what_is_not_one_chunk_is_not(wire: bytes) -> None:
    scanner = ready()
    scanner.takes(wrap(TEXT))
    before = said(scanner)
    assert not any(scanner.takes(wire) for _ in range(3))
    assert said(scanner) == before


def test_not_before_content_nor_at_the_mark() -> None:
    owner = Owner(mark=6)
    taken = [owner.take(wrap(piece)) for piece in (ROLE, ROLE, *[TEXT] * 4)]
    assert taken[:3] == [False] * 3, "without content"
    assert taken[4:] == [True, False], "the sixth event is at the mark"
    assert owner.scanner.events == 6


@settings(max_examples=examples(150))
@given(
    st.lists(st.sampled_from([TEXT, TEXT, NULL, *PLAIN, *OTHER, b"data: {"]), max_size=20),
    st.lists(st.integers(0, 1 << 16), max_size=6),
)
def test_taken_or_fed_it_says_the_same(bodies: list[bytes], cuts: list[int]) -> None:
    """Pieces are chunks, or end anywhere."""
    wires = [wrap(body) for body in bodies]
    if cuts and wires:
        wire = b"".join(wires)
        edges = sorted({0, len(wire), *(cut % len(wire) for cut in cuts)})
        wires = [wire[a:b] for a, b in pairwise(edges)]
    owner, fed = Owner(mark=1 << 30), Scanner()
    for wire in wires:
        owner.take(wire)
    fed.feed(b"".join(bodies))
    assert said(owner.scanner) == said(fed)
    if fed.size < 4096:
        assert owner.scanner.error() == fed.error()


def test_an_error_long_ago_is_not_among_the_last_events() -> None:
    scanner = ready()
    scanner.feed(ERROR)
    assert scanner.error() is not None
    while scanner.size < 12_000:
        scanner.takes(wrap(TEXT))
    assert scanner.error() is None


class Receiver:
    """What a fast path serves."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.left: list[bytes] = []
        self.waits = 0
        self.fulls = 0
        self.is_gone = self.refuses = False
        self.buffer = memoryview(bytearray(65536))
        self.scanner = ready()
        self.fast_path = FastPath(self.buffer)
        self.fast_path.rest = self.left.append
        self.fast_path.serve(self.scanner, self.write, lambda: self.waits, self.full, self.gone)
        self.fast_path.open(1 << 30)

    def write(self, data: bytes) -> None:
        if self.refuses:
            raise RuntimeError("closed")
        self.got.append(data)

    def full(self) -> None:
        self.fulls += 1

    def gone(self) -> None:
        self.is_gone = True

    def read(self, data: bytes) -> None:
        self.fast_path.get_buffer(65536)[: len(data)] = data
        self.fast_path.buffer_updated(len(data))


def test_a_fast_path_writes_what_is_content_and_leaves_the_rest() -> None:
    receiver = Receiver()
    receiver.scanner.takes(wrap(TEXT))
    for body in (TEXT, DONE, TEXT):
        receiver.read(wrap(body))
    assert receiver.got == [wrap(TEXT)] * 2
    assert receiver.left == [wrap(DONE)]
    assert receiver.fulls == 0
    receiver.waits = 1
    receiver.read(wrap(TEXT))
    assert (len(receiver.got), receiver.fulls) == (3, 1)
    receiver.refuses = True
    receiver.read(wrap(TEXT))
    assert receiver.is_gone
    for shut in (receiver.fast_path.shut, receiver.fast_path.leave):
        shut()
        receiver.read(wrap(TEXT))
        assert receiver.left.pop() == wrap(TEXT)
        receiver.fast_path.open(1 << 30)
    receiver.read(wrap(TEXT))
    assert receiver.left == [wrap(DONE), wrap(TEXT)], "it cannot be opened once it was left"
