"""Prompts of text in what engines publish: where they ended, what is left, what came back."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.kvcache import links
from proxy.core.kvcache.claims import BELIEVED_GONE, Claim
from proxy.core.kvcache.links import (
    MOST_GROWING,
    MOST_IDS_BYTES,
    MOST_SAID_BYTES,
    SWEPT,
    Chains,
    Link,
    Said,
)
from proxy.core.kvcache.published import (
    MOST_BACK,
    MOST_STEPS,
    Cleared,
    PublishedBlocks,
    Removed,
    Stored,
)
from proxy.core.kvcache.published_index import (
    BYTES_PER_BLOCK,
    MOST_ALIKE,
    MOST_TRIES,
    MOST_WALKED,
    RANKS_PER_END,
    Ended,
    PublishedIndex,
)
from proxy.core.types import UNIT_TOKENS, RequestFacts
from proxy.protocol.prompt.facts import unit_hashes, unit_root
from tests.support.work import calls_of, lines_of

SIZE = 16
Tokens = tuple[int, ...]


def facts(ends: Sequence[int], tokens: int) -> RequestFacts:
    return RequestFacts("m", None, tokens, (), 256.0, ends=ends)


class Engine:
    """An engine that publishes what it computes: blocks of `SIZE` tokens, named by all before."""

    def __init__(self, index: PublishedIndex, name: str = "a") -> None:
        self.index, self.name = index, name
        self.blocks = index.open(name, 0)
        self.blocks.renew(is_whole=True)
        self.blocks.is_live = self.blocks.is_connected = True
        self.held: set[int] = set()
        self.now_s = 0.0

    def cached(self, prompt: Tokens) -> int:
        """Tokens of a prompt that it has; at least one is computed."""
        most = (len(prompt) - 1) // SIZE
        names = (hash(prompt[: (at + 1) * SIZE]) for at in range(most))
        return SIZE * next((at for at, name in enumerate(names) if name not in self.held), most)

    def store(self, tokens: Tokens, session: str = "") -> None:
        """All whole blocks of these tokens, from the first that it lacks."""
        names = [hash(tokens[: (at + 1) * SIZE]) for at in range(len(tokens) // SIZE)]
        new = [name for name in names if name not in self.held]
        start = len(names) - len(new)
        self.held |= set(new)
        if new:
            parent = names[start - 1] if start else None
            self.now_s += 1.0
            self.blocks.heard_s = self.now_s
            known = packed(tokens[start * SIZE : len(names) * SIZE])
            self.blocks.apply(Stored(new, parent, SIZE, known, session=session))
            self.index.came(self.name)

    def evict(self, tokens: Tokens, blocks: int) -> None:
        """The last blocks that are held of a chain, the tail first."""
        names = [hash(tokens[: (at + 1) * SIZE]) for at in range(len(tokens) // SIZE)]
        for name in [name for name in reversed(names) if name in self.held][:blocks]:
            self.held.discard(name)
            self.blocks.apply(Removed([name]))

    def serve(
        self, ends: Sequence[int], prompt: Tokens, answer: Tokens, session: str = ""
    ) -> tuple[int | None, int]:
        """A request from its placement to its end: predicted and real tokens cached."""
        asked = facts(ends, len(prompt) + 3)
        self.index.refine(asked)
        predicted = self.index.hits(asked).get(self.name)
        cached, since_s = self.cached(prompt), self.now_s + 0.5
        self.store(prompt + answer[:-1], session)
        counts = len(prompt), len(answer), cached
        self.index.ended(Ended(self.name, asked, since_s, session, len(prompt) + 3, *counts))
        return predicted, cached


def packed(tokens: Tokens) -> bytes:
    return array("I", tokens).tobytes()


def ids(count: int, seed: object) -> Tokens:
    pick = random.Random(str(seed))
    return tuple(pick.randrange(1 << 30) for _ in range(count))


class Talk:
    """A conversation: the ends of its messages, and its tokens."""

    def __init__(self, seed: int, system: Tokens = ()) -> None:
        self.seed, self.turns = seed, 0
        self.tokens = system
        self.ends: list[int] = [hash(system)] if system else []

    def turn(
        self, engine: Engine, new: int, out: int, *, comes_back: bool = True
    ) -> tuple[int | None, int]:
        self.tokens += ids(new, f"{self.seed} {self.turns}")
        self.ends.append(hash(self.tokens))
        answer = ids(out, f"{self.seed} {self.turns} out")
        told = engine.serve(self.ends, self.tokens, answer)
        self.tokens += answer if comes_back else ids(out, f"{self.seed} {self.turns} other")
        self.ends.append(hash(self.tokens))
        self.turns += 1
        return told


turns = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 80), st.integers(1, 60), st.integers(0, 4)),
    min_size=1,
    max_size=25,
)


@given(turns)
def test_every_later_turn_is_predicted_exactly(steps: list[tuple[int, int, int, int]]) -> None:
    """Whatever was evicted of its end meanwhile."""
    engine = Engine(PublishedIndex(1 << 30))
    talks = [Talk(seed) for seed in range(3)]
    for place, new, out, evicted in steps:
        talk = talks[place]
        predicted, cached = talk.turn(engine, new, out)
        is_known = talk.turns > 1 and predicted is not None
        assert is_known or cached == 0
        assert predicted in (None, cached)
        engine.evict(talks[(place + 1) % 3].tokens, evicted)


def test_answers_that_do_not_come_back_as_they_were_said() -> None:
    """Then only the prompt counts, once that is learned."""
    engine, talk = Engine(PublishedIndex(1 << 30)), Talk(1)
    told = [talk.turn(engine, 100, 40, comes_back=False) for _ in range(9)]
    assert [predicted == cached for predicted, cached in told[-3:]] == [True] * 3
    assert told[1][0] != told[1][1]


def test_an_answer_that_came_back_is_compared_with_what_was_said() -> None:
    """Where the model's answers are not known to come back as they were said."""
    index = PublishedIndex(1 << 30)
    engine = Engine(index)
    prompt, answer = ids(70, 1), ids(60, 2)
    engine.store(prompt + answer[:-1])
    index.ended(Ended("a", facts([1], 70), 0.0, "", 70, 70, 60, 0))
    following = facts([1, 2, 3], 300)
    assert index.hits(following) == {"a": 128}
    doubted = index.doubted(1, "m")
    assert doubted is not None
    name, link = doubted
    assert (name, link.ids) == ("a", packed(answer[:58]))  # whole blocks of both
    for same, held in ((58, 128), (57, 112), (42, 112), (41, 96), (10, 80), (0, 64)):
        link.compare(packed(answer[:same] + ids(9, 3)))
        assert index.hits(following) == {"a": held}
    assert index.doubted(1, "m") is None
    assert index.doubted(2, "m") is None


def test_answers_that_come_back_are_not_compared_any_more() -> None:
    engine, talk = Engine(PublishedIndex(1 << 30)), Talk(1)
    compared = []
    for _ in range(5):
        talk.turn(engine, 40, 40)
        compared.append(engine.index.doubted(talk.ends[-2], "m") is not None)
    assert compared == [True, True, False, False, False]


def test_ids_of_an_answer_whose_blocks_come_late() -> None:
    index = PublishedIndex(1 << 30)
    engine = Engine(index)
    prompt, answer = ids(70, 1), ids(60, 2)
    engine.store(prompt)
    index.ended(Ended("a", facts([1], 70), 0.0, "", 70, 70, 60, 0))
    assert index.doubted(1, "m") is None
    for end in (80, 112, 129):
        engine.store((prompt + answer)[:end])
    doubted = index.doubted(1, "m")
    assert doubted is not None
    assert doubted[1].ids == packed(answer[:58])


def test_a_beginning_that_conversations_share() -> None:
    """The third one finds as much as the second one did."""
    engine, system = Engine(PublishedIndex(1 << 30)), ids(200, "system")
    told = [Talk(seed, system).turn(engine, 50, 20) for seed in range(4)]
    assert told == [(None, 0), (None, 192), (192, 192), (192, 192)]


def test_the_same_prompt_again_lacks_one_token() -> None:
    engine = Engine(PublishedIndex(1 << 30))
    prompt = ids(10 * SIZE, 1)
    assert engine.serve([1], prompt, ids(20, 2)) == (None, 0)
    assert engine.serve([1], prompt, ids(20, 3)) == (9 * SIZE, 9 * SIZE)


def test_requests_side_by_side_are_told_apart_by_length_or_session() -> None:
    index = PublishedIndex(1 << 30)
    engine = Engine(index)
    prompts = [ids(length, seed) for seed, length in enumerate((160, 192, 192))]
    for prompt in prompts:
        engine.store(prompt, f"s{len(prompt)}")
    asked = [facts([at], len(prompt)) for at, prompt in enumerate(prompts)]
    for request, prompt in zip(asked, prompts, strict=True):
        index.ended(Ended("a", request, 0.0, "", len(prompt), len(prompt), 1, 0))
    assert [index.hits(request).get("a") for request in asked] == [144, None, None]
    engine.store(prompts[1] + ids(16, 9), "mine")
    index.ended(Ended("a", asked[1], 0.0, "mine", 192, 192, 17, 0))
    assert index.hits(asked[1]) == {"a": 176}


def _two_turns_of_one_length(index: PublishedIndex, engine: Engine, *, shared: int) -> list[Tokens]:
    """Two conversations whose second turns run side by side and end equally long."""
    begun = ids(shared, "system")
    firsts = [begun + ids(length, f"first {length}") for length in (160, 208)]
    for at, first in enumerate(firsts):
        engine.serve([at], first, ids(17, f"out {at}"))
    seconds = [first + ids(320 - len(first), f"second {at}") for at, first in enumerate(firsts)]
    for prompt in seconds:
        engine.store(prompt)
    for at, prompt in enumerate(seconds):
        asked = facts([at, 10 + at], len(prompt))
        index.ended(Ended("a", asked, engine.now_s - 1.0, "", len(prompt), len(prompt), 1, None))
    return seconds


def test_requests_side_by_side_are_told_apart_by_their_earlier_turns() -> None:
    index = PublishedIndex(1 << 30)
    engine = Engine(index)
    _two_turns_of_one_length(index, engine, shared=0)
    for at in (0, 1):
        assert index.hits(facts([at, 10 + at, 20 + at], 500)) == {"a": 320}


def test_no_earlier_turn_stands_for_one_whose_chain_is_not_found() -> None:
    index = PublishedIndex(1 << 30)
    engine = Engine(index)
    engine.serve([0], ids(160, 1), ids(17, 2))
    second = ids(160, 1) + ids(160, 3)
    others = [ids(160, 1) + ids(160, seed) for seed in (4, 5)]
    for prompt in (second, *others):
        engine.store(prompt)
    index.ended(Ended("a", facts([0, 1], 320), engine.now_s - 2.0, "", 320, 320, 1, 160))
    assert index.hits(facts([0, 1, 2], 400)) == {}, "up to the approximate index"
    assert index.hits(facts([0, 9], 400)) == {"a": 176}
    third = second + ids(112, 6)
    engine.serve([0, 1, 2], third, ids(17, 7))
    assert index.hits(facts([0, 1, 2, 3], 600)) == {"a": 448}
    assert index.hits(facts([0, 1, 8], 600)) == {"a": 320}, "found on the way of the next turn"


def test_what_follows_the_last_known_end_may_begin_the_next_message() -> None:
    index = PublishedIndex(1 << 30)
    engine = Engine(index)
    first, answer = ids(160, 1), ids(40, 2)
    engine.serve([0], first, answer)
    asked = facts([0, 9], 500)
    assert not index.goes_on(asked, "a"), "nothing but its own answer"
    assert not index.goes_on(facts([9], 500), "a")
    assert not index.goes_on(asked, "b")
    engine.store(first + ids(SIZE, 3))
    assert index.goes_on(asked, "a"), "beside the answer"
    engine = Engine(index, "b")
    engine.serve([0], first, answer)
    engine.store(first + answer[:32] + ids(SIZE, 3))
    assert index.goes_on(asked, "b"), "behind the answer"
    engine.evict(first + answer, 3)
    assert not index.goes_on(asked, "b"), "a part of the prompt itself is gone"


def test_nor_for_one_that_was_handed_over_or_left() -> None:
    index = PublishedIndex(1 << 30)
    engine = Engine(index)
    engine.serve([0], ids(160, 1), ids(17, 2))
    index.left_unknown("a", facts([0, 1], 320), 320)
    index.left_unknown("a", facts([], 320), 320)
    index.left_unknown("nobody", facts([0, 1], 320), 320)
    assert index.hits(facts([0, 1, 2], 400)) == {}
    other = index.open("a", 1)
    other.is_live = True
    other.renew(is_whole=True)
    engine.blocks.apply(Cleared())
    engine.store(ids(SIZE, 9))
    assert index.hits(facts([0, 1, 2], 400)) == {}, "one rank has something"
    engine.blocks.apply(Cleared())
    assert index.hits(facts([0, 1, 2], 400)) == {"a": 0}, "nothing is there at all"


@pytest.mark.parametrize("how", ["cleared", "evicted"])
def test_what_comes_again_is_known_again(how: str) -> None:
    index = PublishedIndex(1 << 30)
    engine = Engine(index)
    begun = ids(160, "system")
    for seed in range(3):
        engine.serve([0, 10 + seed], begun + ids(64, seed), ids(9, seed))
    new = facts([0, 99], 400)
    assert index.hits(new) == {"a": 160}
    if how == "cleared":
        engine.blocks.apply(Cleared())
        engine.held.clear()
    else:
        for seed in range(3):
            engine.evict(begun + ids(64, seed) + ids(9, seed), 8)
        assert index.hits(new)["a"] < 160
    engine.serve([0, 20], begun + ids(64, 20), ids(9, 20))
    assert index.hits(new) == {"a": 160}


def test_a_prompt_that_was_lost_and_computed_again_is_not_lost_any_more() -> None:
    index = PublishedIndex(1 << 30)
    engine = Engine(index)
    prompt = ids(160, 1)
    engine.serve([0], prompt, ids(17, 2))
    engine.evict(prompt + ids(17, 2), 9)
    asked = facts([0, 1], 400)
    assert index.hits(asked) == {"a": 2 * SIZE}
    engine.store(prompt)
    index.left_unknown("a", facts([0], 160), 160)
    assert index.hits(asked) == {}, "up to the approximate index"


def test_chains_of_one_length_that_are_too_many_or_too_long_are_left_alone() -> None:
    for shared, count in ((160, MOST_ALIKE + 1), (SIZE, 2)):
        index = PublishedIndex(1 << 30)
        engine = Engine(index)
        begun = ids(shared, "begun")
        engine.serve([0], begun, ids(1, 2))
        long = shared + SIZE if count > MOST_ALIKE else SIZE * (MOST_STEPS + 2)
        prompts = [begun + ids(long - shared, 3), *(ids(long, seed) for seed in range(1, count))]
        for prompt in prompts:
            engine.store(prompt)
        asked = facts([0, 1], long)
        index.ended(Ended("a", asked, engine.now_s - count, "", long, long, 1, None))
        assert index.hits(facts([0, 1, 2], long + 99)) == {}


def test_the_last_block_may_come_after_the_answer() -> None:
    index = PublishedIndex(1 << 30)
    engine = Engine(index)
    prompt, answer = ids(64, 1), ids(33, 2)
    engine.store((prompt + answer)[:80])
    first = facts([1], 64)
    index.ended(Ended("a", first, 0.0, "", 64, 64, 33, 0))
    following = facts([1, 2, 3], 200)
    assert index.hits(following) == {"a": 80}
    engine.store((prompt + answer)[:96])
    assert index.hits(following) == {"a": 96}
    engine.store((prompt + answer)[:96] + ids(64, 3))
    assert index.hits(following) == {"a": 96}


def test_a_chain_that_is_published_late_is_looked_for_with_the_next_batches() -> None:
    index = PublishedIndex(1 << 30)
    engine = Engine(index)
    prompt = ids(64, 1)
    index.ended(Ended("a", facts([1], 64), -1.0, "", 64, 64, 1, 0))
    index.ended(Ended("a", facts([5], 320), -1.0, "", 320, 320, 1, 0))
    following = facts([1, 2], 100)
    assert index.hits(following) == {}
    engine.store(prompt)
    assert index.hits(following) == {"a": 64}
    for seed in range(3):
        engine.store(ids(96, f"other {seed}"))
    assert index._unlinked == []


def test_chains_that_are_far_to_walk_are_looked_for_a_few_at_a_time() -> None:
    """Two that are alike to their ends: each request walks both back, and knows no more."""
    index = PublishedIndex(1 << 30)
    engine, begun = Engine(index), list(range(1, 11))
    blocks = engine.blocks
    blocks.heard_s = 0.0
    blocks.apply(Stored(begun, None, SIZE))
    index.ended(Ended("a", facts([1], 160), 0.0, "", 160, 160, 1, None))
    blocks.heard_s = 10.0
    for at in (1, 2):
        blocks.apply(Stored(list(range(at * 10_000, at * 10_000 + 1000)), 10, SIZE))
    tokens = 1010 * SIZE
    for end in range(100, 116):
        index.ended(Ended("a", facts([1, end], tokens), 5.0, "", tokens, tokens, 1, None))
    each = 2000
    left = list(index._unlinked)
    assert len(left) == 16
    batches = 0
    while index._unlinked:
        before, batches = blocks.walked, batches + 1
        walked = index.came("a")
        assert 0 < walked == blocks.walked - before < MOST_WALKED + 2 * each
        assert batches < 99
    assert {ended.tries for ended in left} == {MOST_TRIES}, "each had its turns"
    assert batches > MOST_TRIES


def test_the_length_of_a_prompt_is_that_of_its_beginning_and_what_follows() -> None:
    index = PublishedIndex(1 << 30)
    engine = Engine(index)
    engine.store(ids(1000, 1))
    index.ended(Ended("a", facts([1], 1100), 0.0, "", 1100, 1000, 1, 0))
    longer, same, other = facts([1, 2, 3], 1300), facts([1], 1100), facts([7, 8], 500)
    for request in (longer, same, other):
        index.refine(request)
    assert [r.prompt_tokens for r in (longer, same, other)] == [1200, 1000, 500]


def test_ends_are_bounded_and_an_instance_leaves_nothing() -> None:
    index = PublishedIndex(40 * BYTES_PER_BLOCK)
    engine = Engine(index)
    for seed in range(30):
        engine.serve([seed], ids(32, seed), ids(20, seed))
        engine.evict(ids(32, seed) + ids(20, seed), 9)
    assert len(index._ends) == 10
    assert sum(spot.links for spot in engine.blocks.chains._spots.values()) <= 10
    index.close("a", 0, engine.blocks)
    assert (len(engine.blocks), index.hits(facts([29, 30], 100))) == (0, {})
    index.ended(Ended("a", facts([1], 64), 0.0, "", 64, 64, 1, 0))
    assert index._unlinked == []


def test_ends_on_many_ranks_count_as_many() -> None:
    """One engine may have any number of ranks, and each has a link for each prompt."""
    index = PublishedIndex(400 * BYTES_PER_BLOCK)
    for rank in range(64):
        blocks = index.open("a", rank)
        blocks.renew(is_whole=True)
        blocks.is_live = blocks.is_connected = True
        blocks.apply(Stored([rank], None, SIZE))
    for end in range(100):
        index.left_unknown("a", facts([end], 100), 100)
        assert sum(map(len, index._ends.values())) == index._links <= 100 * RANKS_PER_END
    assert len(index._ends) == 100 * RANKS_PER_END // 64


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(1, 8)), max_size=60))
def test_links_stand_where_their_blocks_are_left(steps: list[tuple[int, int, int]]) -> None:
    """As if each were moved by itself: a block that goes takes its links to the one before."""
    chains, depths = Chains(), {-1: 0} | {name: name + 1 for name in range(40)}
    expected: dict[Link, tuple[int, int]] = {}
    for what, name, more in steps:
        if what == 0 and name in depths:
            link = Link(name, name + 1, 9, name + 1 + more % 3)
            chains.keep(link, name, name + 1)
            expected[link] = name, name + 1
        elif what == 1 and depths.pop(name, 0):
            before = name - 1 if name - 1 in depths else None
            chains.evicted(name, before if name else None, name if before is not None else 0)
            for link, (tail, _) in list(expected.items()):
                if tail == name:
                    there = name and before is not None
                    expected[link] = (name - 1, name) if there else (name, 0)
        elif what == 2 and expected:
            link = list(expected)[more % len(expected)]
            chains.drop(link)
            del expected[link]
        assert {link: (link.tail, link.depth) for link in expected} == expected
        standing = [link for link, (_, depth) in expected.items() if depth]
        assert sum(spot.links for spot in chains._spots.values()) == len(standing)


def test_many_links_move_at_once() -> None:
    """Prompts behind one beginning, of which a block after the other is evicted."""

    def work(count: int) -> int:
        chains = Chains()
        for at in range(count):
            chains.keep(Link(500, 501, 9, 501), 500 - at % 2, 501 - at % 2)

        def evicted() -> None:
            for name in range(500, 0, -1):
                chains.evicted(name, name - 1, name)

        calls = calls_of(evicted)
        assert [(spot.tail, spot.links) for spot in chains._spots.values()] == [(0, count)]
        return calls

    assert work(1000) == work(2)


def waiting(chains: Chains, count: int) -> list[Link]:
    """Links at one block whose answers are long, as their engine says."""
    found = [Link(1, 1, SIZE, 100_000) for _ in range(count)]
    for link in found:
        link.wants_ids = True
        chains.keep(link, 1, 1)
    return found


def test_what_an_event_costs_does_not_grow_with_the_links_that_wait() -> None:
    def work(count: int) -> int:
        chains = Chains()
        waiting(chains, count)

        def grew() -> None:
            for name in range(2, 100):
                chains.grew(name - 1, [name], "", 0.0, bytes(64))

        return calls_of(grew)

    assert work(1000) == work(MOST_GROWING)


def test_of_many_links_that_wait_at_a_block_the_newest_move_on() -> None:
    """The others stay where they are: at a block that is there."""
    chains = Chains()
    found = waiting(chains, MOST_GROWING + 3)
    chains.grew(1, [2, 3], "", 0.0, b"")
    assert [link.depth for link in found] == [1] * 3 + [3] * MOST_GROWING
    found += waiting(chains, 2)
    chains.grew(1, [4], "", 0.0, b"")
    chains.grew(4, [3], "", 0.0, b"")
    assert chains.moves == MOST_GROWING + 2 * 2
    chains.grew(3, [5], "", 0.0, b"")
    assert chains.moves == MOST_GROWING * 2 + 2 * 2, "those that meet are not more"


def test_of_a_long_answer_no_ids_are_kept() -> None:
    chains = Chains()
    (link,) = waiting(chains, 1)
    for name in range(2, 2 + MOST_IDS_BYTES // 64):
        chains.grew(name - 1, [name], "", 0.0, bytes(64))
    assert len(link.ids) == MOST_IDS_BYTES
    chains.grew(1 + MOST_IDS_BYTES // 64, [9999], "", 0.0, bytes(64))
    chains.grew(9999, [10_000], "", 0.0, bytes(64))
    assert (link.ids, link.depth) == (b"", 3 + MOST_IDS_BYTES // 64)
    assert chains.said.bytes == 0


def test_the_ids_of_all_answers_are_bounded_and_whoever_has_most_pays() -> None:
    said, ids_of = Said(), bytes(MOST_IDS_BYTES)
    others = [Link(1, 1, SIZE, 9) for _ in range(3)]
    for link in others:
        said.keep(link, "b", ids_of)
    found = [Link(1, 1, SIZE, 9) for _ in range(5000)]
    for link in found:
        link.wants_ids = True
        said.keep(link, "a", ids_of)
        assert said.bytes <= MOST_SAID_BYTES
    have = [bool(link.ids) for link in found]
    assert have == sorted(have), "the oldest have none"
    assert [link.wants_ids for link in found] == have, "no answer without its beginning"
    assert sum(have) > 3500
    assert all(link.ids for link in others)
    gone = found[0]
    gone.compare(bytes(64))
    assert gone.returned is None, "nothing is known of it"
    for link in others:
        said.forget(link, "b")
    for link in found:
        said.forget(link, "a")
    assert said.bytes == 0


def test_links_that_are_forgotten_keep_no_ids() -> None:
    """Those that give way, that another one replaces, and of instances that have left."""
    index, system = PublishedIndex(40 * BYTES_PER_BLOCK), ids(SIZE * 4, "system")
    engine = Engine(index)
    for seed in range(30):
        engine.serve([seed], ids(32, seed), ids(40, seed))
        engine.serve([seed], ids(32, seed), ids(40, f"again {seed}"))
    kept = [link for row in index._ends.values() for link in row.values() if link.ids]
    assert 0 < len(kept) <= 10
    assert {link for own in index._said._by_name.values() for link in own.links} == set(kept)
    for number in range(20):
        engine = Engine(index, f"a{number}")
        engine.serve((1,), system, ids(40, number))
        index.close(engine.name, 0, engine.blocks)
    last = Engine(index, "last")
    last.serve((1,), system, ids(40, "last"))
    assert "a0" not in index._said._by_name


def test_a_publisher_that_contradicts_itself_moves_nothing_back() -> None:
    chains = Chains()
    link = Link(1, 1, SIZE, 3)
    chains.keep(Link(5, 9, SIZE, 9), 5, 9)
    chains.keep(link, 5, 1)
    chains.grew(5, [6], "", 0.0, b"")
    assert (link.tail, link.depth, chains.moves) == (5, 9, 0)


def test_a_large_set_that_is_lost_is_freed_piece_by_piece() -> None:
    """Nobody waits for that, and what is stored meanwhile frees more than it needs."""
    index = PublishedIndex(1 << 30)
    lost, other = index.open("a", 0), index.open("b", 0)
    count = 3 * SWEPT
    for blocks in (lost, other):
        blocks.renew(is_whole=True)
        blocks.is_live = True
    names = list(range(count))
    lost.apply(Stored(names, None, SIZE), [name + 1 for name in names])
    found = [Link(name, name + 1, SIZE, 0) for name in range(count)]
    for name, link in enumerate(found):
        lost.chains.keep(link, name, name + 1)
    with lines_of(links) as few:
        lost.apply(Cleared())
    assert few.count < 60
    assert (len(lost), len(index), lost.copies) == (0, 0, 0)
    assert {link.depth for link in found} == {0}
    assert len(index._lost) == 3 * count, "blocks, keys, and links' places"
    other.apply(Stored(names[:SWEPT], None, SIZE))
    assert len(index._lost) <= 3 * count - 3 * SWEPT
    left = len(index._lost)
    while index.sweep():
        assert len(index._lost) == left - SWEPT
        left -= SWEPT
    assert len(index._lost) == 0
    assert len(index) == SWEPT
    index.close("b", 0, other)
    assert len(index._lost) == SWEPT
    lost.apply(Stored(names[:2], None, SIZE), [1, 2])
    assert [link.depth for link in found[:2]] == [0, 0], "not theirs"
    lost.chains.forget(found[0])
    assert len(lost) == 2


def test_no_answer_walks_back_a_whole_context() -> None:
    blocks = PublishedBlocks()
    blocks.renew(is_whole=True)
    blocks.apply(Stored(list(range(MOST_BACK + 2)), None, 1))
    last = MOST_BACK + 1
    assert blocks.above(last, 2) == 1
    assert blocks.above(last, 1) is None


@pytest.mark.parametrize("how", ["renewed", "silent", "gone", "orphans"])
def test_what_is_not_known_is_not_told(how: str) -> None:
    index = PublishedIndex(1 << 30)
    engine = Engine(index)
    prompt = ids(96, 1)
    engine.serve([1], prompt, ids(20, 2))
    following = facts([1, 2, 3], 300)
    assert index.hits(following) == {"a": 112}
    if how == "renewed":
        engine.blocks.renew(is_whole=True)
        assert index.hits(following) == {"a": 0}
    elif how == "gone":
        index.process_gone("a")
        assert index.hits(following) == {"a": 112}, "its events come"
        engine.blocks.is_connected = False
        index.process_gone("a")
        assert index.hits(following) == {}
    elif how == "silent":
        engine.blocks.is_live = False
        assert index.hits(following) == {}
    else:
        engine.blocks.apply(Removed([hash(prompt[:SIZE])]))
        assert index.hits(following) == {}


def test_a_popular_beginning_keeps_nothing_of_instances_that_left() -> None:
    """Autoscaling: each request begins with the system prompt, on instances that come and go."""
    index, system = PublishedIndex(1 << 20), ids(SIZE * 4, "system")
    for number in range(20):
        engine = Engine(index, f"a{number}")
        engine.serve((1,), system, ids(SIZE, number))
        index.close(engine.name, 0, engine.blocks)
    last = Engine(index, "last")
    last.serve((1,), system, ids(SIZE, "last"))
    assert [len(row) for row in index._ends.values()] == [1]


def test_blocks_of_two_ranks_are_two_sets() -> None:
    """Of several ranks the best counts."""
    index = PublishedIndex(1 << 30)
    engine = Engine(index)
    other: PublishedBlocks = index.open("a", 1)
    other.is_live = True
    engine.serve([1], ids(96, 1), ids(20, 2))
    assert index.hits(facts([1, 2, 3], 300)) == {"a": 112}
    assert len(index) == 7


def test_the_size_of_a_cache_is_what_it_held_when_it_began_to_evict() -> None:
    """Over all ranks; None while one of them has had room for everything."""
    index = PublishedIndex(1 << 30)
    engine = Engine(index)
    prompts = [ids(5 * SIZE, seed) for seed in range(3)]
    for prompt in prompts:
        engine.store(prompt)
    assert index.kv_tokens("a") is None
    engine.evict(prompts[0], 2)
    assert index.kv_tokens("a") == 15 * SIZE
    engine.store(ids(SIZE, 9))
    engine.evict(prompts[1], 1)
    assert index.kv_tokens("a") == 15 * SIZE
    index.open("a", 1)
    assert index.kv_tokens("a") is None
    assert index.kv_tokens("b") is None


@pytest.mark.parametrize("how", ["closed", "given up", "lost"])
def test_a_set_that_ended_is_asked_nothing(how: str) -> None:
    """Neither for hits nor for answers to compare: the conversation goes on elsewhere."""
    index = PublishedIndex(1 << 30)
    engine = Engine(index)
    engine.serve([1], ids(96, 1), ids(20, 2))
    following = facts([1, 2, 3], 300)
    assert index.hits(following) == {"a": 112}
    if how == "closed":
        index.close("a", 0, engine.blocks)
    elif how == "given up":
        engine.blocks.give_up()
    else:
        engine.blocks.renew(is_whole=False)
    assert index.hits(following) == {}
    assert index.doubted(1, "m") is None
    assert index.kv_tokens("a") is None
    index.ended(Ended("a", following, 0.0, "", 300, 300, 4, 0))


def test_a_publisher_that_contradicts_itself_leads_in_no_circle() -> None:
    index = PublishedIndex(1 << 30)
    blocks = Engine(index).blocks
    a, b = 1001, 1002

    def stored(name: int, parent: int | None) -> None:
        blocks.apply(Stored([name], parent, SIZE), [])

    stored(b, None)
    stored(a, b)
    blocks.apply(Removed([b]))
    stored(b, a)
    assert blocks.above(a, 1) in (None, a, b)
    assert blocks.above(b, 1) in (None, a, b)


def placed(engine: Engine, asked: RequestFacts) -> Claim:
    claim = engine.index.claim(asked, engine.name)
    assert claim is not None
    return claim


def by_ids(tokens: Tokens) -> RequestFacts:
    units = unit_hashes(packed(tokens), unit_root(""))
    return RequestFacts("m", None, len(tokens), (), 256.0, units=units)


def liar(index: PublishedIndex, tokens: Tokens) -> Engine:
    """An engine that publishes blocks of these tokens; the caller says what its answers find."""
    engine = Engine(index)
    names = [hash(tokens[: (at + 1) * SIZE]) for at in range(len(tokens) // SIZE)]
    keys = unit_hashes(packed(tokens), unit_root(""))
    per_block = SIZE // UNIT_TOKENS
    engine.blocks.apply(Stored(names, None, SIZE, packed(tokens)), keys[per_block - 1 :: per_block])
    return engine


def test_events_that_answers_refute_are_not_believed_until_they_agree_again() -> None:
    index, shared = PublishedIndex(1 << 24), ids(512, "shared")
    engine = liar(index, shared)
    prompts = [by_ids(shared + ids(40, seed)) for seed in range(12)]
    for prompt in prompts[:3]:
        assert index.hits(prompt) == {"a": 512}
        index.answered(placed(engine, prompt), 0)
    assert not index.is_believed("a", of_ids=True)
    assert index.hits(prompts[3]) == {}
    for prompt in prompts[4:7]:
        index.answered(placed(engine, prompt), 512)
    assert index.is_believed("a")
    assert index.hits(prompts[7]) == {"a": 512}


def test_one_prompt_that_is_asked_again_refutes_nothing() -> None:
    index, shared = PublishedIndex(1 << 24), ids(512, "shared")
    engine, prompt = liar(index, shared), by_ids(shared + ids(40, 1))
    for _ in range(20):
        index.answered(placed(engine, prompt), 0)
    assert index.is_believed("a")


@pytest.mark.parametrize("how", ["evicted", "evicted and back", "cleared", "closed", "reopened"])
def test_what_was_removed_meanwhile_refutes_nothing(how: str) -> None:
    for seed in range(6):
        index, shared = PublishedIndex(1 << 24), ids(512, "shared")
        engine = liar(index, shared)
        claim = placed(engine, by_ids(shared + ids(40, seed)))
        last = hash(shared)
        if how == "cleared":
            engine.blocks.apply(Cleared())
        elif how == "closed":
            index.close("a", 0, engine.blocks)
        elif how == "reopened":
            liar(index, shared)
        else:
            engine.blocks.apply(Removed([last]))
            if how == "evicted and back":
                engine.blocks.apply(Stored([last], hash(shared[:-SIZE]), SIZE))
        index.answered(claim, 0)
        assert index.is_believed("a")


def test_blocks_that_are_always_gone_are_of_no_use() -> None:
    """Removed and stored again for each request: a publisher could explain anything so."""
    index, shared = PublishedIndex(1 << 24), ids(512, "shared")
    engine, last = liar(index, shared), hash(shared)
    key = unit_hashes(packed(shared), unit_root(""))[-1]

    def ask(seed: int, found: int) -> None:
        claim = placed(engine, by_ids(shared + ids(40, seed)))
        engine.blocks.apply(Removed([last]))
        engine.blocks.apply(Stored([last], hash(shared[:-SIZE]), SIZE), [key])
        index.answered(claim, found)

    for seed in range(BELIEVED_GONE - 1):
        ask(seed, 0)
    ask(0, 512)
    for seed in range(BELIEVED_GONE - 1):
        ask(seed, 0)
    assert index.is_believed("a")
    ask(0, 0)
    assert not index.is_believed("a")


def test_of_several_ranks_the_least_claim_counts() -> None:
    """It is unknown which one serves; a rank without a claim may have been it."""
    index, shared = PublishedIndex(1 << 24), ids(512, "shared")
    liar(index, shared)
    other = index.open("a", 1)
    other.renew(is_whole=True)
    other.is_live = True
    assert index.claim(by_ids(shared + ids(40, 1)), "a") is None
    names = [hash(shared[: (at + 1) * SIZE]) for at in range(8)]
    keys = unit_hashes(packed(shared[: 8 * SIZE]), unit_root(""))
    other.apply(Stored(names, None, SIZE), keys[SIZE // UNIT_TOKENS - 1 :: SIZE // UNIT_TOKENS])
    for seed in range(9):
        claim = index.claim(by_ids(shared + ids(40, seed)), "a")
        assert claim is not None
        index.answered(claim, 128)
    assert index.is_believed("a")
    for seed in range(3):
        claim = index.claim(by_ids(shared + ids(40, seed)), "a")
        assert claim is not None
        index.answered(claim, 0)
    assert not index.is_believed("a")


def test_texts_that_are_read_otherwise_cost_token_ids_nothing() -> None:
    """What a text's messages are on the engine is a guess; token ids are none."""
    index = PublishedIndex(1 << 24)
    engine = Engine(index)
    talks = [Talk(seed) for seed in range(4)]
    for talk in talks:
        talk.turn(engine, 300, 40)
    for talk in talks:
        talk.ends.append(hash(talk.tokens) + 1)
        asked = facts(talk.ends, len(talk.tokens) + 60)
        claim = placed(engine, asked)
        assert not claim.is_of_ids
        assert claim.parts[0].tokens == 288, "without the answer"
        index.answered(claim, 0)
    assert not index.is_believed("a")
    assert index.is_believed("a", of_ids=True)
    assert index.hits(facts(talks[0].ends, 400)) == {}
    for talk in talks[:3]:
        index.answered(placed(engine, facts(talk.ends, 400)), 340)
    assert index.hits(facts(talks[0].ends, 400)) == {"a": 336}


def test_an_instance_that_leaves_takes_its_belief_along() -> None:
    index, shared = PublishedIndex(1 << 24), ids(512, "shared")
    engine = liar(index, shared)
    for seed in range(3):
        index.answered(placed(engine, by_ids(shared + ids(40, seed))), 0)
    index.close("a", 0, engine.blocks)
    assert not index._beliefs
