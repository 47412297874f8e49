"""What engines report corrects what is believed; siblings in flight are seen, and vanish."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.kvcache.engine_cache import EngineCache, Use
from proxy.core.kvcache.prefix_index import PrefixIndex
from proxy.core.kvcache.reuse import (
    JOIN_TOKENS,
    Reuse,
    cached_ratio,
    is_far_above,
    usage_ratio,
)
from proxy.core.types import RequestFacts
from replayer.engine.kvcache import BlockPool, Holding
from tests.support.examples import examples

BLOCK = 1000


def facts(*runs: tuple[int, int], tenant: str = "") -> RequestFacts:
    """A prompt of runs of blocks: (name of the run, how many)."""
    hashes = [name * 10_000 + i for name, count in runs for i in range(count)]
    tokens = len(hashes) * BLOCK + 500
    return RequestFacts("m", None, tokens, hashes, BLOCK, tenant=tenant)


def made() -> tuple[Reuse, PrefixIndex, EngineCache]:
    """Over an index in which there is `a` only."""
    index = PrefixIndex(1 << 20)
    return Reuse(index), index, EngineCache("a")


def doubted(a: EngineCache) -> None:
    """Another prompt lacks all that ever was there: the next one is believed."""
    a.witnesses["", "another"] = 1 << 60


def served(reuse: Reuse, a: EngineCache, f: RequestFacts, found: int | None = None) -> Use:
    """One whole request on `a`, whose engine finds so many blocks (None: it does not tell)."""
    use = reuse.begin_use(a, f)
    reuse.computed(use, f)
    if found is not None:
        reuse.reported(use, f, found * BLOCK / f.prompt_tokens)
    reuse.released(use, f)
    return use


OLD, MINE, NEW = facts((1, 20)), facts((2, 20)), facts((3, 20))


def test_a_shortfall_takes_along_what_was_used_before() -> None:
    reuse, index, a = made()
    for f in (OLD, MINE, NEW):
        served(reuse, a, f)
    doubted(a)
    served(reuse, a, MINE, found=0)
    assert index.held(a, OLD.block_hashes) == 0
    assert index.held(a, MINE.block_hashes) == 20  # computed again meanwhile
    assert index.capacity(a) == 20, "NEW had displaced all of MINE"
    assert index.held(a, NEW.block_hashes) == 0


def loud(count: int) -> list[RequestFacts]:
    return [facts((100 + n, 20), tenant="loud") for n in range(count)]


def test_prompts_of_one_tenant_take_along_what_is_its_own() -> None:
    """However many it has that the engine reads in another way than the index."""
    reuse, index, a = made()
    quiet = [facts((n, 20), tenant="quiet") for n in (1, 2, 3)]
    for f in (*quiet, *loud(6)):
        served(reuse, a, f)
    for f in loud(6)[1:]:
        served(reuse, a, f, found=0)
    assert [index.held(a, f.block_hashes) for f in quiet] == [20, 20, 20]
    assert index.capacity(a) is None, "the size of all that is there is not told by a tenant"
    assert index.held(a, loud(1)[0].block_hashes) == 0


def test_prompts_of_two_tenants_take_along_all() -> None:
    reuse, index, a = made()
    quiet = [facts((n, 20), tenant="quiet") for n in (1, 2, 3)]
    for f in (OLD, *quiet[1:], *loud(1)):
        served(reuse, a, f)
    served(reuse, a, loud(1)[0], found=0)
    served(reuse, a, quiet[2], found=0)
    assert [index.held(a, f.block_hashes) for f in (*quiet[:2], quiet[2])] == [0, 0, 20]
    assert index.capacity(a) is not None


def test_a_tenant_with_an_engine_of_its_own_is_believed() -> None:
    reuse, index, a = made()
    prompts = loud(4)
    for f in prompts:
        served(reuse, a, f)
    for f in prompts[2:]:
        served(reuse, a, f, found=0)
    assert [index.held(a, f.block_hashes) for f in prompts] == [0, 0, 0, 20]
    assert index.capacity(a) == 20


def test_answers_in_one_piece_show_whose_an_engine_is() -> None:
    """Their prompts are known to be computed when they end."""
    reuse, index, a = made()
    quiet = facts((1, 20), tenant="quiet")
    reuse.released(reuse.begin_use(a, quiet), quiet)
    for f in (*loud(3), *loud(3)):
        use = reuse.begin_use(a, f)
        reuse.reported(use, f, 0.0)
        reuse.released(use, f)
    assert index.held(a, quiet.block_hashes) == 20


def test_what_a_tenant_shares_is_not_its_own() -> None:
    reuse, index, a = made()
    for tenant in ("quiet", "loud"):
        served(reuse, a, facts((1, 20), tenant=tenant))
    for f in (*loud(3), *loud(3)):
        served(reuse, a, f, found=0)
    served(reuse, a, facts((1, 20), (2, 5), tenant="loud"), found=0)
    for f in loud(3):
        served(reuse, a, f, found=0)
    assert index.held(a, OLD.block_hashes) == 20


def test_what_a_predecessor_knew_is_anybodys() -> None:
    reuse, index, a = made()
    index.adopt(a, [list(OLD.block_hashes)])
    for f in (*loud(3), *loud(3)):
        served(reuse, a, f, found=0)
    assert index.held(a, OLD.block_hashes) == 20


@pytest.mark.parametrize("found", [5, 12, 17])
def test_what_is_left_of_a_prompt_shows_the_size(found: int) -> None:
    """An engine evicts no more than it must: it was full with that and what came later."""
    reuse, index, a = made()
    doubted(a)
    for f in (OLD, MINE, NEW):
        served(reuse, a, f)
    served(reuse, a, OLD, found)
    assert index.capacity(a) == 40 + found


def test_what_a_stream_has_held_since_before_is_a_part_of_the_size() -> None:
    """An engine evicts around it, so the oldest run is not always the next."""
    reuse, _index, a = made()
    doubted(a)
    stream = reuse.begin_use(a, OLD)
    reuse.computed(stream, OLD)
    for f in (MINE, NEW):
        served(reuse, a, f)
    served(reuse, a, MINE, 12)
    assert a.learned_tokens == (20 + 20 + 12) * BLOCK
    reuse.released(stream, OLD)


def test_a_shared_beginning_that_is_still_there_shows_a_bound_only() -> None:
    """It was used later than the rest of the prompt, so it says nothing of what is left of that."""
    reuse, index, a = made()
    one, other = facts((1, 10), (2, 20)), facts((1, 10), (4, 20))
    for f in (one, other, NEW):
        served(reuse, a, f)
    served(reuse, a, one, found=10)
    assert index.capacity(a) is None, "one may be a flushed cache"
    reuse, index, a = made()
    doubted(a)
    for f in (one, other, NEW):
        served(reuse, a, f)
    served(reuse, a, one, found=10)
    assert index.capacity(a) == 50, "the other and NEW"


def test_until_its_own_size_is_known_it_is_as_large_as_another() -> None:
    reuse, index, a = made()
    doubted(a)
    reuse.limit(a, None, None, MINE)
    assert index.capacity(a) is None
    reuse.limit(a, None, 60 * BLOCK, MINE)
    assert (index.capacity(a), a.learned_tokens) == (60, None)
    for f in (OLD, MINE, NEW):
        served(reuse, a, f)
    served(reuse, a, MINE, 0)
    reuse.limit(a, None, 60 * BLOCK, MINE)
    assert (index.capacity(a), a.learned_tokens) == (20, 20 * BLOCK)
    reuse.limit(a, 100 * BLOCK, 60 * BLOCK, MINE)
    assert (index.capacity(a), a.learned_tokens) == (100, None)


def test_a_size_that_is_only_assumed_grows_with_hits_that_nobody_expected() -> None:
    reuse, index, a = made()
    reuse.limit(a, None, 30 * BLOCK, MINE)
    for f in (OLD, MINE):
        served(reuse, a, f)
    served(reuse, a, OLD, 20)
    assert (index.capacity(a) or 0) > 30


@pytest.mark.parametrize("found", [20, 19, 18])
def test_what_was_found_is_confirmed(found: int) -> None:
    """Two blocks less are rounding, not eviction."""
    reuse, index, a = made()
    for f in (OLD, MINE):
        served(reuse, a, f)
    served(reuse, a, MINE, found)
    assert index.held(a, OLD.block_hashes) == 20
    assert index.capacity(a) is None


def test_a_run_as_short_as_the_rounding_proves_nothing() -> None:
    """Found or gone: of its two last blocks the answer cannot tell."""
    reuse, _index, a = made()
    mine = facts((1, 10), (2, 2))
    for f in (mine, facts((1, 10), (3, 20))):
        served(reuse, a, f)
    served(reuse, a, mine, 10)
    assert a.proven_blocks == 0


def test_what_may_be_rounding_is_not_proven() -> None:
    """Of a long prompt that much may as well be gone."""
    reuse, _index, a = made()
    mine = facts((2, 100))
    for f in (mine, NEW):
        served(reuse, a, f)
    served(reuse, a, mine, 92)
    assert a.proven_blocks == 20 + 92


def test_a_proof_that_answers_contradict_is_given_up_by_steps() -> None:
    reuse, index, a = made()
    doubted(a)
    a.proven_blocks = 80
    for _ in range(6):
        for f in (MINE, OLD, NEW):
            served(reuse, a, f)
        served(reuse, a, MINE, 5)
    assert index.capacity(a) == a.proven_blocks
    assert 45 <= a.proven_blocks < 60


def test_a_confirmed_prompt_is_the_newest() -> None:
    reuse, index, a = made()
    for f in (MINE, OLD):
        served(reuse, a, f)
    served(reuse, a, MINE, 20)
    index.limit(a, 20)
    assert (index.held(a, MINE.block_hashes), index.held(a, OLD.block_hashes)) == (20, 0)


def test_the_size_that_an_engine_reports_stands() -> None:
    reuse, index, a = made()
    doubted(a)
    reuse.limit(a, 100 * BLOCK, None, MINE)
    for f in (OLD, MINE):
        served(reuse, a, f)
    served(reuse, a, MINE, 0)
    assert index.capacity(a) == 100
    assert index.held(a, OLD.block_hashes) == 0


@pytest.mark.parametrize(
    ("reported", "changes", "seen"),
    [
        (True, (1.002, 0.998, 1.02, 0.9), [10_000, 10_000, 10_000, 9803, 11_111]),
        (False, (1.09, 0.92, 1.2), [10_000, 10_000, 10_000, 8333]),
    ],
)
def test_it_moves_only_where_that_is_more_than_noise(
    reported: bool, changes: tuple[float, ...], seen: list[int]
) -> None:
    """What a smaller one evicts does not come back; of 262,144 tokens 1 % is a turn."""
    reuse, index, a = made()
    tokens = 10_000 * BLOCK
    sizes = (tokens, None) if reported else (None, tokens)
    found = []
    for change in (1.0, *changes):
        reuse.limit(a, sizes[0], sizes[1], replace(MINE, block_tokens=BLOCK * change))
        found.append(index.capacity(a))
    assert found == seen


def test_a_learned_size_grows_with_hits_that_nobody_expected() -> None:
    reuse, index, a = made()
    for f in (OLD, MINE, NEW):
        served(reuse, a, f)
    doubted(a)
    served(reuse, a, MINE, 0)
    before = index.capacity(a) or 0
    served(reuse, a, OLD, 20)
    assert (index.capacity(a) or 0) > before


def test_one_flushed_cache_is_not_taken_for_a_small_one() -> None:
    reuse, index, a = made()
    for f in (OLD, MINE, NEW):
        served(reuse, a, f)
    served(reuse, a, OLD, 20)
    assert a.proven_blocks == 60
    doubted(a)
    for _ in range(3):
        served(reuse, a, MINE, 0)
    assert index.capacity(a) == 60, "it has held that before"


def test_a_size_that_was_never_shown_moves_down_by_steps() -> None:
    reuse, index, a = made()
    reuse.limit(a, None, 60 * BLOCK, MINE)
    for f in (OLD, MINE, NEW):
        served(reuse, a, f)
    seen = []
    for f in (OLD, OLD, NEW, OLD):
        served(reuse, a, f, 0)
        seen.append(index.capacity(a) or 0)
    assert seen[0] > 20
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < seen[0]


def test_kv_from_a_peer_is_no_hit() -> None:
    reuse, index, a = made()
    served(reuse, a, OLD)
    use = reuse.received(a, MINE)
    reuse.reported(use, MINE, 0.0)
    assert index.held(a, OLD.block_hashes) == index.held(a, MINE.block_hashes) == 20


LONG = -(-JOIN_TOKENS // BLOCK)


def test_a_sibling_counts_what_is_being_computed() -> None:
    reuse, index, a = made()
    first, second = facts((1, LONG), (2, 3)), facts((1, LONG), (3, 5))
    use = reuse.begin_use(a, first)
    assert reuse.hits(second) == {"a": LONG}
    other = reuse.begin_use(a, second)
    assert other.blocks == 0  # was not there: its lack is no eviction
    reuse.reported(other, second, 0.0)
    assert index.capacity(a) is None
    reuse.end_use(use)
    reuse.end_use(use)
    assert reuse.hits(first) == {}
    reuse.end_use(other)
    assert reuse.is_at_rest


def test_a_short_one_is_computed_twice() -> None:
    reuse, _, a = made()
    reuse.begin_use(a, facts((1, LONG - 1)))
    assert reuse.hits(facts((1, LONG - 1))) == {}


def test_what_comes_makes_place_when_it_is_placed_not_when_it_is_there() -> None:
    reuse, index, a = made()
    index.limit(a, 40)
    for f in (OLD, MINE):
        served(reuse, a, f)
    use = reuse.begin_use(a, NEW)
    assert (a.blocks, index.full_ratio(a)) == (20, 1.0)
    assert index.held(a, OLD.block_hashes) == 0
    reuse.computed(use, NEW)
    assert a.blocks == 40


def test_what_an_engine_says_that_it_has_counts_where_the_index_has_less() -> None:
    """That one lacks answers and other clients' prompts, and evicts in another order."""
    reuse, index, a = made()
    held = 20 * BLOCK
    index.limit(a, 40)
    for f in (OLD, MINE):
        served(reuse, a, f)
    use = reuse.begin_use(a, NEW)
    assert index.held(a, OLD.block_hashes) == 0, "displaced, as it believes"
    assert reuse.expected(a, OLD, held, 0, goes_on=False) == held
    assert reuse.expected(a, MINE, held - BLOCK, held, goes_on=False) == held - BLOCK
    reuse.end_use(use)


def test_events_do_not_tell_where_in_a_message_two_prompts_part() -> None:
    reuse, _, a = made()
    served(reuse, a, OLD)
    for goes_on, hit, expected in ((True, 15, 15), (False, 15, 10), (False, 5, 10)):
        told = reuse.expected(a, OLD, 10 * BLOCK, hit * BLOCK, goes_on=goes_on)
        assert told == expected * BLOCK
    above = [is_far_above(OLD, 10 * BLOCK, hit * BLOCK) for hit in (5, 10, 12, 13)]
    assert above == [False, False, False, True]


def test_events_do_not_tell_what_a_sibling_is_about_to_leave() -> None:
    reuse, _, a = made()
    first, second = facts((1, LONG), (2, 3)), facts((1, LONG), (3, 5))
    use = reuse.begin_use(a, first)
    hit = second.hit_tokens(reuse.hits(second)["a"])
    assert reuse.expected(a, second, 0, hit, goes_on=False) == hit >= JOIN_TOKENS
    reuse.computed(use, first)
    assert reuse.expected(a, second, 0, hit, goes_on=False) == 0, "computed, and evicted since"
    reuse.released(use, first)


def test_answers_take_room_until_the_next_turn_brings_their_blocks() -> None:
    reuse, index, a = made()
    index.limit(a, 50)
    for f in (OLD, MINE):
        use = reuse.begin_use(a, f)
        reuse.computed(use, f)
        reuse.released(use, f, 7 * BLOCK)
    assert (a.blocks, index.total_blocks) == (50, 50)
    assert index.held(a, OLD.block_hashes) == 20, "of the oldest its answer went first"
    index.limit(a, 44)
    assert (index.held(a, OLD.block_hashes), index.held(a, MINE.block_hashes)) == (17, 20)
    turn = facts((2, 30))
    use = reuse.begin_use(a, turn)
    reuse.computed(use, turn)
    assert (a.blocks, index.total_blocks) == (17 + 30 - 3, 44), "the answer is a part of it"
    assert index.held(a, turn.block_hashes) == 30
    reuse.released(use, turn, 2 * BLOCK)
    assert [len(run) for run in a.runs.rows()] == [12, 30], "nobody else can know an answer's"
    assert a.blocks == index.total_blocks == 44
    index.drop(a)
    assert index.total_blocks == 0


def test_what_is_in_use_stays() -> None:
    """An engine evicts what nobody runs on, however long ago it was used."""
    reuse, index, a = made()
    index.limit(a, 45)
    running = reuse.begin_use(a, OLD)
    reuse.computed(running, OLD)
    served(reuse, a, MINE)
    served(reuse, a, NEW)
    assert (index.held(a, OLD.block_hashes), index.held(a, MINE.block_hashes)) == (20, 5)
    reuse.end_use(running)
    served(reuse, a, facts((4, 30)))
    assert index.held(a, OLD.block_hashes) == 0


def test_what_ends_after_its_cache_was_lost_reaches_nobody() -> None:
    """Each use is ended by its own request, and what has the name now holds nothing of it."""
    reuse, index, lost = made()
    first = facts((1, LONG))
    ended, running, asked = (reuse.begin_use(lost, f) for f in (OLD, MINE, first))
    reuse.computed(running, MINE)
    index.drop(lost)
    a = EngineCache("a")
    index.insert(a, [7])
    assert reuse.hits(first) == {"a": 0}, "its sibling computes nowhere"
    reuse.computed(ended, OLD)
    reuse.reported(running, MINE, 0.0)
    reuse.released(running, MINE)
    reuse.end_use(asked)
    late = reuse.received(lost, NEW)
    reuse.end_use(late)
    reuse.end_use(ended)
    assert reuse.is_at_rest
    assert (a.blocks, index.total_blocks, index.capacity(a)) == (1, 1, None)
    assert not any(reuse.hits(f)["a"] for f in (OLD, MINE, NEW))


def test_ratio_of_a_usage() -> None:
    usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 25}}
    assert usage_ratio(usage) == 0.25
    odds: tuple[object, ...] = (None, [], {}, {"prompt_tokens": 5}, {"prompt_tokens_details": {}})
    for odd in odds:
        assert usage_ratio(odd) is None
    assert cached_ratio(5, 0) is None
    assert cached_ratio(9, 5) == 1.0


class EngineBeside:
    """vLLM's block pool, which computes prompts at once, in turn, each when there is room for it.

    Beside it the index, which is told what the proxy sees: placements, first tokens and ends.
    """

    BLOCKS = 24

    def __init__(self) -> None:
        self.reuse, self.index, self.cache = made()
        self.index.limit(self.cache, self.BLOCKS)
        self.pool = BlockPool(self.BLOCKS)
        self.queue: deque[tuple[RequestFacts, Use]] = deque()
        self.running: list[tuple[RequestFacts, Use, Holding]] = []

    def place(self, f: RequestFacts) -> None:
        self.queue.append((f, self.reuse.begin_use(self.cache, f)))
        self.start()

    def end(self, number: int) -> None:
        f, use, holding = self.running.pop(number % len(self.running))
        self.pool.release(holding)
        self.reuse.released(use, f)
        self.start()

    def start(self) -> None:
        while self.queue:
            f, use = self.queue[0]
            hashes = f.block_hashes
            hit = self.pool.match(hashes, len(hashes))
            if len(hashes) - hit > self.pool.room_beside(hashes[:hit]):
                return
            holding = Holding()
            self.pool.hold(holding, hashes[:hit])
            assert self.pool.allocate(holding, len(hashes) - hit)
            self.pool.publish(holding, hashes[hit:])
            self.queue.popleft()
            self.reuse.computed(use, f)
            self.running.append((f, use, holding))


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.booleans()), max_size=60))
def test_the_index_has_what_an_engine_has(steps: list[tuple[int, int, bool]]) -> None:
    """Where no prompt waits for room: block by block, for turns of sessions, siblings, repeats."""
    engine, seen = EngineBeside(), []
    for session, turn, ends in steps:
        if ends and engine.running:
            engine.end(session)
        else:
            f = facts((0, 2), (session, 2 * turn))
            seen.append(f.block_hashes)
            engine.place(f)
        if not engine.queue:
            for hashes in seen:
                expected = engine.pool.match(hashes, len(hashes))
                assert engine.index.held(engine.cache, hashes) == expected
