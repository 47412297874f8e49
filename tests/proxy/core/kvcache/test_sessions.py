"""The session table: time to live, cap, counts; against a naive model and as a table."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proxy.core.kvcache.engine_cache import EngineCache
from proxy.core.kvcache.sessions import (
    EXPIRED,
    Adopted,
    ByTenant,
    Sessions,
    Stay,
    StoredResponses,
)
from proxy.protocol.names.session_names import tenant_of
from tests.support.caches import Caches
from tests.support.examples import examples

TTL_S, MAX = 10.0, 4
INSTANCES = ("a", "b", "c")
ids = st.sampled_from([f"s{i}" for i in range(7)])
instances = st.sampled_from(INSTANCES)


@dataclass
class Home:
    instance: str | None
    turn: int
    used_s: float
    tokens: int
    running: int


class Table(RuleBasedStateMachine):
    """Homes by last use in a plain list; the table must agree after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions, self.at = Sessions(TTL_S, MAX), Caches()
        self.homes: dict[str, Home] = {}
        self.stays: list[tuple[str, Home, Stay]] = []
        self.now_s = 0.0

    def expire(self) -> None:
        self.homes = {s: h for s, h in self.homes.items() if self.now_s - h.used_s <= TTL_S}

    def use(self, session: str, home: Home) -> None:
        self.homes.pop(session, None)
        self.homes[session] = home
        while len(self.homes) > MAX:
            del self.homes[min(self.homes, key=lambda s: self.homes[s].used_s)]

    @rule(by_s=st.sampled_from([0.5, 4.0, 9.5, 10.0, 10.5]))
    def time_passes(self, by_s: float) -> None:
        self.now_s += by_s

    @rule(session=ids, instance=instances, tokens=st.integers(0, 900), shared=st.integers(0, 99))
    def assign(self, session: str, instance: str, tokens: int, shared: int) -> None:
        self.expire()
        home = self.homes.get(session) or Home(None, 0, 0.0, 0, 0)
        home.turn = 0 if home.instance is None else home.turn + 1
        home.instance, home.used_s, home.tokens = instance, self.now_s, tokens
        home.running += 1
        stay = self.sessions.assign(session, self.at[instance], self.now_s, tokens, shared)
        assert stay is not None
        assert stay.turn == home.turn
        self.use(session, home)
        self.stays.append((session, home, stay))

    @precondition(lambda self: self.stays)
    @rule(data=st.data(), instance=instances)
    def move(self, data: st.DataObject, instance: str) -> None:
        session, home, stay = data.draw(st.sampled_from(self.stays))
        self.sessions.move(stay, self.at[instance])
        if self.homes.get(session) is home:
            home.instance = instance

    @precondition(lambda self: self.stays)
    @rule(data=st.data(), tokens=st.integers(0, 900))
    def is_answered(self, data: st.DataObject, tokens: int) -> None:
        """Each request ends once, at any time, its session forgotten meanwhile or not."""
        at = data.draw(st.integers(0, len(self.stays) - 1))
        _session, home, stay = self.stays.pop(at)
        self.sessions.ended(stay, tokens, self.now_s)
        home.running -= 1
        home.tokens = tokens

    @rule(session=ids)
    def look(self, session: str) -> None:
        self.expire()
        home = self.homes.get(session)
        assert self.sessions.home(session, self.now_s) == (home and home.instance)

    @rule(session=ids)
    def end(self, session: str) -> None:
        self.sessions.home(None, self.now_s)
        self.expire()
        home = self.homes.pop(session, None)
        has_home = home is not None and home.instance is not None
        assert self.sessions.end_session(session) == has_home

    @rule(instance=instances)
    def lose(self, instance: str) -> None:
        """Those who lived there are homeless, but in the table until they leave it."""
        self.at[instance].is_lost = True
        for home in self.homes.values():
            if home.instance == instance:
                home.instance = None

    @invariant()
    def counts_are_the_truth(self) -> None:
        self.sessions.home(None, self.now_s)
        self.expire()
        assert len(self.sessions) == len(self.homes) <= MAX
        for name in INSTANCES:
            here = [s for s, home in self.homes.items() if home.instance == name]
            assert self.at[name].sessions == len(here)
            kept = {s: stay.own_tokens for s in here if (stay := self.sessions.stay(s))}
            running = {s for s in here if self.homes[s].running}
            live = self.sessions.live(self.at[name])
            assert live.running == sum(n for s, n in kept.items() if s in running)
            assert live.idle_tokens == sum(n for s, n in kept.items() if s not in running)
        for session, home in self.homes.items():
            if home.instance is not None:
                stay = self.sessions.stay(session)
                assert stay is not None
                assert (stay.tokens, stay.running) == (home.tokens, home.running)


TestTable: Any = Table.TestCase
TestTable.settings = settings(max_examples=examples(60), stateful_step_count=30)


@pytest.mark.parametrize(
    ("asked_s", "home"), [(0.0, "a"), (9.9, "a"), (10.0, "a"), (10.1, None), (1e9, None)]
)
def test_a_session_lives_for_its_ttl(asked_s: float, home: str | None) -> None:
    sessions, at = Sessions(10.0, 100), Caches()
    sessions.assign("s", at["a"], 0.0)
    assert sessions.home("s", asked_s) == home


def test_time_to_live_counts_from_the_last_use() -> None:
    """Used again, a session moves behind those that were not, and outlives them."""
    sessions, at = Sessions(10.0, 100), Caches()
    sessions.assign("old", at["a"], 0.0)
    sessions.assign("young", at["b"], 5.0)
    sessions.assign("old", at["a"], 9.0)
    assert sessions.home("young", 16.0) is None
    assert sessions.home("old", 16.0) == "a"
    assert len(sessions) == 1


def test_a_look_is_no_use() -> None:
    sessions, at = Sessions(10.0, 100), Caches()
    sessions.assign("s", at["a"], 0.0)
    assert sessions.home("s", 9.0) == "a"
    assert sessions.home("s", 11.0) is None


def test_a_session_that_comes_back_too_late_starts_anew() -> None:
    sessions, at = Sessions(10.0, 100), Caches()
    turns = []
    for now_s in (0.0, 1.0, 20.0):
        stay = sessions.assign("s", at["a"], now_s)
        assert stay is not None
        turns.append(stay.turn)
    assert turns == [0, 1, 0]


def test_beyond_the_cap_the_longest_idle_goes() -> None:
    sessions, at = Sessions(10.0, 2), Caches()
    for session, now_s in (("s", 0.0), ("t", 1.0), ("s", 2.0), ("u", 3.0)):
        sessions.assign(session, at["a"], now_s)
    assert [sessions.home(s, 3.0) for s in ("s", "t", "u")] == ["a", None, "a"]


def test_a_tenant_that_fills_the_table_loses_its_own() -> None:
    sessions, at = Sessions(100.0, 10), Caches()

    def served(name: str, tenant: str, now_s: float) -> None:
        stay = sessions.assign(name, at["a"], now_s, tenant=tenant)
        assert stay is not None
        sessions.ended(stay, 10, now_s)

    for n in range(3):
        served(f"alice/{n}", "alice", 0.0)
    for n in range(50):
        served(f"mallory/{n}", "mallory", 1.0)
    assert len(sessions) == 10
    assert [sessions.home(f"alice/{n}", 1.0) for n in range(3)] == ["a"] * 3
    assert [row[0] for row in sessions.rows()][3:] == [f"mallory/{n}" for n in range(43, 50)]
    for n in range(3, 9):
        served(f"alice/{n}", "alice", 2.0)
    assert [sessions.home(f"alice/{n}", 2.0) for n in range(9)] == [None] * 4 + ["a"] * 5
    assert sessions.home("mallory/45", 102.5) is None, "all of them expire as ever"
    assert len(sessions) == 0


def test_a_session_of_which_nothing_was_served_goes_first() -> None:
    """Those that an engine refuses take no place of one that it has served."""
    sessions, at = Sessions(100.0, 3), Caches()

    def asked(name: str, now_s: float, kept: int | None) -> None:
        stay = sessions.assign(name, at["a"], now_s, 50)
        assert stay is not None
        sessions.ended(stay, kept, now_s)

    asked("known", 0.0, 60)
    asked("other", 0.0, 60)
    for n in range(9):
        asked(f"refused-{n}", 1.0, None)
        assert sessions.home(f"refused-{n}", 1.0) == "a", "it may be asked again where it was"
    assert len(sessions) == at["a"].sessions == 3
    assert sessions.live(at["a"]).idle_tokens == 120
    asked("refused-8", 2.0, 70)
    asked("new", 3.0, None)
    homes = [sessions.home(name, 3.0) for name in ("known", "other", "refused-8", "new")]
    assert homes == [None, "a", "a", "a"], "what was served since is one as any other"
    asked("other", 4.0, None)
    asked("newest", 5.0, 10)
    homes = [sessions.home(name, 5.0) for name in ("other", "refused-8", "new", "newest")]
    assert homes == ["a", "a", None, "a"], "what was served once is, whatever came later"


def test_one_that_is_served_now_is_not_the_first_to_go() -> None:
    sessions, at = Sessions(100.0, 2), Caches()
    runs = sessions.assign("runs", at["a"], 0.0)
    failed = sessions.assign("runs", at["a"], 0.0)
    assert runs is failed is not None
    sessions.ended(failed, None, 1.0)
    sessions.assign("b", at["a"], 2.0)
    sessions.assign("runs", at["a"], 3.0)
    sessions.assign("c", at["a"], 4.0)
    assert [sessions.home(name, 4.0) for name in ("runs", "b", "c")] == ["a", None, "a"]


def test_whose_key_goes_is_what_a_plain_count_says() -> None:
    @given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["", "x", "y", "z"]))))
    @settings(max_examples=examples(200), deadline=None)
    def same(uses: list[tuple[str, str]]) -> None:
        table: OrderedDict[str, str] = OrderedDict()
        shares: ByTenant[str] = ByTenant()
        for key, tenant in uses:
            table[key] = tenant
            table.move_to_end(key)
            shares.use(key, tenant)
            while len(table) > 3:
                counts = Counter(table.values())
                gone = shares.next_to_go(table)
                whose = table[gone]
                assert counts[whose] == max(counts.values())
                assert gone == next(k for k, t in table.items() if t == whose)
                del table[gone]
                shares.remove(gone)
        for key in list(table):
            shares.remove(key)
            shares.remove(key)
        kept: list[Any] = [shares._owners, shares._keys, shares._with, shares._most]
        assert not any(kept)

    same()


def test_a_request_without_a_session_leaves_none() -> None:
    sessions, at = Sessions(10.0, 2), Caches()
    assert sessions.assign(None, at["a"], 0.0) is None
    sessions.move(None, at["a"])
    assert sessions.home(None, 0.0) is None
    assert (len(sessions), at["a"].sessions) == (0, 0)


def test_a_move_keeps_the_turn() -> None:
    sessions, at = Sessions(10.0, 2), Caches()
    stay = [sessions.assign("s", at["a"], 0.0) for _ in range(3)][-1]
    sessions.move(stay, at["b"])
    assert sessions.home("s", 0.0) == "b"
    assert stay is not None
    assert stay.turn == 2
    assert sessions.assign("s", at["b"], 0.0) is stay
    assert stay.turn == 3


def test_what_was_never_computed_is_not_kept() -> None:
    sessions, at = Sessions(10.0, 2), Caches()

    def turn(name: str, tokens: int, kept: int | None) -> int:
        stay = sessions.assign("s", at[name], 0.0, tokens)
        assert stay is not None
        sessions.ended(stay, kept, 1.0)
        return sessions.live(at[name]).idle_tokens

    assert turn("a", 50_000, None) == 0
    assert turn("a", 50_000, 51_000) == 51_000
    assert turn("a", 60_000, None) == 51_000, "what the turn before has left"
    assert turn("b", 60_000, None) == 0, "the other one has that"
    assert sessions.live(at["a"]).idle_tokens == 0


def test_a_turn_that_was_not_computed_comes_again() -> None:
    """As after an engine said "busy": neither a new turn, nor a user who thought for so long."""
    sessions, at = Sessions(100.0, 2), Caches()
    seen: list[tuple[int, float]] = []

    def ask(now_s: float) -> Stay:
        stay = sessions.assign("s", at["a"], now_s)
        assert stay is not None
        seen.append((stay.turn, sum(sessions.curve._returned)))
        return stay

    sessions.ended(ask(0.0), 10, 1.0)
    sessions.ended(ask(9.0), None, 9.5)
    sessions.ended(ask(10.0), None, 10.5)
    sessions.ended(ask(11.0), 20, 12.0)
    beside, failed = ask(15.0), ask(15.0)
    sessions.ended(failed, None, 16.0)
    sessions.ended(beside, 30, 17.0)
    failed, beside = ask(20.0), ask(20.0)
    sessions.ended(beside, 30, 21.0)
    sessions.ended(failed, None, 22.0)
    ask(25.0)
    assert [turn for turn, _ in seen] == [0, 1, 1, 1, 2, 3, 4, 5, 6]
    assert [returned for _, returned in seen] == [0, 1, 1, 1, 2, 2, 3, 3, 4]


def test_a_home_that_is_lost_is_none() -> None:
    """Also where another process has its name by now; the session begins anew."""
    sessions, at = Sessions(10.0, 2), Caches()
    sessions.assign("s", at["a"], 0.0)
    sessions.assign("t", at["a"], 0.0)
    at["a"].is_lost = True
    assert sessions.home("s", 0.0) is None
    assert list(sessions.rows()) == []
    assert not sessions.end_session("t")
    stay = sessions.assign("s", at["a"], 0.0)
    assert stay is not None
    assert stay.turn == 0
    assert (sessions.home("s", 0.0), at["a"].sessions, len(sessions)) == ("a", 1, 1)


def test_a_move_outlasts_its_old_home() -> None:
    sessions, at = Sessions(10.0, 2), Caches()
    stay = sessions.assign("s", at["a"], 0.0)
    at["a"].is_lost = True
    sessions.move(stay, at["b"])
    assert (sessions.home("s", 0.0), at["a"].sessions, at["b"].sessions) == ("b", 0, 1)


def rows_of(sessions: Sessions, at: Caches) -> list[Adopted]:
    """The rows of a table, with the caches that another one has for their names."""
    return [
        (s, at[name], turn, used_s, tokens, looks)
        for s, name, turn, used_s, tokens, looks in sessions.rows()
    ]


def test_rows_are_older_than_what_is_there_and_leave_first() -> None:
    old, new = Sessions(10.0, 3), Sessions(10.0, 3)
    old_at, new_at = Caches(), Caches()
    for at, name in enumerate("ab"):
        old.assign(name, old_at["i"], float(at))
    new.assign("c", new_at["i"], 5.0)
    new.adopt(rows_of(old, new_at))
    assert [row[0] for row in new.rows()] == ["a", "b", "c"]
    new.assign("d", new_at["i"], 6.0)
    assert [row[0] for row in new.rows()] == ["b", "c", "d"]
    assert new.home("b", 11.5) is None
    assert new.home("c", 11.5) == "i"


def test_rows_are_taken_over_behind_what_is_there() -> None:
    old, new = Sessions(10.0, 3), Sessions(10.0, 3)
    old_at, new_at = Caches(), Caches()
    for at, name in enumerate("abcd"):
        old.assign(name, old_at[f"on-{name}"], float(at))
    old.assign("b", old_at["moved"], 4.0, tokens=70)
    assert list(old.rows()) == [
        ("c", "on-c", 0, 2.0, 0, None),
        ("d", "on-d", 0, 3.0, 0, None),
        ("b", "moved", 1, 4.0, 70, None),
    ]
    new.adopt(rows_of(old, new_at))
    assert list(new.rows()) == list(old.rows())
    assert [new_at[name].sessions for name in ("on-c", "on-d", "moved")] == [1, 1, 1]
    assert new.live(new_at["moved"]).idle_tokens == 70
    new.adopt([("e", new_at["on-e"], 0, 5.0, 1, None), ("c", new_at["elsewhere"], 0, 5.0, 1, None)])
    assert list(new.rows()) == list(old.rows()), "full, and known"
    assert new.home("c", 12.5) is None
    assert len(new) == 2


class TestStoredResponses:
    @given(
        st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 30)), max_size=40),
        st.integers(1, 4),
    )
    def test_bounded_by_count_and_time(self, uses: list[tuple[str, int]], most: int) -> None:
        """The same as a list of uses, of which the last ones count."""
        table, cache, now_s = StoredResponses(20.0, most), EngineCache("i"), 0.0
        model: dict[str, float] = {}
        for key, passed_s in uses:
            now_s += passed_s
            model = {k: at for k, at in model.items() if now_s - at <= 20.0}
            assert (table.holder(key, now_s) is cache) == (key in model)
            table.note(key, cache, now_s)
            model.pop(key, None)
            model = dict([*model.items(), (key, now_s)][-most:])
            assert [row[0] for row in table.rows()] == list(model)
            assert len(table) <= most

    def test_a_tenant_that_fills_it_loses_its_own(self) -> None:
        table, cache = StoredResponses(100.0, 100), EngineCache("i")
        for n in range(20):
            table.note(f"alice/{n}", cache, 0.0, "alice")
        for n in range(1000):
            table.note(f"mallory/{n}", cache, 1.0, "mallory")
        assert len(table) == 100
        assert all(table.holder(f"alice/{n}", 2.0, "alice") for n in range(20))
        for n in range(200):
            table.note(f"t{n}/0", cache, 3.0, f"t{n}")
        assert len(table) == 100

    def test_what_is_taken_over_has_its_tenants(self) -> None:
        table, cache = StoredResponses(100.0, 4), EngineCache("i")
        rows = [("alice/0", cache, 1.0), *((f"mallory/{n}", cache, 2.0) for n in range(3))]
        table.adopt(rows, tenant_of)
        for n in range(3, 9):
            table.note(f"mallory/{n}", cache, 3.0, "mallory")
        assert next(row[0] for row in table.rows()) == "alice/0"

    def test_a_lost_holder_is_known_and_not_told_to_another_process(self) -> None:
        table, lost, other = StoredResponses(20.0, 4), EngineCache("i"), EngineCache("j")
        table.note("x", lost, 0.0)
        table.note("y", other, 0.0)
        lost.is_lost = True
        assert table.holder("x", 1.0) is lost
        assert [row[:2] for row in table.rows()] == [("y", "j")]
        table.forget("y")
        assert table.holder("y", 1.0) is None

    def test_what_is_taken_over_is_older_and_within_the_bound(self) -> None:
        table, cache = StoredResponses(20.0, 2), EngineCache("i")
        table.note("new", cache, 5.0)
        table.adopt([("a", cache, 1.0), ("b", cache, 2.0), ("new", EngineCache("j"), 3.0)])
        assert [row[0] for row in table.rows()] == ["b", "new"]
        assert table.holder("new", 6.0) is cache


def test_after_a_long_pause_a_table_forgets_piece_by_piece() -> None:
    """To forget all at once would hold every stream."""
    sessions, responses, at = Sessions(10.0, 1000), StoredResponses(10.0, 1000), Caches()
    for number in range(500):
        stay = sessions.assign(f"s{number}", at["a"], 0.0)
        assert stay is not None
        sessions.ended(stay, 5, 1.0)
        responses.note(f"r{number}", at["a"], 0.0)
    assert sessions.home("s499", 100.0) is None, "whose turn it is to be forgotten or not"
    assert responses.holder("r499", 100.0) is None
    assert (len(sessions), len(responses)) == (500 - EXPIRED - 1, 500 - EXPIRED)
    sessions.assign("s498", at["b"], 101.0)
    assert sessions.home("s498", 101.0) == "b"
    for _ in range(500 // EXPIRED + 1):
        sessions.home("x", 102.0)
        responses.holder("x", 102.0)
    assert (len(sessions), len(responses)) == (1, 0)
