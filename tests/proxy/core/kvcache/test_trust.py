"""Key and session predict cached tokens; what engines report decides which one is believed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.kvcache.engine_cache import BLOCK_USUAL, EngineCache
from proxy.core.kvcache.sessions import Past
from proxy.core.kvcache.trust import (
    ENGINES_MAX,
    KIND_REPORTS,
    KINDS_MAX,
    LEAST_SCALE,
    MOST_SCALE,
    TENANTS_MAX,
    Kind,
    Trust,
)
from proxy.core.types import RequestFacts

BLOCK, ANSWER = 256.0, 100


def facts(tokens: int, client: str = "known", tenant: str = "") -> RequestFacts:
    return RequestFacts("m", "s", tokens, [1], BLOCK, tenant=tenant, client=client)


class Session:
    """A conversation on one engine that grows by `more` tokens a turn."""

    def __init__(self, trust: Trust, client: str = "known", more: int = 1000) -> None:
        self.trust, self.client, self.more = trust, client, more
        self.here, self.there = EngineCache("here"), EngineCache("there")
        self.past: Past | None = None
        self.is_doubted = False
        self.tokens = 10_000

    def turn(
        self, key: int, cached: int | None, elsewhere: int = 0, *, moves: bool = False
    ) -> list[int]:
        """What is believed of both engines; then one serves it, and tells `cached`.

        The first one, or the other where the session `moves`.
        """
        f = facts(self.tokens, self.client)
        caches = [self.here, self.there]
        keys = [key, elsewhere]
        believed, self.is_doubted = self.trust.believed(f, self.past, caches, keys, [False, False])
        counts = (self.tokens, cached, ANSWER)
        at = caches[moves]
        self.past = self.trust.told(f, self.past, at, keys[moves], counts, is_session=True)
        self.tokens += self.more
        return believed


Form = Callable[[int, int], tuple[int, int]]
"""Of a turn's number and prompt: what the key predicts, and what the engine finds."""
FORMS: dict[str, Form] = {
    "as the key": lambda turn, tokens: (tokens - 1000,) * 2 if turn else (0, 0),
    "dropped": lambda turn, tokens: (0, tokens - 1000 if turn else 0),
    "rendered": lambda _turn, _tokens: (0, 0),
    "not in the key": lambda turn, tokens: (tokens - 1000 if turn else 0, 0),
}


def errors(session: Session, form: str, turns: int) -> list[float]:
    """Errors of what is believed, as parts of the prompt."""
    found = []
    for turn in range(turns):
        tokens = session.tokens
        key, cached = FORMS[form](turn, tokens)
        found.append(abs(session.turn(key, cached)[0] - cached) / tokens)
    return found


class TestForms:
    """A client of a form that nobody has seen loses nothing after its third turn."""

    @given(st.sampled_from(sorted(FORMS)), st.sampled_from(sorted(FORMS)))
    def test_after_three_turns_the_prediction_holds(self, form: str, other: str) -> None:
        trust = Trust()
        errors(Session(trust, "another"), other, 6)
        assert max(errors(Session(trust, "mine"), form, 12)[3:]) < 0.05

    def test_a_second_session_of_its_kind_loses_less(self) -> None:
        trust = Trust()
        for _ in range(4):
            errors(Session(trust, "new"), "dropped", 6)
        assert max(errors(Session(trust, "new"), "dropped", 6)) < 0.05

    def test_what_is_never_found_is_expected_nowhere(self) -> None:
        trust = Trust()
        for _ in range(8):
            errors(Session(trust, "new"), "not in the key", 6)
        last = Session(trust, "new")
        last.turn(0, 0)
        here, there = last.turn(10_000, 0, elsewhere=9000)
        assert here < 300
        assert there == 0
        alone = trust.believed(facts(10_000, "new"), None, [last.here], [9000], [False])
        assert alone == ([0], False)

    def test_a_session_is_not_drawn_to_where_it_was_before(self) -> None:
        """What is not found at home is not found there either."""
        session = Session(Trust(), "new")
        errors(session, "not in the key", 4)
        assert max(session.turn(0, 0, elsewhere=10_000)) < 200

    def test_other_kinds_are_left_alone(self) -> None:
        trust = Trust()
        errors(Session(trust, "known"), "as the key", 8)
        for _ in range(20):
            errors(Session(trust, "odd"), "not in the key", 6)
        assert max(errors(Session(trust, "known"), "as the key", 8)) < 0.02


class TestBesideAKindWhoseKeysAreRight:
    """Sessions of one client, of which only some are of a form that nobody has seen."""

    def one(self, turns: int = 1) -> Session:
        trust = Trust()
        errors(Session(trust), "as the key", 8)
        session = Session(trust)
        errors(session, "dropped", turns)
        return session

    def test_what_its_home_has_is_doubted_until_an_answer_tells(self) -> None:
        session = self.one()
        session.turn(0, 10_000)
        assert session.is_doubted
        other = self.one(0)
        errors(other, "as the key", 3)
        other.turn(0, 0)
        assert not other.is_doubted

    @pytest.mark.parametrize("found", [600, 8000])
    def test_a_move_shows_that_the_key_is_wrong(self, found: int) -> None:
        """Of what others have left there the key saw nothing."""
        session = self.one()
        session.turn(0, found, moves=True)
        session.here, session.there = session.there, session.here
        believed = session.turn(0, 11_000)[0]
        assert believed == (pytest.approx(11_000, rel=0.02) if found == 8000 else 0)

    def test_a_move_where_nothing_was_shows_nothing(self) -> None:
        session = self.one()
        session.turn(0, 0, moves=True)
        assert session.past is not None
        assert not session.past.reports


class TestOneReport:
    def test_one_eviction_is_forgotten(self) -> None:
        session = Session(Trust())
        errors(session, "as the key", 5)
        session.turn(session.tokens - 1000, 0)
        assert max(errors(session, "as the key", 4)[1:]) < 0.02

    def test_an_eviction_that_the_index_knows_is_believed(self) -> None:
        """The session knows of none."""
        session = Session(Trust())
        errors(session, "as the key", 5)
        assert session.turn(0, 0) == [0, 0]

    def test_a_prompt_begun_anew_is_not_taken_for_the_next_turn(self) -> None:
        session = Session(Trust(), "new")
        session.turn(0, 0)
        session.tokens = 3000
        assert session.turn(0, 0) == [0, 0]

    def test_another_instance_has_no_part_in_it(self) -> None:
        session = Session(Trust())
        errors(session, "as the key", 3)
        elsewhere = EngineCache("third")
        f = facts(session.tokens)
        assert session.trust.believed(f, session.past, [elsewhere], [700], [False]) == (
            [700],
            False,
        )


class TestAgreement:
    def test_within_a_block_the_engines_own_count_is_taken(self) -> None:
        session = Session(Trust())
        errors(session, "as the key", 3)
        believed = session.turn(session.tokens - 1100, session.tokens - 1000)[0]
        assert abs(believed - (session.tokens - 2000)) <= ANSWER

    def test_what_an_engine_publishes_is_taken_as_it_is(self) -> None:
        session = Session(Trust())
        errors(session, "as the key", 3)
        f, key = facts(session.tokens), session.tokens - 1100
        assert session.trust.believed(f, session.past, [session.here], [key], [True]) == (
            [key],
            False,
        )

    @given(st.integers(1, 100_000), st.integers(0, 120_000), st.integers(0, 100_000))
    def test_a_prediction_is_less_than_the_prompt(self, tokens: int, key: int, cached: int) -> None:
        session = Session(Trust())
        for _ in range(3):
            session.tokens = tokens
            believed = session.turn(min(key, tokens - 1), min(cached, tokens))
            assert 0 <= believed[0] < tokens

    def test_an_engine_that_tells_no_hits_is_counted_all_the_same(self) -> None:
        session = Session(Trust())
        session.turn(0, None)
        session.turn(9000, None)
        assert session.past is not None
        assert (session.past.prompt_tokens, session.past.reports) == (11_000, 0)


class TestSize:
    """How long a prompt is, by what its session's last one was counted as."""

    @given(st.floats(0.2, 5.0), st.integers(1000, 100_000), st.integers(-900, 5000))
    def test_it_follows_the_count(self, density: float, tokens: int, more: int) -> None:
        session = Session(Trust())
        session.tokens = tokens
        f = facts(tokens)
        counted = max(1, round(tokens * density))
        session.past = session.trust.told(
            f, None, session.here, 0, (counted, 0, 1), is_session=True
        )
        following = facts(tokens + more)
        session.trust.refine(following, session.past)
        bounded = min(MOST_SCALE, max(LEAST_SCALE, density))
        least = bounded * (tokens + more) if more < 0 else counted + bounded * more
        assert abs(following.prompt_tokens - least) <= 2
        assert following.estimate == tokens + more

    def test_blocks_and_tokens_are_the_reverse_of_each_other(self) -> None:
        f = RequestFacts("m", None, 9000, range(20), BLOCK, media=[(2.5, 1000), (2.6, 500)])
        f.scale = 1.1
        for blocks in range(1, 20):
            assert abs(f.blocks_of(f.hit_tokens(blocks)) - blocks) < 0.01


class TestBounds:
    def test_a_tenant_has_its_share_of_kinds(self) -> None:
        trust = Trust()
        cache = EngineCache("a")
        for at in range(3 * KINDS_MAX):
            trust.told(facts(100, f"c{at}", "loud"), None, cache, 0, (100, 0, 1), is_session=False)
        trust.told(facts(100, "c", "quiet"), None, cache, 0, (100, 0, 1), is_session=False)
        assert len(trust) == KINDS_MAX + 1

    def test_tenants_are_bounded_too(self) -> None:
        trust = Trust()
        for at in range(TENANTS_MAX + 9):
            one = facts(100, "c", f"t{at}")
            trust.told(one, None, EngineCache("a"), 0, (100, 0, 1), is_session=False)
        assert len(trust) == TENANTS_MAX

    def test_a_few_reports_are_not_a_kinds_record(self) -> None:
        trust = Trust()
        cache = EngineCache("a")
        for _ in range(KIND_REPORTS - 1):
            trust.told(facts(9000), None, cache, 8000, (9000, 0, 1), is_session=False)
        assert trust.believed(facts(9000), None, [cache], [8000], [False]) == ([8000], False)


class TestEngines:
    def test_an_engine_that_keeps_nothing_is_expected_to_have_nothing(self) -> None:
        """Though it computes what it is sent, so that the key has all of it there."""
        trust = Trust()
        bad, good = EngineCache("bad"), EngineCache("good")

        def ask(cache: EngineCache, cached: int) -> list[int]:
            f = facts(10_000)
            believed, _ = trust.believed(f, None, [bad, good], [9000, 9000], [False, False])
            trust.told(f, None, cache, 9000, (10_000, cached, ANSWER), is_session=False)
            return believed

        for _ in range(3):
            assert ask(bad, 0) == [9000, 9000]
            assert ask(good, 9000) == [9000, 9000]
        assert ask(bad, 0) == [9000, 9000]
        assert ask(good, 9000) == [0, 9000]
        assert trust.believed(facts(10_000), None, [bad], [9000], [True])[0] == [9000]
        assert trust.believed(facts(10_000, "other"), None, [bad], [9000], [False])[0] == [9000]
        ask(bad, 9000)
        assert ask(good, 9000) == [9000, 9000]

    @given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 9000)), max_size=600))
    def test_what_is_known_of_engines_is_bounded(self, told: list[tuple[int, int]]) -> None:
        kind = Kind()
        for at, part in told:
            kind.found(f"e{at}", part / 9000)
        assert len(kind.found_at) <= ENGINES_MAX


class TestEngineBlocks:
    """An engine's own blocks, as the cached tokens of its answers show them."""

    @given(st.integers(1, 256), st.lists(st.integers(1, 5000), min_size=30, max_size=40))
    def test_they_are_what_all_counts_have_in_common(self, size: int, counts: list[int]) -> None:
        cache = EngineCache("a")
        for count in (0, size, *[count * size for count in counts]):
            cache.note_found(count)
            assert size % math.gcd(size, cache.engine_block_tokens) == 0
        assert cache.engine_block_tokens % size == 0 or cache.engine_block_tokens == size

    def test_one_prompt_again_and_again_shows_nothing(self) -> None:
        cache = EngineCache("a")
        for _ in range(20):
            cache.note_found(14_096)
        assert cache.engine_block_tokens == BLOCK_USUAL

    def test_a_prediction_is_whole_blocks(self) -> None:
        session = Session(Trust())
        session.turn(0, 0)
        assert session.past is not None
        assert session.past.predicted(20_000) == (10_000 + ANSWER // 2) // 16 * 16
