"""The prefix index against a naive model, its bounds, and the memory it claims per block."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from proxy.core.kvcache.engine_cache import Hold
from proxy.core.kvcache.prefix_index import BYTES_PER_BLOCK, SWEPT, PrefixIndex
from tests.support.caches import Caches
from tests.support.examples import examples
from tests.support.work import calls_of

NAMES = ("a", "b", "c", "d")
names = st.sampled_from(NAMES)


def chained(path: Sequence[int]) -> list[int]:
    """Hashes of a prompt whose blocks are `path`: each stands for the whole way to it."""
    return [hash(tuple(path[: i + 1])) % (1 << 64) for i in range(len(path))]


prompts = st.lists(st.integers(0, 2), max_size=6).map(chained)


class Naive:
    """A list of blocks per instance, the least recently used first; bounds applied one by one."""

    def __init__(self, max_total: int, max_blocks: int | None) -> None:
        self.max_total, self.max_blocks = max_total, max_blocks
        self.held: dict[str, list[int]] = {}

    def insert(self, name: str, prompt: Sequence[int]) -> None:
        held = self.held.setdefault(name, [])
        for block in reversed(prompt):
            if block in held:
                held.remove(block)
            held.append(block)
        if self.max_blocks is not None:
            del held[: max(0, len(held) - self.max_blocks)]
        while sum(map(len, self.held.values())) > self.max_total:
            excess = sum(map(len, self.held.values())) - self.max_total
            del max(self.held.values(), key=len)[:excess]

    def hit(self, name: str, prompt: Sequence[int]) -> int:
        lacking = (i for i, block in enumerate(prompt) if block not in self.held[name])
        return next(lacking, len(prompt))


class Index(RuleBasedStateMachine):
    """Prompts come and instances go in any order; the index says what the model says."""

    def __init__(self) -> None:
        super().__init__()
        self.start(total=1, blocks=None)

    @initialize(total=st.integers(1, 30), blocks=st.none() | st.integers(1, 12))
    def start(self, total: int, blocks: int | None) -> None:
        self.index = PrefixIndex(total * BYTES_PER_BLOCK, blocks)
        self.naive = Naive(total, blocks)
        self.at = Caches()

    @rule(name=names, prompt=prompts)
    def insert(self, name: str, prompt: list[int]) -> None:
        self.index.insert(self.at[name], prompt)
        self.naive.insert(name, prompt)

    @rule(name=names)
    def drop(self, name: str) -> None:
        self.index.drop(self.at[name])
        self.naive.held.pop(name, None)

    @rule(prompt=prompts)
    def look(self, prompt: list[int]) -> None:
        expected = {name: self.naive.hit(name, prompt) for name in self.naive.held}
        assert self.index.hits(prompt) == expected

    @invariant()
    def within_its_bounds(self) -> None:
        sizes = {name: len(held) for name, held in self.naive.held.items()}
        assert {name: self.at[name].blocks for name in sizes} == sizes
        assert self.index.total_blocks == sum(sizes.values()) <= self.naive.max_total

    def teardown(self) -> None:
        for name in NAMES:
            self.index.drop(self.at[name])
        assert traces(self.index) == []


def traces(index: PrefixIndex) -> list[str]:
    """The fields in which anything is left."""
    tables = ("_masks", "_names", "_caches", "_everyone", "_total")
    return [table for table in tables if getattr(index, table)]


TestIndex: Any = Index.TestCase
TestIndex.settings = settings(max_examples=examples(60), stateful_step_count=30)


def index(at: Caches, **held: Sequence[int]) -> PrefixIndex:
    made = PrefixIndex(1 << 20)
    for name, blocks in held.items():
        made.insert(at[name], blocks)
    return made


@pytest.fixture(name="at")
def _at() -> Caches:
    return Caches()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 2, 3], {"all": 3, "two": 2, "root": 1, "tail": 0}),
        ([1, 2, 3, 4], {"all": 3, "two": 2, "root": 1, "tail": 0}),
        ([1], {"all": 1, "two": 1, "root": 1, "tail": 0}),
        ([9, 1, 2, 3], {"all": 0, "two": 0, "root": 0, "tail": 0}),
        ([], {"all": 0, "two": 0, "root": 0, "tail": 0}),
    ],
)
def test_one_pass_gives_every_instances_leading_run(
    at: Caches, prompt: list[int], expected: dict[str, int]
) -> None:
    assert index(at, all=[1, 2, 3], two=[1, 2], root=[1], tail=[2, 3]).hits(prompt) == expected


def test_without_instances_there_is_no_hit() -> None:
    assert PrefixIndex(1 << 20).hits([1, 2]) == {}


def test_looking_changes_nothing(at: Caches) -> None:
    """Only use refreshes: a prompt that was placed elsewhere has not warmed this instance."""
    ix = PrefixIndex(1 << 20, max_blocks=2)
    ix.insert(at["a"], [1])
    ix.insert(at["a"], [2])
    ix.hits([1])
    ix.insert(at["a"], [3])
    assert ix.hits([1]) == {"a": 0}
    assert ix.hits([2]) == {"a": 1}


def test_the_tail_of_a_prompt_leaves_before_its_root(at: Caches) -> None:
    ix = PrefixIndex(1 << 20, max_blocks=5)
    ix.insert(at["a"], [1, 2, 3, 4, 5])
    for filler in (100, 101, 102):
        before = ix.hits([1, 2, 3, 4, 5])["a"]
        ix.insert(at["a"], [filler])
        assert ix.hits([1, 2, 3, 4, 5])["a"] == before - 1


def test_a_prompt_larger_than_the_instance_keeps_its_head(at: Caches) -> None:
    ix = PrefixIndex(1 << 20, max_blocks=3)
    ix.insert(at["a"], range(1, 9))
    assert ix.hits(range(1, 9)) == {"a": 3}


def test_the_largest_instance_gives_way_to_the_byte_cap(at: Caches) -> None:
    ix = PrefixIndex(6 * BYTES_PER_BLOCK)
    ix.insert(at["large"], range(5))
    ix.insert(at["small"], range(10, 13))
    assert (at["large"].blocks, at["small"].blocks) == (3, 3)


def test_a_forgotten_instances_place_is_free_for_the_next(at: Caches) -> None:
    """The number of instances ever seen does not widen the masks."""
    ix = index(at, a=[1, 2], b=[1])
    for i in range(100):
        ix.insert(at[f"n{i}"], [1, 2, 3])
        ix.drop(at[f"n{i}"])
    ix.drop(at["a"])
    ix.insert(at["c"], [2, 3])
    assert ix.hits([1, 2]) == {"b": 1, "c": 0}
    assert ix._everyone == 0b11


def test_a_large_cache_leaves_the_masks_piece_by_piece(at: Caches) -> None:
    """An engine's restart is no reason for others to wait; nobody is taken for the one it was."""
    ix = PrefixIndex(1 << 26)
    ix.insert(at["kept"], [99_999])
    lost, count = at["lost"], 3 * SWEPT
    for start in range(0, count, SWEPT):
        ix.insert(lost, range(start, start + SWEPT))
    assert ix.total_blocks == count + 1
    ix.drop(lost)
    assert count - SWEPT <= len(ix._masks) < count
    assert ix.total_blocks == 1
    for number in range(4):
        new = at[f"new{number}"]
        ix.insert(new, [count + number])
        assert ix.hits(range(SWEPT)).keys() == {"kept", *(f"new{n}" for n in range(number + 1))}
        assert not any(ix.hits([count - 1]).values())
        assert ix.total_blocks == 2 + number
    assert len(ix._masks) == 5
    assert not ix._lost
    ix.insert(at["last"], [7])
    assert ix._everyone == (1 << 6) - 1


def test_what_is_lost_gives_way_before_what_is_there(at: Caches) -> None:
    ix = PrefixIndex((2 * SWEPT + 10) * BYTES_PER_BLOCK)
    ix.insert(at["lost"], range(2 * SWEPT))
    ix.drop(at["lost"])
    ix.insert(at["here"], range(10_000, 10_000 + SWEPT + 20))
    assert at["here"].blocks == SWEPT + 20


def test_hashes_that_collide_end_nothing(at: Caches) -> None:
    """They are no cryptographic ones, and ids are free to choose."""
    index = PrefixIndex(1 << 20)
    index.insert(at["a"], [1, 1])
    index.insert(at["a"], [1])
    index.insert(at["a"], [2])
    index.limit(at["a"], 1)
    assert at["a"].blocks <= 1
    index.drop(at["a"])
    assert (at["a"].blocks, index.total_blocks) == (0, 0)


def test_forgetting_one_never_seen_is_nothing(at: Caches) -> None:
    ix = index(at, a=[1])
    ix.drop(at["b"])
    assert ix.hits([1]) == {"a": 1}


def test_a_held_prompt_outlives_younger_ones(at: Caches) -> None:
    ix = PrefixIndex(1 << 20, max_blocks=6)
    age = ix.insert(at["a"], [1, 2, 3])
    hold = ix.hold(at["a"], [1, 2, 3])
    assert hold is not None
    for block in range(10, 20):
        ix.insert(at["a"], [block])
    assert ix.hits([1, 2, 3]) == {"a": 3}
    assert (at["a"].blocks, ix.holds) == (6, 1)
    ix.trim(at["a"], age)
    assert ix.hits([1, 2, 3]) == {"a": 3}
    ix.release(hold)
    for block in range(20, 29):
        ix.insert(at["a"], [block])
    assert (ix.hits([1, 2, 3]), ix.holds) == ({"a": 0}, 0)


def test_what_is_held_makes_no_room_until_it_ends(at: Caches) -> None:
    """Prompts that wait for room get it from the streams that end, as in an engine."""
    ix = PrefixIndex(1 << 20, max_blocks=8)
    holds = [ix.insert_held(at["a"], range(start, start + 4), 0) for start in (10, 20)]
    ix.reserve(at["a"], 3)
    assert (at["a"].blocks, ix.full_ratio(at["a"])) == (8, 1.0)
    assert holds[1] is not None
    ix.release(holds[1])
    ix.reserve(at["a"], 3)
    assert ix.hits(range(20, 24)) == {"a": 1}
    assert ix.hits(range(10, 14)) == {"a": 4}


def test_the_bound_of_memory_holds_for_what_is_in_use_too(at: Caches) -> None:
    ix = PrefixIndex(6 * BYTES_PER_BLOCK)
    for start in range(0, 100, 10):
        ix.insert_held(at["a"], range(start, start + 4), 0)
        assert at["a"].blocks <= 6


def test_a_hold_follows_its_blocks_when_others_use_them(at: Caches) -> None:
    """Of two that use one prompt the first to end does not free it."""
    ix = PrefixIndex(1 << 20, max_blocks=4)
    first, second = (ix.insert_held(at["a"], [1, 2, 3], 0) for _ in range(2))
    assert first is not None
    assert second is not None
    ix.release(second)
    ix.insert(at["a"], [11, 12])
    assert (ix.hits([1, 2, 3]), ix.hits([11, 12])) == ({"a": 3}, {"a": 1})


def test_room_that_is_reserved_is_taken_from_the_oldest(at: Caches) -> None:
    ix = PrefixIndex(1 << 20, max_blocks=6)
    ix.insert(at["a"], [1, 2])
    ix.insert(at["a"], [11, 12, 13, 14])
    ix.reserve(at["a"], 3)
    assert (ix.hits([1])["a"], ix.hits([11, 12, 13, 14])["a"], ix.full_ratio(at["a"])) == (
        0,
        3,
        1.0,
    )
    ix.reserve(at["a"], 9)
    assert at["a"].blocks == 0


def test_trim_goes_by_the_last_use(at: Caches) -> None:
    ix = PrefixIndex(1 << 20)
    ix.insert(at["a"], [1, 2])
    age = ix.insert(at["a"], [11, 12])
    ix.insert(at["a"], [1, 2, 3])
    ix.trim(at["a"], age)
    assert (ix.held(at["a"], [1, 2, 3]), ix.held(at["a"], [11, 12])) == (3, 0)
    ix.trim(at["b"], age)


@pytest.mark.parametrize("how", ["limit", "trim", "empty"])
def test_what_an_engine_says_takes_many_blocks_piece_by_piece(at: Caches, how: str) -> None:
    """It may say again and again that its cache is small, or has nothing of what it had."""
    ix, a, prompt = PrefixIndex(1 << 30), at["a"], range(100, 100 + 5 * SWEPT // 2)
    age = ix.insert(a, prompt)
    held, _hold = [7, 8, 9], ix.insert_held(a, [7, 8, 9], 0)
    if how == "limit":
        ix.limit(a, 10)
    elif how == "trim":
        ix.trim(a, age)
    else:
        ix.empty(a)
    sizes = [a.blocks]
    for number in range(3):
        ix.insert(a, [50 + number])
        sizes.append(a.blocks)
    assert sizes[0] == 5 * SWEPT // 2 + 3 - SWEPT, "what the loop bears"
    assert sizes[1] == sizes[0] + 1 - SWEPT
    assert sizes[-1] == a.blocks == ix.total_blocks <= 10
    assert (ix.held(a, prompt), ix.held(a, held)) == (max(0, 10 - 6) if how == "limit" else 0, 3)


@pytest.mark.long
@given(
    st.lists(st.tuples(names, prompts, st.booleans(), st.integers(0, 8)), max_size=30),
    st.integers(1, 10),
)
def test_what_is_held_is_closed_under_prefixes(
    inserts: list[tuple[str, list[int], bool, int]], cap: int
) -> None:
    """An ancestor is never less recent than what stands on it, so no block is held in vain."""
    ix, at = PrefixIndex(1 << 20, max_blocks=cap), Caches()
    holds: list[Hold] = []
    ages = [0, 0, 0]
    for name, prompt, in_use, number in inserts:
        ages.append(ix.insert(at[name], prompt))
        if in_use and (hold := ix.hold(at[name], prompt)) is not None:
            holds.append(hold)
        if number == 0:
            ix.trim(at[name], ages[-4])
        elif number == 1 and holds:
            ix.release(holds.pop(0))
        ix.reserve(at[name], number % 3)
    for hold in holds:
        ix.release(hold)
        ix.release(hold)
    assert ix.holds == 0
    for name, prompt, *_ in inserts:
        bit = at[name].bit
        held = [bool(ix._masks.get(block, 0) & bit) for block in prompt]
        assert held == sorted(held, reverse=True)


@pytest.mark.long
@settings(max_examples=examples(300))
@given(
    st.lists(
        st.tuples(st.sampled_from(["", "x", "y"]), prompts, st.booleans(), st.integers(0, 6)),
        max_size=30,
    ),
    st.integers(1, 20),
)
def test_a_tenants_trim_leaves_what_another_has_used(
    uses: list[tuple[str, list[int], bool, int]], cap: int
) -> None:
    """It takes what no other has used, nor anybody beside others' blocks; and nothing in use."""
    ix, a = PrefixIndex(1 << 20, max_blocks=cap), Caches()["a"]
    users: dict[int, set[str]] = {}
    own: set[int] = set()
    holds: list[Hold] = []
    was_held = False
    for tenant, prompt, in_use, number in uses:
        known = prompt[: ix.held(a, prompt)]
        own = own - set(prompt) if tenant != "x" or set(known) - own else own | set(prompt)
        age = ix.insert(a, prompt, 0, tenant)
        users = {block: users.get(block, set()) for block in ix._masks}
        for block in prompt[: ix.held(a, prompt)]:
            users[block].add(tenant)
        if in_use and (hold := ix.hold(a, prompt)) is not None:
            holds.append(hold)
            was_held = True
        if number == 0:
            ix.trim_of(a, "x", age)
            assert a.blocks == ix.total_blocks == len(ix._masks)
            gone = users.keys() - ix._masks.keys()
            assert all(users[block] == {"x"} for block in gone)
            assert not any(gone & set(hold.hashes[: hold.blocks]) for hold in holds)
            assert was_held or not own & ix._masks.keys()
        elif number == 1 and holds:
            ix.release(holds.pop(0))
    for _, prompt, *_ in uses:
        kept = [block in ix._masks for block in prompt]
        assert kept == sorted(kept, reverse=True)


def test_a_trim_looks_at_its_tenants_own() -> None:
    """However much the others have; and what is noted of a tenant's uses is bounded."""
    ix, a = PrefixIndex(1 << 30, max_blocks=1000), Caches()["a"]
    for n in range(5000):
        ix.insert(a, [n], 0, "quiet")
        assert sum(map(len, a.runs._ages_of.values())) <= 2 * 1001 + 16
    age = ix.insert(a, [-1], 0, "loud")
    assert calls_of(partial(ix.trim_of, a, "loud", age)) < 50
    assert (a.blocks, ix.held(a, [-1])) == (999, 0)
    ix.trim_of(a, "quiet", age)
    assert a.blocks == ix.total_blocks == 0


@pytest.mark.long
@pytest.mark.parametrize("blocks", [2000, 2730, 5461])
@pytest.mark.parametrize("instances", [1, 40])
@pytest.mark.parametrize("length", [1, 50])
@pytest.mark.parametrize("tenant", ["", "x"])
def test_a_full_index_needs_no_more_than_it_claims(
    at: Caches, blocks: int, instances: int, length: int, tenant: str
) -> None:
    """Sizes at which the tables have just grown are the worst, and so are short prompts."""
    rnd = random.Random(blocks)
    tracemalloc.start()
    try:
        ix = PrefixIndex(blocks * BYTES_PER_BLOCK)
        before = tracemalloc.get_traced_memory()[0]
        for i in range(3 * blocks // (2 * length)):
            prompt = [rnd.getrandbits(64) for _ in range(length)]
            ix.insert(at[f"i{i % instances}"], prompt, 0, tenant)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert ix.total_blocks == blocks
    assert peak / blocks <= BYTES_PER_BLOCK / (2 if length > 10 else 1)


def test_a_limit_of_one_instance(at: Caches) -> None:
    """What an engine can hold bounds what is believed of it, at once and from then on."""
    index = PrefixIndex(1 << 20)
    index.insert(at["a"], range(10))
    index.insert(at["b"], range(10))
    index.limit(at["a"], 4)
    assert (at["a"].blocks, at["b"].blocks) == (4, 10)
    assert index.hits(range(10)) == {"a": 4, "b": 10}
    index.insert(at["a"], range(100, 120))
    assert (at["a"].blocks, index.capacity(at["a"]), index.capacity(at["b"])) == (4, 4, None)
    index.drop(at["a"])
    assert index.capacity(at["a"]) is None


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(1, 9)), max_size=30)
)
def test_what_is_adopted_is_found_and_leaves_in_the_same_order(
    uses: list[tuple[str, int, int]],
) -> None:
    old, new = PrefixIndex(1 << 20, 20), PrefixIndex(1 << 20, 20)
    old_at, new_at = Caches(), Caches()
    prompts = {n: [*range(n // 2), *range(100 * n, 100 * n + 9)] for n in range(6)}
    for instance, n, length in uses:
        old.insert(old_at[instance], prompts[n][:length])
    for instance in "abc":
        new.adopt(new_at[instance], old_at[instance].runs.rows())
        new.adopt(new_at[instance], [[7]])  # known already, or nothing was: then this is all
    for instance in {instance for instance, _, _ in uses}:
        for limit in range(20, 0, -1):
            old.limit(old_at[instance], limit)
            new.limit(new_at[instance], limit)
            assert new_at[instance].runs.rows() == old_at[instance].runs.rows()
            assert all(
                old.held(old_at[instance], p) == new.held(new_at[instance], p)
                for p in prompts.values()
            )
