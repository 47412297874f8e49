"""Published blocks against a naive set, prompts of ids found in them, their bounds and memory."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from proxy.core.kvcache.published import CacheEvent, Cleared, PublishedBlocks, Removed, Stored
from proxy.core.kvcache.published_index import BYTES_PER_BLOCK, PublishedIndex
from proxy.core.types import UNIT_TOKENS, RequestFacts

SIZE = 2 * UNIT_TOKENS
"""Tokens per block: two units each."""
paths = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def name(path: Sequence[int]) -> int:
    """An engine's name of a block, for the whole way to it."""
    return hash(("engine", *path))


def unit(path: Sequence[int], half: int = 1) -> int:
    """The key of a block's half, for the whole way to it."""
    return hash(("unit", half, *path))


def stored(path: Sequence[int], start: int = 0) -> tuple[Stored, list[int]]:
    """A prompt's blocks from `start` on, and their keys."""
    ways = [path[: i + 1] for i in range(start, len(path))]
    parent = name(path[:start]) if start else None
    return Stored([name(way) for way in ways], parent, SIZE), [unit(way) for way in ways]


def facts(path: Sequence[int], more_tokens: int = 1, model: str = "m") -> RequestFacts:
    """A prompt of these blocks, and a rest."""
    units = [unit(path[: i + 1], half) for i in range(len(path)) for half in (0, 1)]
    tokens = len(path) * SIZE + more_tokens
    return RequestFacts(model, None, tokens, (), 256.0, units=units)


class Naive:
    """Copies per block; a hit is what is there, one block after the other."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[int, ...]] = Counter()

    def hit(self, path: Sequence[int]) -> int:
        ways = [tuple(path[: i + 1]) for i in range(len(path))]
        return next((i for i, way in enumerate(ways) if not self.copies[way]), len(path))


class Published(RuleBasedStateMachine):
    """Any events in any order, also ones that no engine would send."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.naive = PublishedBlocks(), Naive()
        self.blocks.renew(is_whole=True)

    @rule(path=paths, data=st.data())
    def store(self, path: list[int], data: st.DataObject) -> None:
        """A prompt whose first blocks are there; an engine stores the rest."""
        start = data.draw(st.integers(0, self.naive.hit(path[:-1])))
        event, keys = stored(path, start)
        self.blocks.apply(event, keys)
        for end in range(start + 1, len(path) + 1):
            self.naive.copies[tuple(path[:end])] += 1

    @rule(path=paths)
    def remove(self, path: list[int]) -> None:
        self.blocks.apply(Removed([name(path)]))
        if self.naive.copies[tuple(path)]:
            self.naive.copies[tuple(path)] -= 1

    @rule()
    def clear(self) -> None:
        self.blocks.apply(Cleared())
        self.naive.copies.clear()

    @rule(path=paths)
    def look(self, path: list[int]) -> None:
        assert self.blocks.held_of_ids(facts(path)) == self.naive.hit(path) * SIZE
        less = min(self.naive.hit(path), len(path) - 1)
        assert self.blocks.held_of_ids(facts(path, 0)) == less * SIZE  # one token is computed

    @invariant()
    def the_same_blocks(self) -> None:
        there = {way for way, count in self.naive.copies.items() if count}
        assert len(self.blocks) == len(there)
        assert all(name(way) in self.blocks for way in there)
        assert self.blocks.copies == sum(self.naive.copies.values())
        lacking = any(len(way) > 1 and way[:-1] not in there for way in there)
        assert self.blocks.has_orphans == lacking


TestPublished = Published.TestCase
TestPublished.settings = settings(max_examples=40, stateful_step_count=25)


def applied(*events: CacheEvent, is_whole: bool = True) -> PublishedBlocks:
    blocks = PublishedBlocks()
    blocks.renew(is_whole=is_whole)
    for event in events:
        blocks.apply(event)
    return blocks


def test_a_set_that_is_not_whole_says_what_it_knows() -> None:
    """What it does not have may be there all the same."""
    event, keys = stored([1, 2])
    blocks = applied(is_whole=False)
    blocks.apply(event, keys)
    assert blocks.held_of_ids(facts([1, 2, 3])) == 2 * SIZE
    assert blocks.held_of_ids(facts([3])) is None
    blocks.apply(Cleared())
    assert blocks.held_of_ids(facts([1])) == 0


def test_blocks_behind_unknown_ones_are_counted_and_never_found() -> None:
    event, _ = stored([1, 2, 3], start=1)
    blocks = applied(event)
    assert (len(blocks), blocks.has_orphans) == (2, True)
    assert blocks.held_of_ids(facts([1, 2, 3])) == 0


def test_one_kv_cache_group_decides() -> None:
    """The first that keeps all tokens; one with a window forgets what still is a hit."""
    windowed = Stored([1], None, SIZE, group=0, is_full=False)
    full = Stored([2], None, SIZE, group=1)
    other = Stored([3], None, SIZE, group=2)
    blocks = applied(windowed, full, other, Removed([2], group=0))
    assert (len(blocks), blocks.skipped_events) == (1, 3)
    assert 2 in blocks


def test_blocks_of_another_size_are_left_out() -> None:
    blocks = applied(Stored([1], None, SIZE), Stored([2], 1, SIZE // 2))
    assert (len(blocks), blocks.skipped_events) == (1, 1)


@pytest.mark.parametrize(("size", "whole"), [(24, True), (8, True), (24, False)])
def test_blocks_that_are_no_multiple_of_a_unit_are_not_found(size: int, *, whole: bool) -> None:
    blocks = applied(Stored([1], None, size), is_whole=whole)
    assert blocks.held_of_ids(facts([1])) is None


def test_an_adapters_blocks_are_its_own() -> None:
    mark = 12345
    blocks = applied()
    event, keys = stored([1])
    blocks.apply(Stored(event.hashes, None, SIZE, lora="ad", mark=mark), [k ^ mark for k in keys])
    assert blocks.held_of_ids(facts([1], model="ad")) == SIZE
    assert blocks.held_of_ids(facts([1])) == 0


def test_hits_of_all_instances() -> None:
    """Those whose events come; of several ranks the best."""
    index = PublishedIndex(1 << 20)
    for instance, rank, path in (("a", 0, [1]), ("a", 1, [1, 2]), ("b", 0, [1]), ("c", 0, [1])):
        blocks = index.open(instance, rank)
        blocks.renew(is_whole=True)
        event, keys = stored(path)
        blocks.apply(event, keys)
        blocks.is_live = instance != "c"
    assert index.hits(facts([1, 2, 3])) == {"a": 2 * SIZE, "b": SIZE}
    assert index.hits(facts([3])) == {"a": 0, "b": 0}
    assert index.hits(RequestFacts("m", None, 100, [1], 256.0)) == {}
    index.close("b", 0, PublishedBlocks())
    assert "b" in index.all()
    index.close("b", 0, index.ranks("b")[0])
    assert index.hits(facts([3])) == {"a": 0}


def test_the_largest_set_is_given_up_when_there_are_too_many_blocks() -> None:
    index = PublishedIndex(10 * BYTES_PER_BLOCK)
    small, large = index.open("small", 0), index.open("large", 0)
    small.apply(Stored([1, 2, 3], None, SIZE))
    large.apply(Stored(list(range(10, 17)), None, SIZE))
    assert index.bound() is None
    large.apply(Stored([17], 16, SIZE))
    assert index.bound() == "large"
    large.apply(Stored([18], 17, SIZE))
    assert (len(index), large.is_over, large.is_whole) == (3, True, False)
    large.apply(Cleared())
    assert not large.is_whole


def test_of_an_engine_with_many_ranks_all_of_them_count() -> None:
    """No set of it is the largest, and no engine of one rank pays for it."""
    index = PublishedIndex(40 * BYTES_PER_BLOCK)
    for name in ("a", "b"):
        index.open(name, 0).apply(Stored(list(range(8)), None, SIZE))
    for rank in range(16):
        index.open("many", rank).apply(Stored([rank, 100 + rank], None, SIZE))
        assert index.bound() in (None, "many")
    assert len(index) <= 40
    assert not any(index.ranks(name)[0].is_over for name in ("a", "b"))
    given_up = [blocks.is_over for blocks in index.ranks("many").values()]
    assert given_up.count(True) == 4, "no more than it takes"


@given(st.integers(0, 3))
def test_the_key_of_a_block(at: int) -> None:
    event, keys = stored([1, 2, 3])
    blocks = applied()
    blocks.apply(event, keys)
    known = [*keys, None]
    names = [*event.hashes, 999]
    assert blocks.key_of(names[at]) == known[at]


def test_memory_per_block() -> None:
    rnd = random.Random(1)
    count = 22_000  # just after the tables grew
    index = PublishedIndex(1 << 30)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        blocks = index.open("a", 0)
        for _ in range(count // 4):
            names = [rnd.getrandbits(64) for _ in range(4)]
            blocks.apply(Stored(names, None, SIZE), [rnd.getrandbits(64) for _ in names])
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak / len(blocks) <= BYTES_PER_BLOCK
