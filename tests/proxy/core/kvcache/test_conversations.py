"""Which session a request is a turn of: names that come back, prompts that go on, and neither."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.kvcache.conversations import MOST_ALIKE, MOST_BESIDE, Begun, Conversations
from proxy.core.kvcache.sessions import Sessions, Stay
from proxy.core.types import RequestFacts
from tests.support.caches import Caches
from tests.support.examples import examples

TTL_S, MOST, BLOCK = 100.0, 64, 256


class Fleet:
    """A table of sessions, and requests that are placed and answered at once."""

    def __init__(self, most: int = MOST, ttl_s: float = TTL_S) -> None:
        self.sessions = Sessions(ttl_s, most)
        self.known = Conversations(self.sessions, most, ttl_s)
        self.at = Caches()
        self.now_s = 0.0

    def begin(self, facts: RequestFacts, instance: str = "a") -> tuple[str | None, Stay | None]:
        """Where its home is, and its stay on `instance`, where it is placed."""
        found = self.known.find(facts, self.now_s)
        home = found.home
        return home, self.known.assign(found, facts, self.at[instance], self.now_s, 0)

    def serve(self, facts: RequestFacts, instance: str = "a") -> tuple[str | None, int | None]:
        """Its home, and its turn where it is one."""
        home, stay = self.begin(facts, instance)
        if stay is None:
            return home, None
        turn = stay.turn if stay.key else None
        self.sessions.ended(stay, facts.prompt_tokens + 10, self.now_s)
        return home, turn

    @property
    def live_tokens(self) -> dict[str, int]:
        """KV tokens of the sessions on each instance, running or not."""
        lives = {name: self.sessions.live(self.at[name]) for name in "ab"}
        return {name: live.running + live.idle_tokens for name, live in lives.items()}


def asks(
    texts: Sequence[str],
    name: str | None = None,
    *,
    own_id: str | None = None,
    tenant: str = "",
    tokens: int | None = None,
    takes_turn: bool = True,
    has_tails: bool = False,
) -> RequestFacts:
    """A request whose prompt has these messages, each a block of its own."""
    chain = [hash(tuple(texts[: n + 1])) for n in range(len(texts))]
    size = BLOCK * len(texts) if tokens is None else tokens
    return RequestFacts(
        *("m", name, size, chain, BLOCK),
        ends=[end ^ 1 for end in chain],
        own_id=own_id,
        tenant=tenant,
        takes_turn=takes_turn,
        tails=[hash(tuple(texts[n - 2 : n])) for n in range(2, len(texts) + 1)]
        if has_tails
        else (),
    )


MAIN = [f"main {n}" for n in range(200)]


class TestNames:
    def test_a_name_is_a_session_from_its_first_turn_on(self) -> None:
        fleet = Fleet()
        turns = [fleet.serve(asks(MAIN[:n], "s")) for n in (20, 22, 24)]
        assert turns == [(None, 0), ("a", 1), ("a", 2)]

    def test_a_title_takes_no_turn_and_moves_no_home(self) -> None:
        fleet = Fleet()
        title = asks(["make a title", "hi"], "s")
        fleet.serve(asks(MAIN[:20], "s"), "a")
        before = fleet.live_tokens
        assert fleet.serve(title, "b") == (None, None)
        assert fleet.live_tokens == before
        assert fleet.serve(asks(MAIN[:22], "s"), "a") == ("a", 1)

    def test_a_title_that_comes_first_leaves_the_session_its_first_turn(self) -> None:
        fleet = Fleet()
        fleet.serve(asks(["make a title", "hi"], "s"), "b")
        turns = [fleet.serve(asks(MAIN[:n], "s")) for n in (20, 22)]
        assert turns == [(None, 0), ("a", 1)]
        assert fleet.live_tokens["b"] == 0

    def test_a_title_without_a_whole_block_leaves_it_no_less(self) -> None:
        """A larger prompt that follows may as well be the next one of a user."""
        fleet = Fleet()
        title = asks(["title"], "s", tokens=40)
        title.block_hashes = []
        fleet.serve(title, "b")
        turns = [fleet.serve(asks(MAIN[:n], "s"), "b") for n in (20, 22)]
        assert turns == [("b", 0), ("b", 1)]
        assert fleet.live_tokens["b"] == 22 * BLOCK + 10

    def test_a_title_that_still_runs_as_the_first_turn_comes(self) -> None:
        fleet = Fleet()
        _home, title = fleet.begin(asks(["make a title", "hi"], "s"), "b")
        assert fleet.serve(asks(MAIN[:20], "s")) == (None, 0)
        assert title is not None
        fleet.sessions.ended(title, 600, fleet.now_s)
        assert fleet.serve(asks(MAIN[:22], "s")) == ("a", 1)
        assert fleet.live_tokens["b"] == 0

    def test_a_title_that_is_longer_than_the_first_turn(self) -> None:
        fleet = Fleet()
        fleet.serve(asks(MAIN[:2], "s"), "a")
        fleet.serve(asks(["a title", *MAIN[:2], "of", "at most", "five", "words"], "s"), "b")
        told = [fleet.serve(asks(MAIN[:n], "s"), "a") for n in (4, 6, 8)]
        assert told == [("a", 1), ("a", 2), ("a", 3)]

    def test_titles_that_come_back_get_a_place_beside_the_session(self) -> None:
        fleet = Fleet()
        fleet.serve(asks(MAIN[:20], "s"), "a")
        assert fleet.serve(asks(["make a title", "hi"], "s"), "b") == (None, None)
        assert fleet.serve(asks(["make a title", "ho"], "s"), "b") == ("b", 1)
        assert fleet.serve(asks(MAIN[:22], "s"), "a") == ("a", 2)

    def test_an_agent_without_a_name_of_its_own_gets_its_own_place(self) -> None:
        """Its second request shows that it goes on; its parent is where it was."""
        fleet = Fleet()
        other = [f"agent {n}" for n in range(40)]
        fleet.serve(asks(MAIN[:40], "s"), "a")
        homes = [fleet.serve(asks(other[:n], "s"), "b")[0] for n in (20, 22, 24)]
        assert homes == [None, "b", "b"]
        assert fleet.serve(asks(MAIN[:42], "s"), "a")[0] == "a"
        live = fleet.live_tokens
        assert live == {"a": 42 * BLOCK + 10, "b": 24 * BLOCK + 10}

    def test_turns_of_a_name_are_counted_once_each(self) -> None:
        fleet = Fleet()
        other = ["agent 0", "agent 1", "agent 2", "agent 3"]
        told = [fleet.serve(asks(MAIN[:20], "s")), fleet.serve(asks(MAIN[:22], "s"))]
        told += [fleet.serve(asks(other[:n], "s")) for n in (2, 3, 4)]
        told += [fleet.serve(asks(MAIN[:24], "s")), fleet.serve(asks(other[:4], "s"))]
        assert [turn for _home, turn in told] == [0, 1, None, 2, 3, 4, 5]

    def test_a_compaction_that_keeps_the_beginning_is_the_next_turn(self) -> None:
        fleet = Fleet()
        told = [fleet.serve(asks(MAIN[:40], "s")), fleet.serve(asks(MAIN[:42], "s"))]
        told += [fleet.serve(asks([*MAIN[:2], "summary"], "s"))]
        assert told == [(None, 0), ("a", 1), ("a", 2)]

    def test_a_new_form_that_comes_back_is_followed(self) -> None:
        fleet = Fleet()
        for n in (40, 42, 44):
            fleet.serve(asks(MAIN[:n], "s"), "a")
        new = ["new system", "summary", "go on", "yes"]
        assert fleet.serve(asks(new[:3], "s"), "b") == (None, None)
        assert fleet.serve(asks(new[:4], "s"), "b") == ("b", 3)

    def test_prompts_that_never_begin_alike_are_turns_as_long_as_they_grow(self) -> None:
        """A client that writes the time into the first line of each request."""
        fleet = Fleet()
        told = [fleet.serve(asks([f"at {n}", *MAIN[:n]], "s")) for n in range(20, 40, 2)]
        assert told == [(None, 0), *[("a", n) for n in range(1, 10)]]

    def test_such_a_session_is_followed_when_it_has_become_shorter(self) -> None:
        fleet = Fleet()
        for n in (60, 62):
            fleet.serve(asks([f"at {n}", *MAIN[:n]], "s"))
        told = [fleet.serve(asks([f"now {n}", *MAIN[:n]], "s"))[1] for n in (20, 22, 24, 26)]
        assert told == [None, None, 2, 3]

    def test_short_prompts_are_compared_by_their_first_message(self) -> None:
        fleet = Fleet()

        def short(*texts: str, tokens: int) -> RequestFacts:
            facts = asks(texts, "s", tokens=tokens)
            facts.block_hashes = []
            return facts

        told = [fleet.serve(short("hello", tokens=40))]
        told += [fleet.serve(short("title", "hello", tokens=20))]
        told += [fleet.serve(short("hello", "yes", "and?", tokens=60))]
        told += [fleet.serve(asks(["hello", "yes", "and?", "so"], "s"))]
        assert [turn for _home, turn in told] == [0, None, 1, 2]

    def test_without_anything_to_compare_a_name_is_believed(self) -> None:
        fleet = Fleet()
        bare = RequestFacts("m", "s", 10, [], BLOCK)
        assert [fleet.serve(bare)[1] for _ in range(3)] == [0, 1, 2]

    def test_what_computes_no_prompt_takes_no_turn(self) -> None:
        fleet = Fleet()
        counts = asks([], "s", tokens=1, takes_turn=False)
        assert fleet.serve(counts, "b") == (None, None)
        told = [fleet.serve(asks(MAIN[:20], "s"), "a"), fleet.serve(counts, "b")]
        told += [fleet.serve(asks(MAIN[:22], "s"), "a")]
        assert told == [(None, 0), (None, None), ("a", 1)]

    def test_a_name_whose_home_is_lost_begins_anew_with_any_form(self) -> None:
        fleet = Fleet()
        fleet.serve(asks(MAIN[:20], "s"))
        fleet.at["a"].is_lost = True
        assert fleet.serve(asks(["other"], "s"), "b") == (None, 0)

    def test_the_end_of_a_session_ends_what_is_beside_it(self) -> None:
        fleet = Fleet()
        fleet.serve(asks(MAIN[:20], "s"))
        for text in ("hi", "ho"):
            fleet.serve(asks(["make a title", text], "s"))
        assert len(fleet.sessions) == 2
        assert fleet.known.end_session("s")
        assert not len(fleet.sessions)
        assert not fleet.known.end_session("s")

    def test_the_places_beside_a_session_are_bounded(self) -> None:
        fleet = Fleet()
        fleet.serve(asks(MAIN[:20], "s"))
        for n in range(2 * MOST_BESIDE):
            for text in ("hi", "ho"):
                fleet.serve(asks([f"helper {n}", text], "s"))
        assert len(fleet.sessions) == 1 + MOST_BESIDE

    def test_another_process_knows_a_title_from_a_turn(self) -> None:
        old, new = Fleet(), Fleet()
        for n in (20, 22):
            old.serve(asks(MAIN[:n], "s"))
        (row,) = old.sessions.rows()
        new.sessions.adopt([("s", new.at["a"], *row[2:])])
        assert new.serve(asks(["make a title", "hi"], "s"), "b") == (None, None)
        assert new.serve(asks(MAIN[:24], "s"), "a") == ("a", 2)


class TestOwnIds:
    def test_an_id_is_a_session_once_it_has_come_back(self) -> None:
        """AIPerf's use: the only name, the same in all turns."""
        fleet = Fleet()
        told = [fleet.serve(asks(MAIN[:n], own_id="c"), "b") for n in (4, 6, 8)]
        assert told == [(None, None), ("b", 1), ("b", 2)]

    def test_then_it_is_the_requests_name(self) -> None:
        fleet = Fleet()
        first, second = (asks(MAIN[:n], own_id="c") for n in (4, 6))
        fleet.serve(first)
        fleet.serve(second)
        assert (first.session_id, second.session_id) == (None, "c")

    def test_fresh_ids_are_no_sessions(self) -> None:
        fleet = Fleet()
        for n in range(10):
            assert fleet.serve(asks(["the same"], own_id=f"c{n}")) == (None, None)
        assert not len(fleet.sessions)
        assert fleet.live_tokens == {"a": 0, "b": 0}

    def test_a_request_again_that_nothing_was_computed_of_has_not_come_back(self) -> None:
        fleet = Fleet()
        _home, stay = fleet.begin(asks(MAIN[:4], own_id="c"))
        assert stay is not None
        fleet.sessions.ended(stay, None, 0.0)
        assert fleet.serve(asks(MAIN[:4], own_id="c")) == (None, None)
        assert fleet.serve(asks(MAIN[:6], own_id="c")) == ("a", 1)

    def test_a_second_request_beside_the_first_has_come_back(self) -> None:
        fleet = Fleet()
        _home, first = fleet.begin(asks(MAIN[:4], own_id="c"), "a")
        home, second = fleet.begin(asks(MAIN[:4], own_id="c"), "b")
        assert home == "a"
        assert first is second
        assert second is not None
        fleet.sessions.ended(second, 2000, 0.0)
        fleet.sessions.ended(second, 2000, 0.0)
        assert fleet.live_tokens == {"a": 0, "b": 2000}

    def test_an_id_is_forgotten_after_its_time(self) -> None:
        fleet = Fleet()
        fleet.serve(asks(MAIN[:4], own_id="c"))
        fleet.now_s = TTL_S + 1
        assert fleet.serve(asks(MAIN[:6], own_id="c")) == (None, None)


class TestPrompts:
    def test_a_conversation_without_a_name_is_one_from_its_second_turn_on(self) -> None:
        fleet = Fleet()
        told = [fleet.serve(asks(MAIN[:n]), "b") for n in (2, 4, 7, 12)]
        assert told == [(None, None), ("b", 1), ("b", 2), ("b", 3)]
        assert fleet.live_tokens == {"a": 0, "b": 12 * BLOCK + 10}

    def test_fresh_ids_of_requests_do_not_hide_it(self) -> None:
        fleet = Fleet()
        told = [fleet.serve(asks(MAIN[:n], own_id=f"c{n}")) for n in (2, 4, 6)]
        assert told == [(None, None), ("a", 1), ("a", 2)]

    def test_single_requests_that_begin_alike_are_none(self) -> None:
        fleet = Fleet()
        for n in range(9):
            fleet.serve(asks(["system", f"question {n}"]))
        assert not len(fleet.sessions)
        assert fleet.live_tokens == {"a": 0, "b": 0}

    def test_conversations_with_the_same_first_turn_are_kept_apart(self) -> None:
        fleet = Fleet()
        for instance in "ab":
            fleet.serve(asks(["system", "task"]), instance)
        answers = {"a": ["one"], "b": ["two"]}
        homes = []
        for n in range(4):
            for instance, texts in answers.items():
                prompt = ["system", "task", *texts]
                homes.append(fleet.serve(asks([*prompt, f"go on {n}"]), instance)[0])
                texts += [f"go on {n}", f"{instance} {n}"]
        assert homes == ["a", "b"] * 4
        assert len(fleet.sessions) == 2

    def test_conversations_in_step_stay_as_many(self) -> None:
        """The same texts in all of them, as in a benchmark."""
        fleet = Fleet()
        for n in (2, 4, 6, 8):
            stays = [fleet.begin(asks(MAIN[:n]))[1] for _ in range(4)]
            for stay in stays:
                assert stay is not None
                fleet.sessions.ended(stay, n * BLOCK, 0.0)
        assert len(fleet.sessions) == 4

    def test_the_same_request_again_is_the_same_turn(self) -> None:
        fleet = Fleet()
        fleet.serve(asks(MAIN[:2]))
        fleet.serve(asks(MAIN[:4]))
        _home, stay = fleet.begin(asks(MAIN[:6]))
        assert stay is not None
        fleet.sessions.ended(stay, None, 0.0)
        assert fleet.serve(asks(MAIN[:6])) == ("a", 2)
        assert len(fleet.sessions) == 1

    def test_a_prompt_that_begins_otherwise_each_time_goes_on_where_its_last_messages_did(
        self,
    ) -> None:
        fleet = Fleet()
        turns = [[f"line {n}", *MAIN[1:n]] for n in (4, 6, 8, 9)]
        found = [fleet.serve(asks(turn, has_tails=True)) for turn in turns]
        assert found == [(None, None), ("a", 1), ("a", 2), ("a", 3)]
        assert len(fleet.known.begun) == 2  # the last prompt's end, and its tail

    def test_what_a_prompt_goes_on_with_counts_more_than_its_last_messages(self) -> None:
        fleet = Fleet()
        for place, line in (("a", "one"), ("b", "other")):
            fleet.serve(asks([line, *MAIN[1:4]], has_tails=True), place)
        for place, line in (("b", "other"), ("a", "one")):
            home, _ = fleet.serve(asks([line, *MAIN[1:6]], has_tails=True), place)
            assert home == place

    def test_the_same_last_messages_at_once_are_other_conversations(self) -> None:
        fleet = Fleet()
        for line in "abc":
            assert fleet.serve(asks([line, *MAIN[1:4]], has_tails=True)) == (None, None)

    def test_another_branch_is_another_conversation(self) -> None:
        fleet = Fleet()
        for n in (2, 4, 6):
            fleet.serve(asks(MAIN[:n]), "a")
        assert fleet.serve(asks([*MAIN[:4], "edited"]), "b") == (None, None)
        assert fleet.serve(asks(MAIN[:8]), "a") == ("a", 3)

    def test_a_prompt_of_another_tenant_is_not_gone_on_with(self) -> None:
        fleet = Fleet()
        fleet.serve(asks(MAIN[:2], tenant="x"))
        assert fleet.serve(asks(MAIN[:4], tenant="y")) == (None, None)
        assert fleet.serve(asks(MAIN[:4], tenant="x")) == ("a", 1)

    def test_a_first_request_that_moved_is_at_home_where_it_ended(self) -> None:
        fleet = Fleet()
        _home, stay = fleet.begin(asks(MAIN[:2]), "a")
        assert stay is not None
        fleet.sessions.move(stay, fleet.at["b"])
        fleet.sessions.ended(stay, 600, 0.0)
        assert fleet.serve(asks(MAIN[:4]), "b") == ("b", 1)

    def test_a_lost_instance_is_nobodys_home(self) -> None:
        fleet = Fleet()
        fleet.serve(asks(MAIN[:2]), "a")
        fleet.at["a"].is_lost = True
        assert fleet.serve(asks(MAIN[:4]), "b") == (None, None)

    def test_they_are_in_no_snapshot(self) -> None:
        fleet = Fleet()
        for n in (2, 4):
            fleet.serve(asks(MAIN[:n]))
        fleet.serve(asks(["x"], "named"))
        assert [row[0] for row in fleet.sessions.rows()] == ["named"]


class TestBounds:
    def test_what_may_become_a_session_is_bounded(self) -> None:
        fleet = Fleet(most=8)
        for n in range(100):
            fleet.serve(asks([f"once {n}"], own_id=f"c{n}"))
        assert len(fleet.known.begun) <= 8

    def test_the_same_prompt_counts_a_few_times_only(self) -> None:
        fleet = Fleet()
        for _ in range(50):
            fleet.serve(asks(["the same"]))
        assert len(fleet.known.begun) == MOST_ALIKE

    def test_a_tenant_that_fills_it_loses_its_own(self) -> None:
        fleet = Fleet(most=8)
        fleet.serve(asks(["quiet"], tenant="quiet"))
        for n in range(100):
            fleet.serve(asks([f"once {n}"], tenant="loud"))
        assert fleet.serve(asks(["quiet", "on"], tenant="quiet")) == ("a", 1)

    def test_a_tenant_that_repeats_itself_loses_its_own(self) -> None:
        """Of few prompts, each many times."""
        fleet = Fleet()
        for n in range(100):
            for _ in range(MOST_ALIKE):
                fleet.serve(asks([f"loud {n}"], tenant="loud"))
        quiet = [[f"quiet {n}"] for n in range(MOST // 2)]
        for said in quiet:
            fleet.serve(asks(said, tenant="quiet"))
        turns = [fleet.serve(asks([*said, "on"], tenant="quiet")) for said in quiet]
        assert turns == [("a", 1)] * len(quiet)

    def test_what_is_too_old_leaves(self) -> None:
        fleet = Fleet()
        for n in range(20):
            fleet.serve(asks([f"once {n}"]))
        fleet.now_s = TTL_S + 1
        fleet.serve(asks(["late"]))
        assert len(fleet.known.begun) == 1


@settings(max_examples=examples(300))
@given(
    st.integers(1, 24),
    st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 4), st.booleans()), max_size=80),
)
def test_only_who_has_a_share_of_what_has_begun_loses_some_to_another(
    most: int, asked: list[tuple[str, int, bool]]
) -> None:
    """And nobody is counted who has nothing there."""
    begun, at, kept = Begun(most, TTL_S), Caches(), dict.fromkeys("xyz", 0)
    for tenant, evidence, is_shown in asked:
        if is_shown and (first := begun.first(tenant, evidence, 0.0)) is not None:
            begun.remove(tenant, evidence, first)
            kept[tenant] -= 1
        else:
            begun.add(tenant, evidence, Stay(at["a"], 0, 0.0), 0.0)
            kept[tenant] += 1
        left = {name: _begun_by(begun, name) for name in kept}
        share = most / sum(count > 0 for count in kept.values()) if any(kept.values()) else 0
        for name, count in left.items():
            assert name == tenant or count == kept[name] or kept[name] >= share
        kept = left
        assert len(begun) == sum(kept.values()) <= most
        assert begun._of.keys() == {name for name, count in kept.items() if count}


def _begun_by(begun: Begun, tenant: str) -> int:
    theirs = begun._of.get(tenant)
    return 0 if theirs is None else sum(len(stays) for stays in theirs.by_evidence.values())


texts = st.lists(st.sampled_from("abc"), min_size=1, max_size=4)
requests = st.tuples(
    texts,
    st.sampled_from([None, "s", "t"]),
    st.sampled_from([None, "c", "d"]),
    st.sampled_from(["", "x", "y"]),
    st.sampled_from("ab"),
    st.integers(0, 2),
    st.booleans(),
)


@pytest.mark.long
@settings(max_examples=examples(300))
@given(st.lists(requests, max_size=40))
@pytest.mark.parametrize("most", [3, MOST])
def test_whatever_comes_all_is_counted_and_bounded(most: int, asked: list[tuple]) -> None:  # type: ignore[type-arg]
    """No KV is left over when all sessions are forgotten, and what is remembered is bounded."""
    fleet = Fleet(most=most, ttl_s=3.0)
    running: list[Stay] = []
    for said, name, own_id, tenant, instance, ends, is_served in asked:
        fleet.now_s += 0.25
        facts = asks(said, name, own_id=own_id, tenant=tenant)
        _home, stay = fleet.begin(facts, instance)
        if stay is not None:
            running.append(stay)
        for _ in range(min(ends, len(running))):
            tokens = 900 if is_served else None
            fleet.sessions.ended(running.pop(0), tokens, fleet.now_s)
        assert len(fleet.known.begun) <= most
        assert len(fleet.sessions) <= most
    for stay in running:
        fleet.sessions.ended(stay, 900, fleet.now_s)
    assert all(fleet.at[name].sessions >= 0 for name in "ab")
    fleet.now_s += 4.0
    fleet.sessions.home(None, fleet.now_s)
    assert fleet.live_tokens == {"a": 0, "b": 0}
    assert [fleet.at[name].sessions for name in "ab"] == [0, 0]
