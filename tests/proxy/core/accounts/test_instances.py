"""One state per incarnation: what is dropped is out of reach for whoever still holds it."""

from proxy.core.accounts.instances import InstanceState, InstanceStates
from proxy.core.fleet.health import CONNECTS, RISE
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import Fallback, Instance, Load, RequestFacts, RouterConfig


def test_a_name_that_comes_again_has_a_fresh_state() -> None:
    states = InstanceStates()
    first = states.add("i")
    first.kv_tokens, first.cooldown_until_s = 1000, 5.0
    second = states.add("i")
    assert second is not first
    assert (second.kv_tokens, second.cooldown_until_s) == (None, float("-inf"))
    first.kv_tokens = 2000
    assert [state.kv_tokens for state in states] == [None], "the old one writes into the void"


def test_a_size_that_nobody_told_is_the_largest_of_the_others() -> None:
    """Reported before learned before that; while no size is known, none is assumed."""
    states = InstanceStates()
    a, b, c = (states.add(name) for name in "abc")
    states.assume_sizes()
    assert [s.assumed_kv_tokens for s in states] == [None, None, None]
    b.cache.learned_tokens = 500
    states.assume_sizes()
    assert [s.assumed_kv_tokens for s in states] == [500, 500, 500]
    a.kv_tokens, c.cache.learned_tokens = 300, 700
    states.assume_sizes()
    assert [s.assumed_kv_tokens for s in states] == [300, 500, 700]
    assert states.add("d").assumed_kv_tokens == 700


def test_who_is_removed_is_forgotten() -> None:
    states = InstanceStates()
    states.add("i")
    states.remove("i")
    states.remove("i")
    assert not list(states)


def test_a_state_is_dropped_once() -> None:
    """However it goes; and a void is none that was known."""
    states, dropped = InstanceStates(), list[InstanceState]()
    states.on_dropped = dropped.append
    first = states.add("i")
    void = states.leave_void("i")
    assert void.account is first.account, "requests may still run there"
    assert void.is_dropped
    second = states.add("i")
    assert not second.is_dropped
    states.remove("i")
    states.leave_void("never there")
    assert dropped == [first, second]
    assert states.of("i").is_dropped


def test_one_that_is_gone_is_charged_until_its_requests_have_ended() -> None:
    """A server that stops closes its port first and finishes its streams behind it."""
    router = Router(FleetState(RouterConfig(prefill_throughput=20_000.0)))
    router.known.add(Instance("i", "http://i"))
    facts = RequestFacts("m", "s", 1000, [], 64.0)
    route = router.admit(facts, 0.0)
    assert isinstance(route, Route)
    router.first_token(route, facts, 1.0)
    for at_s in range(CONNECTS):
        router.known.events.probe_failed("i", "refused", 2.0 + at_s, is_refused=True)
    member = router.known.fleet.get("i")
    assert member is not None
    assert member.health.is_gone
    assert not router.known.ledger.load("i").is_idle, "a drain waits for it"
    assert router.known.ledger.drift() == 0
    router.finish(route, 10.0)
    assert router.known.ledger.load("i").is_idle


def test_one_that_returns_has_counters_of_its_own() -> None:
    router = Router(FleetState(RouterConfig(prefill_throughput=20_000.0)))
    router.known.add(Instance("i", "http://i"))
    facts = RequestFacts("m", "s", 1000, [], 64.0)
    route = router.admit(facts, 0.0)
    assert isinstance(route, Route)
    for at_s in range(CONNECTS):
        router.known.events.probe_failed("i", "refused", 2.0 + at_s, is_refused=True)
    for at_s in range(RISE):
        router.known.events.probe_answered("i", 100.0 + at_s)
    assert router.known.ledger.load("i").is_idle
    router.finish(route, 110.0)
    assert router.known.ledger.load("i").is_idle
    assert router.known.ledger.drift() == 0


def test_what_is_written_where_nobody_listens_reaches_no_process() -> None:
    """A request that still runs there, and one that is placed again there, leave nothing."""
    router = Router(FleetState(RouterConfig(prefill_throughput=20_000.0)))
    router.known.add(Instance("i", "http://i"))
    router.known.events.probe_answered("i", 0.0)
    facts = RequestFacts("m", "s", 10_000, list(range(10)), 1000.0)
    routes = [router.admit(facts, 0.0) for _ in range(2)]
    held = router.known.latency.of("i")
    for at_s in range(CONNECTS):
        router.known.events.probe_failed("i", "refused", 2.0 + at_s, is_refused=True)
    for route in routes:
        assert isinstance(route, Route)
        router.fall_back(route, facts, Fallback.D_FAILED, 9.0)
        router.first_token(route, facts, 10.0)
        router.completed(route, facts, 0.5)
        router.finish(route, 11.0, 100)
    assert router.known.sessions.home("s", 11.0) is None
    for at_s in range(RISE):
        router.known.events.probe_answered("i", 100.0 + at_s)
    state = router.known.fleet.states["i"]
    assert (state.account.load(), state.cache.blocks, state.cache.sessions) == (Load(), 0, 0)
    assert router.known.latency.of("i") is not held
    assert not router.known.latency.of("i").pending
    assert len(router.known.latency.of("i").ready) == 0
    assert state.released.count == 0
    assert router.known.prefixes.total_blocks == 0
    assert router.known.reuse.is_at_rest
