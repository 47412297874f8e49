"""What a session's KV displaces where it comes, and what does not fit once it lives there."""

from __future__ import annotations

import pytest

from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.routing.session_kv import LiveSessionKv
from proxy.core.types import Instance, RequestFacts, RouterConfig

BLOCK = 100
KV_TOKENS = 10_000


def router() -> Router:
    made = Router(FleetState(RouterConfig(prefill_throughput=20_000.0, offload_policy="cost")))
    for name in "ab":
        made.known.add(Instance(name, f"http://{name}"))
        made.known.fleet.states[name].kv_tokens = KV_TOKENS
    made.known.fleet.states.assume_sizes()
    return made


def facts(session: str, tokens: int) -> RequestFacts:
    hashes = [hash((session, at)) for at in range(tokens // BLOCK)]
    return RequestFacts("m", session, tokens, hashes, BLOCK)


def lives(r: Router, session: str, name: str, tokens: int, now_s: float) -> None:
    """A whole turn of a session on an instance."""
    f, cache = facts(session, tokens), r.known.fleet.states[name].cache
    r.known.prefixes.now_s = now_s
    r.known.reuse.limit(cache, KV_TOKENS, None, f)
    r.known.reuse.released(r.known.reuse.begin_use(cache, f), f)
    stay = r.known.sessions.assign(session, cache, now_s, tokens)
    assert stay is not None
    r.known.sessions.ended(stay, tokens, now_s)


def kv_of(r: Router, f: RequestFacts, now_s: float) -> LiveSessionKv:
    found = r.known.conversations.find(f, now_s)
    return LiveSessionKv(f, r.known.sessions, r.known.prefixes, r.known.fleet.states, now_s, found)


def test_where_there_is_room_nothing_is_displaced_and_nothing_too_much() -> None:
    r = router()
    kv = kv_of(r, facts("new", 2000), 0.0)
    assert kv.tokens_too_much("a", 0, KV_TOKENS)[0] == 0.0
    assert kv.tokens_too_much("a", 0, KV_TOKENS)[1] < 0.02 * KV_TOKENS


def test_what_is_displaced_counts_by_the_chance_that_its_session_comes_back() -> None:
    """A full cache of sessions that have just ended their turn, and one of sessions long idle."""
    r = router()
    for at in range(5):
        lives(r, f"old{at}", "a", 2000, 0.0)
        lives(r, f"young{at}", "b", 2000, 5000.0)
    kv = kv_of(r, facts("new", 4000), 5001.0)
    old, young = (kv.tokens_too_much(name, 0, KV_TOKENS)[0] for name in "ab")
    assert 0.0 < old < young <= 4000.0


def test_its_own_kv_is_not_displaced() -> None:
    """The oldest prompt of a full cache comes back, longer: what it displaces is others'."""
    r = router()
    lives(r, "mine", "a", 5000, 0.0)
    lives(r, "other", "a", 5000, 1.0)
    mine = facts("mine", 6000)
    assert kv_of(r, mine, 2.0).tokens_too_much("a", 5000, KV_TOKENS)[0] == pytest.approx(
        1000 * r.known.sessions.curve.chance(1.0)
    )


def test_living_sessions_that_fill_a_cache_are_too_much_for_one_more() -> None:
    r = router()
    for at in range(6):
        lives(r, f"s{at}", "a", 2400, 0.0)
    kv = kv_of(r, facts("new", 3000), 1.0)
    assert kv.tokens_too_much("a", 0, KV_TOKENS)[1] > 1500
    assert kv.tokens_too_much("b", 0, KV_TOKENS)[1] < 100


def test_a_session_is_not_in_its_own_way() -> None:
    """At home its last context is replaced by the new one; elsewhere all of it comes on top."""
    r = router()
    lives(r, "mine", "a", 8000, 0.0)
    lives(r, "other", "b", 8000, 0.0)
    kv = kv_of(r, facts("mine", 8100), 1.0)
    at_home, elsewhere = (
        kv.tokens_too_much("a", 8000, KV_TOKENS)[1],
        kv.tokens_too_much("b", 0, KV_TOKENS)[1],
    )
    assert at_home < elsewhere / 5


def test_a_request_without_a_session_does_not_come_back() -> None:
    r = router()
    lives(r, "other", "a", 9000, 0.0)
    f = facts("x", 5000)
    f.session_id = None
    assert kv_of(r, f, 1.0).tokens_too_much("a", 0, KV_TOKENS)[1] == 0.0
    assert kv_of(r, f, 1.0).tokens_too_much("a", 0, KV_TOKENS)[0] > 0.0


def test_what_an_instance_lost_is_lost() -> None:
    r = router()
    lives(r, "s", "a", 9000, 0.0)
    r.known.fleet.states.add("a")
    kv = kv_of(r, facts("new", 5000), 1.0)
    assert kv.tokens_too_much("a", 0, KV_TOKENS)[1] < 0.1 * KV_TOKENS
    route = r.admit(facts("s", 1000), 1.0)
    assert isinstance(route, Route)
    r.finish(route, 2.0)
    live = sum(r.known.sessions.live(r.known.fleet.states[name].cache).running for name in "ab")
    assert live == 0
