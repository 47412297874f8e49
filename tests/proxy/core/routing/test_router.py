"""admit and what follows: stickiness, placement, classes, offload, gate, retry, accounting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.accounts.engine_reports import EngineKv
from proxy.core.fleet.health import State
from proxy.core.known.fleet_state import FleetState
from proxy.core.placement.candidates import Candidate, Candidates
from proxy.core.placement.decision import Choice, PlacementView, chosen
from proxy.core.placement.rules import PLACEMENTS
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.thermal.readings import HeatLimits
from proxy.core.types import (
    Fallback,
    Instance,
    Load,
    Reason,
    Reject,
    RejectReason,
    RequestFacts,
    RouteClass,
    RouterConfig,
    Thresholds,
)
from tests.support.examples import examples
from tests.support.scenes import PACE


def facts(
    session: str | None = None, tokens: int = 1000, blocks: Sequence[int] = ()
) -> RequestFacts:
    return RequestFacts("m", session, tokens, list(blocks), tokens / max(1, len(blocks)))


def router(n: int = 4, **options: Any) -> Router:
    policy = {"offload_policy": "seed-heuristic"} | options
    made = Router(FleetState(RouterConfig(prefill_throughput=20_000, **policy)))
    for i in range(n):
        made.known.add(Instance(f"i{i}", f"http://i{i}", f"http://i{i}:8998"))
    return made


def admitted(r: Router, f: RequestFacts, now_s: float = 0.0) -> Route:
    route = r.admit(f, now_s)
    assert isinstance(route, Route)
    return route


def rejected(r: Router, f: RequestFacts, now_s: float = 0.0) -> Reject:
    reject = r.admit(f, now_s)
    assert isinstance(reject, Reject)
    return reject


def decoding(r: Router, name: str, tokens: int) -> Route:
    """Make `name` decode a stream of this many tokens."""
    f = facts(f"decoding-{name}-{tokens}", tokens)
    r.known.sessions.assign(f.session_id, r.known.fleet.states[name].cache, 0.0)
    route = admitted(r, f)
    assert route.decode.name == name
    r.first_token(route, f, 0.0)
    return route


class TestPlacement:
    def test_what_is_refused_at_once_moves_nobody(self) -> None:
        """Prompts that no engine serves: each is predicted to take minutes, wherever it is sent."""
        prices: list[list[float]] = []
        for refused in (0, 30):
            r = router(offload_policy="cost")
            for i in range(refused):
                r.finish(admitted(r, facts(f"giant-{i}", 2_000_000), i / 10), i / 10 + 0.002)
            route = admitted(r, facts("s"), 4.0)
            assert route.options is not None
            prices.append([float(str(row["next_s"])) for row in route.options.rows()])
        assert prices[1] == pytest.approx(prices[0], abs=0.001)

    def test_a_session_stays(self) -> None:
        r = router()
        homes = {admitted(r, facts("s"), t).decode.name for t in range(5)}
        assert len(homes) == 1

    def test_turns_are_counted(self) -> None:
        r = router()
        assert [admitted(r, facts("s")).turn for _ in range(3)] == [0, 1, 2]

    def test_new_sessions_spread(self) -> None:
        r = router()
        assert len({admitted(r, facts(f"s{i}")).decode.name for i in range(4)}) == 4

    def test_idle_instances_share_sessions_that_ended_their_turn(self) -> None:
        r = router()
        for i in range(8):
            r.finish(admitted(r, facts(f"s{i}")), 0.0)
        assert [r.known.fleet.states.of(f"i{i}").cache.sessions for i in range(4)] == [2, 2, 2, 2]

    def test_without_a_session_the_prefix_decides(self) -> None:
        r = router()
        f = facts(None, 40_000, range(40))
        first = admitted(r, f)
        r.first_token(first, f, 0.0)
        r.finish(first, 0.0)
        again = admitted(r, facts(None, 41_000, range(41)))
        assert again.decode.name == first.decode.name
        assert again.hit_tokens == 40_000

    def test_a_shared_head_does_not_draw_everybody_to_one_instance(self) -> None:
        """A hit is worth its tokens: behind a longer backlog it loses."""
        r = router()
        f = facts(None, 4000, range(4))
        r.first_token(admitted(r, f), f, 0.0)
        tails = [[*range(4), *range(100 * i, 100 * i + 4)] for i in range(1, 9)]
        routes = [admitted(r, facts(f"s{t}", 8000, t)) for t in tails]
        assert len({route.decode.name for route in routes}) == 4
        assert {route.reachable_hit_tokens for route in routes} == {4000}
        assert {route.hit_tokens for route in routes} == {0, 4000}

    def test_what_a_prompt_finds_in_the_cache_is_in_use_while_it_is_computed(self) -> None:
        """Room for the next prompt depends on it: an engine holds those blocks from then on."""
        r = router(1)
        f = facts("s", 40_000, range(40))
        first = admitted(r, f)
        r.first_token(first, f, 0.0)
        r.finish(first, 0.0)
        again = admitted(r, facts("s", 41_000, range(41)))
        load = r.known.ledger.load("i0")
        assert (load.prefill_tokens, load.ongoing_tokens) == (1000, 1000)
        assert (load.cached_tokens, load.held_tokens) == (40_000, 41_000)
        r.first_token(again, f, 1.0)
        assert (load := r.known.ledger.load("i0")).held_tokens == load.decode_tokens == 41_000
        assert load.cached_tokens == 0
        r.finish(again, 2.0)
        assert r.known.ledger.load("i0").is_idle

    def test_a_shared_head_is_in_use_once(self) -> None:
        r = router(1)
        routes = []
        for turn in range(1, 4):
            f = facts(f"s{turn}", 8000, [*range(4), *range(100 * turn, 100 * turn + 4)])
            routes.append(admitted(r, f))
            r.first_token(routes[-1], f, 0.0)
        load = r.known.ledger.load("i0")
        assert (load.ongoing_tokens, load.shared_tokens, load.shared_requests) == (24_000, 8000, 2)
        assert load.held_tokens == 20_000, "the first stream is not known to share its head"
        r.finish(routes[0], 1.0)
        assert r.known.ledger.load("i0").held_tokens == 12_000
        for route in routes:
            r.finish(route, 1.0)
        assert r.known.ledger.load("i0") == Load()

    def test_round_robin_rotates(self) -> None:
        r = router(placement="round-robin")
        names = [admitted(r, facts("same")).decode.name for _ in range(8)]
        assert names == ["i0", "i1", "i2", "i3"] * 2

    @pytest.mark.parametrize("name", PLACEMENTS)
    def test_contract_of_every_placement(self, name: str) -> None:
        """A number for any candidate, the same for the same, and it may be compared."""
        busy = Candidate(Instance("a", "u"), Load(5, 1, 0, 0, 7, 1), 10, 90, PACE, 1, 3)
        idle = Candidate(Instance("b", "u"), Load(), 90, 10, PACE, 0, 0)
        scores = PLACEMENTS[name](Candidates.of([busy, busy, idle], 100))
        assert scores[0] == scores[1] > scores[2]


class TestClasses:
    @pytest.mark.parametrize(
        ("tokens", "expected"),
        [
            (1499, RouteClass.WARM),
            (1500, RouteClass.MEDIUM),
            (8191, RouteClass.MEDIUM),
            (8192, RouteClass.HEAVY_COLO),
        ],
    )
    def test_by_new_tokens(self, tokens: int, expected: RouteClass) -> None:
        assert admitted(router(), facts("s", tokens)).route_class is expected

    def test_a_long_prompt_that_is_cached_is_warm(self) -> None:
        r = router()
        f = facts("s", 50_000, range(50))
        first = admitted(r, f)
        r.first_token(first, f, 0.0)
        r.finish(first, 0.0)
        turn = admitted(r, facts("s", 51_000, range(51)))
        assert (turn.route_class, turn.hit_tokens, turn.new_tokens) == (
            RouteClass.WARM,
            50_000,
            1000,
        )


class TestOffload:
    def test_the_whole_way(self) -> None:
        r = router(2)
        decoding(r, "i0", 30_000)
        f = facts("s", 20_000, range(20))
        r.known.sessions.assign("s", r.known.fleet.states["i0"].cache, 0.0)
        route = admitted(r, f)
        assert (route.decode.name, route.prefill and route.prefill.name) == ("i0", "i1")
        assert (route.route_class, route.reason) == (RouteClass.HEAVY_P2P, Reason.P_IDLE_D_BUSY)
        assert r.known.ledger.load("i1").prefill_tokens == 20_000
        assert r.known.ledger.load("i0").inbound_tokens == 20_000
        r.prefill_done(route, f, 0.0)
        assert r.known.ledger.load("i1").prefill_tokens == 0
        assert r.known.ledger.load("i1").pinned_tokens == 20_000
        r.first_token(route, f, 0.0)
        assert r.known.ledger.load("i1").is_idle
        assert r.known.ledger.load("i0").decode_tokens == 50_000
        route.lease.grow(16)
        assert r.known.ledger.load("i0").decode_tokens == 50_016
        # Both hold the prefix now, and the session stays where it decodes.
        assert r.known.prefixes.hits(f.block_hashes) == {"i0": 20, "i1": 20}
        r.finish(route, 1.0)
        assert admitted(r, facts("s", 20_500, range(20))).decode.name == "i0"

    def test_two_heavies_at_once_do_not_see_the_same_idle_peer(self) -> None:
        """Read and charge in one step: the second sees the first's reservation."""
        r = router(3)
        decoding(r, "i0", 90_000)
        for session in ("s", "t"):
            r.known.sessions.assign(session, r.known.fleet.states["i0"].cache, 0.0)
        first, second = (admitted(r, facts(s, 20_000)) for s in ("s", "t"))
        assert first.prefill
        assert second.prefill
        assert first.prefill.name != second.prefill.name

    def test_a_peer_without_bootstrap_takes_none(self) -> None:
        r = Router(FleetState(RouterConfig(prefill_throughput=20_000, offload_policy="always")))
        for name in ("a", "b"):
            r.known.add(Instance(name, f"http://{name}"))
        assert admitted(r, facts("s", 20_000)).reason is Reason.NO_PEER

    def test_the_one_peer_that_may_prefill_can_be_overloaded(self) -> None:
        """It carries less than D, but more than 1.5 times what all instances do on average."""
        r = Router(
            FleetState(RouterConfig(prefill_throughput=20_000, offload_policy="seed-heuristic"))
        )
        r.known.add(Instance("p", "http://p", "http://p:8998"))
        for name in ("d", "x", "y"):
            r.known.add(Instance(name, f"http://{name}"))
        decoding(r, "p", 20_000)
        decoding(r, "d", 30_000)
        r.known.sessions.assign("s", r.known.fleet.states["d"].cache, 0.0)
        assert admitted(r, facts("s", 20_000)).reason is Reason.P_OVERLOADED

    @given(st.lists(st.integers(0, 90_000), min_size=2, max_size=6), st.integers(0, 5))
    @settings(max_examples=30)
    def test_no_peer_is_overloaded_where_each_may_prefill(
        self, loads: list[int], home: int
    ) -> None:
        """The emptiest is asked, which never carries more than the mean: P is busier than D."""
        r = router(len(loads))
        for at, tokens in enumerate(loads):
            decoding(r, f"i{at}", tokens)
        r.known.sessions.assign("s", r.known.fleet.states[f"i{home % len(loads)}"].cache, 0.0)
        assert admitted(r, facts("s", 20_000)).reason is not Reason.P_OVERLOADED

    def test_not_without_a_connector(self) -> None:
        r = router(offload_policy="always", kv_connector="none")
        assert admitted(r, facts("s", 20_000)).reason is Reason.NO_CONNECTOR

    def test_not_what_two_legs_would_answer_differently(self) -> None:
        r = router(offload_policy="always")
        f = RequestFacts("m", "s", 20_000, [], 1.0, offloadable=False)
        assert admitted(r, f).reason is Reason.NOT_OFFLOADABLE

    def test_transfers_per_peer_are_bounded(self) -> None:
        r = router(2, offload_policy="always", placement="affinity")
        r.known.sessions.assign("home", r.known.fleet.states["i0"].cache, 0.0)
        for _ in range(16):
            f = facts("home", 9000)
            route = admitted(r, f)
            assert route.prefill is not None
            r.prefill_done(route, f, 0.0)
        assert admitted(r, facts("home", 9000)).reason is Reason.NO_PEER

    @pytest.mark.parametrize(
        ("why", "reason"),
        [
            (Fallback.P_REFUSED, Reason.PREFILL_FAILED),
            (Fallback.P_TIMEOUT, Reason.PREFILL_FAILED),
            (Fallback.TRANSFER_TIMEOUT, Reason.TRANSFER_FAILED),
            (Fallback.P_GONE, Reason.TRANSFER_FAILED),
        ],
    )
    def test_fallback_is_colocation(self, why: Fallback, reason: Reason) -> None:
        r = router(2, offload_policy="always")
        f = facts("s", 20_000)
        route = admitted(r, f)
        d = route.decode.name
        r.fall_back(route, f, why, 0.0)
        assert (route.decode.name, route.prefill, route.reason) == (d, None, reason)
        assert route.route_class is RouteClass.HEAVY_COLO
        assert r.known.ledger.load(d).prefill_tokens == 20_000
        assert sum(r.known.ledger.load(n).ongoing_tokens for n in ("i0", "i1")) == 20_000


class TestSiblings:
    def test_the_second_waits_for_the_firsts_blocks(self) -> None:
        """Computing 40,000 tokens again elsewhere takes longer than waiting for them here."""
        r = router(4, offload_policy="cost")
        f, g = facts("s", 40_000, range(40)), facts("t", 41_000, range(41))
        first, second = admitted(r, f), admitted(r, g, 0.3)
        assert second.decode.name == first.decode.name
        assert (second.hit_tokens, second.new_tokens) == (40_000, 1000)
        assert second.predicted_ttft_s < first.predicted_ttft_s
        r.finish(first, 0.4)
        assert r.known.prefixes.hits(f.block_hashes) == {}
        r.finish(second, 0.4)
        assert r.known.reuse.is_at_rest

    def test_an_engine_that_lost_it_is_believed(self) -> None:
        r = router(1)
        prompts = facts("s", 40_000, range(40)), facts("t", 40_000, range(40, 80))
        for found in (None, 0.0):
            for f in prompts:
                assert r.known.prefixes.capacity(r.known.fleet.states["i0"].cache) is None, (
                    "one may be odd"
                )
                route = admitted(r, f)
                r.first_token(route, f, 0.0)
                r.completed(route, f, found)
                r.finish(route, 1.0)
        assert r.known.prefixes.capacity(r.known.fleet.states["i0"].cache) == 40


class TestTrust:
    """A session's own last turn beside what the index has of its prompt."""

    def turn(
        self, r: Router, number: int, tokens: int, cached: int | None, blocks: Sequence[int] = ()
    ) -> Route:
        f = facts("s", tokens, blocks or range(100 * number, 100 * number + 40))
        r.known.refine(f, float(number))
        route = admitted(r, f, float(number))
        r.first_token(route, f, number + 0.1)
        ratio = None if cached is None else cached / tokens
        r.completed(route, f, ratio, (tokens, cached, 10))
        r.finish(route, number + 0.2, 10)
        return route

    def test_a_key_that_changes_each_turn_costs_no_home(self) -> None:
        r = router(3, offload_policy="cost")
        routes = [self.turn(r, n, 20_000 + 500 * n, 19_500 + 500 * n if n else 0) for n in range(6)]
        assert [route.key_tokens for route in routes] == [0] * 6
        assert len({route.decode.name for route in routes[1:]}) == 1
        assert min(route.hit_tokens for route in routes[2:]) > 20_000

    def test_what_a_peer_handed_over_says_nothing_of_the_prediction(self) -> None:
        r = router(2, offload_policy="always")
        f = facts("s", 30_000, range(30))
        route = admitted(r, f)
        assert route.prefill is not None
        r.prefill_done(route, f, 1.0)
        r.first_token(route, f, 1.1)
        r.completed(route, f, None, (30_000, 30_000, 10))
        r.finish(route, 1.2, 10)
        stay = r.known.sessions.stay("s")
        assert stay is not None
        assert stay.past is not None
        assert (stay.past.prompt_tokens, stay.past.reports) == (30_000, 0)

    def test_a_retry_is_held_against_the_instance_that_answered(self) -> None:
        r = router(2)
        first = self.turn(r, 0, 10_000, 0, range(40))
        f = facts("s", 10_500, range(42))
        route = admitted(r, f, 1.0)
        assert (route.decode.name, route.key_tokens > 9000) == (first.decode.name, True)
        assert isinstance(r.retry(route, f, 1.1), Route)
        assert (route.decode.name != first.decode.name, route.key_tokens) == (True, 0)


class TestGate:
    def test_a_busy_instance_is_not_chosen(self) -> None:
        r = router(2, thresholds=Thresholds(active_prefill_tokens_threshold=5000))
        first = admitted(r, facts("s", 6000))
        second = admitted(r, facts("s", 1000))
        assert second.decode.name != first.decode.name

    def test_all_busy_rejects_with_the_predicted_drain_time(self) -> None:
        r = router(2, thresholds=Thresholds(active_prefill_tokens_threshold=5000))
        admitted(r, facts("s", 105_000))
        admitted(r, facts("t", 65_000))
        reject = rejected(r, facts("u", 100))
        assert reject.reason is RejectReason.PREFILL_TOKENS
        assert reject.retry_after_s == 3  # (65,000 - 5,000) / 20,000 tokens per second

    def test_the_engines_own_kv_usage_counts(self) -> None:
        r = router(1, thresholds=Thresholds(active_decode_blocks_threshold=0.85))
        r.known.gate.observe_engine("i0", EngineKv(100_000, 0.9), 0.0)
        assert rejected(r, facts("s")).reason is RejectReason.DECODE_BLOCKS
        r.known.gate.observe_engine("i0", EngineKv(100_000, 0.85), 1.0)
        admitted(r, facts("s"), 1.0)

    def test_nobody_up_is_not_busy(self) -> None:
        r = router(1)
        for _ in range(2):
            r.known.events.probe_failed("i0", "x", 0.0, is_refused=True)
        assert rejected(r, facts("s")).reason is RejectReason.NO_INSTANCE

    def test_while_all_rest_the_advice_is_as_long_as_they_have(self) -> None:
        r = router(2)
        for name, at_s in (("i0", 0.0), ("i1", 90.0)):
            assert r.known.rests(name, State.PAUSED, at_s)
        waits = [rejected(r, facts("s"), now_s) for now_s in (90.5, 100.0, 500.0)]
        assert {reject.reason for reject in waits} == {RejectReason.ASLEEP}
        assert [reject.retry_after_s for reject in waits] == [2, 10, 30]
        assert r.known.rests("i1", None, 501.0)
        assert admitted(r, facts("s"), 501.0).decode.name == "i1"

    def test_one_that_sleeps_has_emptied_its_cache_and_keeps_its_sessions(self) -> None:
        r = router(2)
        f = facts("s", 40_000, range(40))
        route = admitted(r, f)
        home = route.decode.name
        r.first_token(route, f, 0.0)
        r.finish(route, 0.0)
        assert r.known.rests(home, State.PAUSED, 1.0)
        assert r.known.prefixes.hits(f.block_hashes)[home] == 40, "a pause may keep it"
        assert r.known.rests(home, State.ASLEEP, 2.0)
        assert not any(r.known.prefixes.hits(f.block_hashes).values())
        assert r.known.rests(home, None, 3.0)
        again = admitted(r, f, 3.0)
        assert (again.decode.name, again.hit_tokens) == (home, 0)

    def test_a_model_goes_where_it_is_served(self) -> None:
        r = router(2)
        r.known.fleet.observe_models("i0", ["other"])
        r.known.fleet.observe_models("i1", ["m"])
        assert {admitted(r, facts(f"s{i}")).decode.name for i in range(4)} == {"i1"}

    def test_a_stream_of_a_process_that_is_gone_teaches_the_next_one_nothing(self) -> None:
        """A server that stops closes its port first, and another may be there before its end."""
        r = router(1)
        old, new = decoding(r, "i0", 9000), r.known.fleet.states["i0"]
        r.known.fleet.process_gone("i0")
        r.known.fleet.process_came("i0")
        assert (state := r.known.fleet.states["i0"]) is not new
        r.finish(old, 9.0, 300)
        assert (state.released.count, r.known.ledger.live) == (0, 0)
        again = decoding(r, "i0", 9000)
        r.finish(again, 19.0, 300)
        assert state.released.count == 1


class TestRetry:
    def test_goes_where_it_has_not_been(self) -> None:
        r = router(3)
        f = facts("s")
        route = admitted(r, f)
        seen = {route.decode.name}
        for _ in range(2):
            again = r.retry(route, f, 0.0)
            assert isinstance(again, Route)
            assert again.decode.name not in seen
            seen.add(again.decode.name)
        assert [r.known.ledger.load(f"i{i}").prefill_requests for i in range(3)].count(1) == 1
        assert isinstance(r.retry(route, f, 0.0), Reject)
        assert all(r.known.ledger.load(f"i{i}").is_idle for i in range(3)), "nothing runs any more"

    def test_no_pair_is_looked_for_where_only_its_d_would_be_used(self) -> None:
        """The D of an offload may be a bad place to compute the prompt."""
        may: list[bool] = []

        def choose(view: PlacementView) -> Choice:
            may.append(view.transfers.can_offload)
            return chosen(view, view.free[0], None, Reason.D_IDLE, placed=True)

        r = Router(FleetState(RouterConfig(prefill_throughput=20_000)), decide=choose)
        for i in range(3):
            r.known.add(Instance(f"i{i}", f"http://i{i}", f"http://i{i}:8998"))
        f = facts("s", 50_000)
        route = admitted(r, f)
        assert isinstance(r.would_go(f, "i0", 0.0), Instance)
        assert isinstance(r.retry(route, f, 0.0), Route)
        assert may == [True, False, False]

    def test_it_does_not_see_its_own_load(self) -> None:
        """What the failed attempt was charged is given back before the next one is placed."""
        means: list[float] = []

        def choose(view: PlacementView) -> Choice:
            means.append(view.mean_ongoing_tokens)
            return chosen(view, view.free[0], None, Reason.D_IDLE, placed=True)

        r = Router(FleetState(RouterConfig(prefill_throughput=20_000.0)), choose)
        for i in range(2):
            r.known.add(Instance(f"i{i}", f"http://i{i}"))
        f = facts("s", 10_000)
        route = admitted(r, f)
        r.retry(route, f, 0.0)
        assert means == [0.0, 0.0]

    def test_the_session_follows(self) -> None:
        r = router(2)
        route = admitted(r, facts("s"))
        r.retry(route, facts("s"), 0.0)
        assert r.known.sessions.home("s", 0.0) == route.decode.name

    def test_a_dead_instance_loses_its_sessions_and_prefixes(self) -> None:
        r = router(2)
        f = facts("s", 9000, range(9))
        route = admitted(r, f)
        r.first_token(route, f, 0.0)
        name = route.decode.name
        for _ in range(2):
            r.known.events.probe_failed(name, "x", 0.0, is_refused=True)
        assert r.known.sessions.home("s", 0.0) is None
        assert r.known.fleet.states.of(name).cache.blocks == 0
        for _ in range(2):
            r.known.events.probe_answered(name, 0.0)
        member = r.known.fleet.get(name)
        assert member is not None
        assert member.incarnation == 1

    def test_who_comes_under_the_name_of_one_that_was_removed_is_another(self) -> None:
        r = router(1)
        f = facts("s", 9000, range(9))
        route = admitted(r, f)
        for instance in (Instance("i0", "http://elsewhere"), Instance("i0", "http://again")):
            r.known.remove("i0")
            r.known.add(instance)
        r.first_token(route, f, 0.0)
        r.completed(route, f, 0.0)
        r.finish(route, 1.0)
        assert r.known.fleet.states.of("i0").cache.blocks == 0, "what the old one computed"
        assert r.known.ledger.drift() == 0

    def test_who_waits_hears_of_one_that_is_there_or_is_another(self) -> None:
        heard: list[str] = []
        r = router(1)
        r.known.events.probe_failed("i0", "x", 0.0, is_refused=True)
        r.known.call_when_freed(lambda: heard.append("freed"))
        r.known.events.probe_answered("i0", 1.0)
        assert heard == ["freed"], "for the first time"
        r.known.events.restarted("i0", 2.0)
        assert len(heard) > 1

    def test_a_slow_one_keeps_them(self) -> None:
        r = router(2)
        f = facts("s", 9000, range(9))
        route = admitted(r, f)
        r.first_token(route, f, 0.0)
        for _ in range(2):
            r.known.events.probe_failed(route.decode.name, "x", 0.0)
        assert r.known.sessions.home("s", 0.0) == route.decode.name


class TestReturn:
    def back(self, policy: str, **options: Any) -> Router:
        """Three instances, of which i0 has just come back from the dead."""
        r = router(3, offload_policy=policy, **options)
        for event in (
            *[lambda n: r.known.events.probe_answered(n, 0.0)],
            *[lambda n: r.known.events.probe_failed(n, "x", 1.0, is_refused=True)] * 2,
            *[lambda n: r.known.events.probe_answered(n, 50.0)] * 2,
        ):
            event("i0")
        assert r.known.fleet.is_up("i0")
        return r

    @pytest.mark.parametrize("placement", PLACEMENTS)
    @pytest.mark.parametrize("policy", ["cost", "seed-heuristic", "never"])
    def test_it_gets_few_new_sessions_at_first(self, policy: str, placement: str) -> None:
        for now_s, most in ((50.0, 0.11), (65.0, 0.56)):
            r = self.back(policy, placement=placement)
            got = [admitted(r, facts(f"s{i}"), now_s).decode.name for i in range(90)]
            assert 0 < got.count("i0") / len(got) <= most
        late = self.back(policy, placement=placement)
        got = [admitted(late, facts(f"s{i}"), 81.0).decode.name for i in range(90)]
        assert got.count("i0") >= 29

    def test_leases_of_the_old_process_touch_nothing_of_the_new_one(self) -> None:
        r = router(1)
        f = facts("s", 9000, range(9))
        old = admitted(r, f)
        r.first_token(old, f, 0.0)
        r.known.gate.observe_engine("i0", EngineKv(100_000, 0.5), 0.0)
        assert not r.known.events.observe_start("i0", 1000.0, 1.0)
        assert not r.known.events.observe_start("i0", 1000.2, 1.0)
        assert r.known.events.observe_start("i0", 1060.0, 2.0)
        assert not r.known.events.observe_start("i0", 1060.0, 3.0)
        assert not r.known.events.observe_start("i0", None, 3.0)
        assert r.known.ledger.load("i0") == Load()
        assert (r.known.fleet.states.of("i0").cache.blocks, r.known.sessions.home("s", 2.0)) == (
            0,
            None,
        )
        assert r.known.gate.kv_tokens("i0") is None
        new = admitted(r, facts("t", 500), 4.0)
        before = r.known.ledger.load("i0")
        old.lease.grow(16)
        r.completed(old, f)
        r.finish(old, 5.0)
        assert r.known.ledger.load("i0") == before
        assert r.known.fleet.states.of("i0").cache.blocks == 0, (
            "what the old one held is not the new one's"
        )
        r.finish(new, 6.0)
        assert (r.known.ledger.live, r.known.ledger.drift(), r.known.ledger.load("i0")) == (
            0,
            0,
            Load(),
        )


STEPS = ["admit", "prefill", "token", "grow", "back", "retry", "whole", "end"]
STEPS += ["hedge", "unhedge", "kill", "up", "out", "in", "restart"]
steps = st.lists(
    st.tuples(
        st.sampled_from(STEPS),
        st.integers(0, 7),
        st.integers(1, 60_000),
    ),
    max_size=60,
)


@pytest.mark.parametrize("why", [None, Fallback.TRANSFER_TIMEOUT, Fallback.KV_PARAMS])
@pytest.mark.parametrize("retried", [False, True])
def test_what_ends_after_its_instances_were_removed_leaves_nothing_of_them(
    why: Fallback | None, retried: bool
) -> None:
    """Names of instances come and go for months."""
    r = router(4, offload_policy="always")
    f = facts(tokens=20_000)
    route = admitted(r, f)
    p, d = route.prefill, route.decode
    assert p is not None
    r.prefill_done(route, f, 1.0)
    for instance in (p, d):
        r.known.remove(instance.name)
    if why is not None:
        r.fall_back(route, f, why, 2.0)
    if retried:
        r.retry(route, f, 2.5)
    r.first_token(route, f, 3.0)
    r.finish(route, 4.0, 10)
    for name in (p.name, d.name):
        assert r.known.unreleased_kv.on(name, 4.0) == (0, 0)
        assert r.known.fleet.states.get(name) is None
        assert not any(name in pair for pair in r.known.latency._pairs)


@settings(max_examples=examples(150))
@given(policy=st.sampled_from(["seed-heuristic", "always"]), plan=steps)
def test_any_life_ends_at_zero(policy: str, plan: list[tuple[str, int, int]]) -> None:
    """Through the router's own calls, in any order and with any instance coming and going."""
    r = router(3, offload_policy=policy)
    live: list[tuple[Route, RequestFacts]] = []
    for step, pick, tokens in plan:
        name = f"i{pick % 3}"
        if step == "admit":
            f = facts(f"s{pick}", tokens, range(pick))
            got = r.admit(f, 0.0)
            if isinstance(got, Route):
                live.append((got, f))
        elif step in ("kill", "up", "out", "in", "restart"):
            _shake(r, step, name)
        elif live:
            _advance(r, step, *live[pick % len(live)])
        books_are_in_order(r)
    for route, _ in live:
        r.finish(route, 1.0)
        r.finish(route, 1.0)
    assert r.known.ledger.live == 0
    assert r.known.reuse.is_at_rest
    assert r.hedges.live == 0
    for member in r.known.fleet.members():
        assert r.known.ledger.load(member.instance.name) == Load()
        r.known.remove(member.instance.name)
    assert not r.known.prefixes._masks
    assert r.known.prefixes.total_blocks == 0
    assert not r.known.latency._pairs
    assert list(r.known.sessions.rows()) == []


def books_are_in_order(r: Router) -> None:
    """Whatever is kept over all instances is of those that are there."""
    assert r.known.ledger.drift() == 0
    caches = {member.instance.name: member.state.cache for member in r.known.fleet.members()}
    homes = [row[1] for row in r.known.sessions.rows()]
    assert all(homes.count(name) == cache.sessions for name, cache in caches.items())
    assert all(caches.get(name) is cache for name, cache in r.known.prefixes._caches.items())
    assert r.known.prefixes.total_blocks == sum(cache.blocks for cache in caches.values())


def _shake(r: Router, step: str, name: str) -> None:
    if step == "kill":
        r.known.events.probe_failed(name, "x", 0.0, is_refused=True)
    elif step == "up":
        r.known.events.probe_answered(name, 0.0)
    elif step == "restart":
        r.known.events.restarted(name, 0.0)
    elif step == "out":
        r.known.remove(name)
    elif r.known.fleet.get(name) is None:
        r.known.add(Instance(name, f"http://{name}", f"http://{name}:8998"))


def _advance(r: Router, step: str, route: Route, f: RequestFacts) -> None:
    if step == "back" and route.prefill is None:
        return
    calls: dict[str, Callable[[], object]] = {
        "prefill": lambda: r.prefill_done(route, f, 0.0),
        "token": lambda: r.first_token(route, f, 0.0),
        "grow": lambda: route.lease.grow(3),
        "back": lambda: r.fall_back(route, f, Fallback.P_TIMEOUT, 0.0),
        "retry": lambda: r.retry(route, f, 0.0),
        "hedge": lambda: r.hedges.start(route, f, 0.0),
        "unhedge": lambda: r.hedges.drop(route, 0.0),
        "whole": lambda: r.completed(route, f, 0.3),
        "end": lambda: r.finish(route, 0.5),
    }
    calls[step]()


def test_nobody_else_would_take_a_request_while_all_others_are_past_the_gate() -> None:
    r = router(3)
    route = admitted(r, facts(tokens=500))
    others = [name for name in ("i0", "i1", "i2") if name != route.decode.name]
    assert r.has_other(route, facts(tokens=500), 0.0)
    r.known.gate.mark_busy(others[0], 5.0)
    assert r.has_other(route, facts(tokens=500), 1.0)
    r.known.limit_heat(others[1], HeatLimits(is_drained=True))
    assert not r.has_other(route, facts(tokens=500), 1.0)
    assert r.has_other(route, facts(tokens=500), 5.0)
    r.finish(route, 6.0)
