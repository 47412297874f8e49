"""The cost policy: what it prefers, what it never does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.accounts.instances import InstanceStates
from proxy.core.kvcache.conversations import Found
from proxy.core.kvcache.prefix_index import PrefixIndex
from proxy.core.kvcache.sessions import Sessions
from proxy.core.latency.model import STEP_PRIOR_S, Latency
from proxy.core.latency.pace import RECENT_S
from proxy.core.placement.alternatives import Terms
from proxy.core.placement.candidates import Candidate
from proxy.core.placement.cost import MAX_WAIT_S, MISSED, WEIGHTS, Weights, by_cost
from proxy.core.placement.decision import (
    Choice,
    PlacementView,
    Size,
    can_prefill,
)
from proxy.core.routing.session_kv import LiveSessionKv
from proxy.core.types import Instance, Load, Reason, RequestFacts, RouterConfig
from tests.support.scenes import PACE, latency_of, view_of

PROMPT = 40_000


def candidate(name: str, hit: int = 0, *, decode: int = 0, prefill: int = 0) -> Candidate:
    load = Load(
        prefill_tokens=prefill,
        prefill_requests=bool(prefill),
        decode_tokens=decode,
        decode_requests=decode // 10_000,
    )
    instance = Instance(name, f"http://{name}", f"http://{name}:1")
    return Candidate(instance, load, hit, PROMPT - hit, PACE)


def scene(
    free: Sequence[Candidate],
    home: str | None = None,
    *,
    busy_s: dict[str, float] | None = None,
    connector: str = "mooncake",
    offloadable: bool = True,
    latency: Latency | None = None,
) -> PlacementView:
    config = RouterConfig(prefill_throughput=20_000, kv_connector=connector)
    latency = latency or latency_of([one.instance.name for one in free])
    for i, (name, seconds) in enumerate((busy_s or {}).items()):
        latency.reserve_prefill(latency.of(name), i, seconds, 0.0)
    facts = RequestFacts("m", "s", PROMPT, [], 1.0, offloadable)
    return view_of(free, facts, home, config, latency)


def doubting(view: PlacementView, **doubts: float) -> PlacementView:
    """The same, with instances doubted for answers that served nobody."""
    view.free.doubts = [doubts.get(name, 0.0) for name in view.free.names]
    return view


def test_one_that_fails_at_once_never_looks_idle() -> None:
    """Nothing runs there, nothing waits, and it is the session's home."""
    full = {"b": 3.0, "c": 3.5}
    free = [candidate("a", 30_000), candidate("b", decode=90_000), candidate("c", decode=90_000)]
    assert by_cost(scene(free, "a", busy_s=full)).decode.instance.name == "a"
    for doubt in (0.5, 1.0):
        choice = by_cost(doubting(scene(free, "a", busy_s=full), a=doubt))
        assert choice.decode.instance.name == "b"
        assert choice.prefill is None or choice.prefill.instance.name != "a"


def test_where_all_are_doubted_alike_nothing_changes() -> None:
    free = [candidate("a", 30_000), candidate("b"), candidate("c")]
    choice = by_cost(doubting(scene(free), a=0.5, b=0.5, c=0.5))
    assert choice.decode.instance.name == "a"
    assert choice.prefill is None, "a doubted one prefills for nobody"


def names(choice: Choice) -> tuple[str, str | None]:
    p = choice.prefill
    return choice.decode.instance.name, p.instance.name if p else None


def test_affinity_is_worth_the_prefix() -> None:
    free = [candidate("a", 39_000), candidate("b")]
    assert names(by_cost(scene(free, "a"))) == ("a", None)
    a_little_busy = scene(free, "a", busy_s={"a": 1.0})
    assert names(by_cost(a_little_busy)) == ("a", None), "1 s of queue against 2 s of prefill"


def test_a_home_behind_a_long_queue_is_left() -> None:
    free = [candidate("a", 10_000), candidate("b")]
    choice = by_cost(scene(free, "a", busy_s={"a": 5.0}))
    assert names(choice) == ("b", None)
    assert choice.placed


def test_the_old_home_hands_its_prefix_over() -> None:
    """a holds nearly all of it, but its next turns would wait there: a computes, b decodes."""
    latency = latency_of("ab")
    for i in range(10):
        latency.reserve_prefill(latency.of("a"), i, 4.0, -40.0 + 4.0 * i)
        latency.end_prefill(latency.of("a"), i, -36.0 + 4.0 * i)
    free = [candidate("a", 39_000, decode=300_000), candidate("b")]
    asked = scene(free, "a", latency=latency)
    choice = by_cost(asked, Weights(next_turn=2.0))
    assert names(choice) == ("b", "a")
    assert choice.reason is Reason.KV_PULL


def test_no_offload_behind_a_long_queue_on_p() -> None:
    free = [candidate("a", 39_000, decode=2_000_000), candidate("b")]
    choice = by_cost(scene(free, "a", busy_s={"a": MAX_WAIT_S + 0.1}))
    assert choice.prefill is None


def test_an_instance_without_room_is_a_queue() -> None:
    """An engine begins a prompt only when its KV fits beside what is running."""
    full = replace(candidate("a", 20_000), kv_wait_s=30.0)
    assert names(by_cost(scene([full, candidate("b")], "a"))) == ("b", None)


def test_reasons_where_there_is_no_offload() -> None:
    free = [candidate("a", decode=50_000), candidate("b", decode=50_000)]
    assert by_cost(scene(free, connector="none")).reason is Reason.NO_CONNECTOR
    assert by_cost(scene(free, offloadable=False)).reason is Reason.NOT_OFFLOADABLE
    assert by_cost(scene(free[:1])).reason is Reason.NO_PEER
    assert by_cost(scene([candidate("a"), candidate("b")])).reason is Reason.D_IDLE
    warm = [candidate("a", 39_500), candidate("b", 39_500)]
    assert by_cost(scene(warm)).reason is Reason.BELOW_THRESHOLD


@pytest.mark.parametrize(
    ("bootstrap", "wait_s", "prompt", "reason"),
    [
        (True, MAX_WAIT_S + 0.1, 0, Reason.P_OVERLOADED),
        (True, MAX_WAIT_S - 0.1, 0, Reason.MARGIN),
        (False, MAX_WAIT_S + 0.1, 0, Reason.MARGIN),
        (True, MAX_WAIT_S + 0.1, 39_500, Reason.BELOW_THRESHOLD),
    ],
    ids=["its queue is too long", "just not", "it cannot prefill anyway", "not HEAVY on D"],
)
def test_a_peer_is_overloaded_where_only_its_queue_forbids_an_offload(
    bootstrap: bool, wait_s: float, prompt: int, reason: Reason
) -> None:
    """D decodes; its one peer could compute the prompt, were it not for those before it."""
    d, p = candidate("d", prompt, decode=10_000), candidate("p", decode=10_000)
    if not bootstrap:
        p = replace(p, instance=replace(p.instance, bootstrap_url=None))
    choice = by_cost(scene([d, p], "d", busy_s={"p": wait_s}))
    assert (names(choice), choice.reason) == (("d", None), reason)


candidates = st.lists(
    st.tuples(st.integers(0, PROMPT - 1), st.integers(0, 400_000), st.floats(0, 20)),
    min_size=1,
    max_size=6,
)


@given(candidates, st.integers(0, 7))
def test_contract(drawn: list[tuple[int, int, float]], home: int) -> None:
    """D and P are free candidates, never the same; only what is HEAVY on D is offloaded."""
    free = [candidate(f"i{i}", hit, decode=decode) for i, (hit, decode, _) in enumerate(drawn)]
    busy_s = {f"i{i}": seconds for i, (_, _, seconds) in enumerate(drawn)}
    asked = scene(free, f"i{home}", busy_s=busy_s)
    choice = by_cost(asked)
    assert choice.decode in free
    assert choice.predicted_ttft_s is not None
    assert choice.predicted_ttft_s > 0
    assert choice.placed == (choice.decode.instance.name != f"i{home}")
    if choice.prefill is not None:
        assert choice.prefill in free
        assert choice.prefill is not choice.decode
        assert choice.size is Size.HEAVY
    assert choice == by_cost(asked)


@given(candidates, st.floats(0.1, 30))
def test_a_longer_queue_never_attracts(drawn: list[tuple[int, int, float]], more_s: float) -> None:
    """Nor does it change anything for those who were not going there."""
    free = [candidate(f"i{i}", hit, decode=decode) for i, (hit, decode, _) in enumerate(drawn)]
    busy_s = {f"i{i}": seconds for i, (_, _, seconds) in enumerate(drawn)}
    asked = scene(free, busy_s=busy_s, connector="none")
    chosen = by_cost(asked).decode
    for other in free:
        if other is not chosen:
            before_s = other.pace.busy_until_s
            other.pace.busy_until_s += more_s
            assert by_cost(asked).decode is chosen
            other.pace.busy_until_s = before_s


def served(latency: Latency, name: str, count: int, seconds: float) -> None:
    """So many prefills of the same length, over before 0 s."""
    for i in range(count):
        latency.reserve_prefill(latency.of(name), i, seconds, -1.0)
        latency.end_prefill(latency.of(name), i, -1.0)


def terms(asked: PlacementView) -> dict[str, Terms]:
    """The terms of the colocations that were priced, by instance."""
    options = by_cost(asked).options
    return {one.decode.instance.name: one.terms for one in options if one.prefill is None}


def test_a_long_prompt_goes_where_few_arrive() -> None:
    """Both lately as busy: one with a prompt of 6 s, the other with sixty short turns."""
    latency = latency_of("ab")
    served(latency, "a", 60, 0.1)
    served(latency, "b", 1, 6.0)
    asked = scene([candidate("a"), candidate("b")], latency=latency)
    many, few = terms(asked)["a"], terms(asked)["b"]
    assert many.next_s == pytest.approx(few.next_s)
    assert many.behind_s == pytest.approx(60 * few.behind_s)
    stall_s = latency.prefill_s("a", PROMPT, 0, 0, 0)
    assert many.behind_s == pytest.approx(math.exp(-1 / RECENT_S) * stall_s**2 / 2, rel=1e-6)
    assert names(by_cost(asked)) == ("b", None)


def test_who_arrives_waits_for_the_queue_too() -> None:
    latency = latency_of("ab")
    for name in "ab":
        served(latency, name, 10, 0.5)
    latency.of("a").busy_until_s = 3.0
    asked = scene([candidate("a"), candidate("b")], latency=latency)
    behind, alone = terms(asked)["a"], terms(asked)["b"]
    assert behind.behind_s > 2 * alone.behind_s > 0


@given(st.integers(0, 8_000_000), st.integers(1, 100_000), st.floats(0.01, 1.0))
def test_a_stall_counts_most_where_streams_just_keep_their_target(
    tokens: int, more: int, target_s: float
) -> None:
    """The more, the nearer their steps come to the target; beyond it less, but never little."""

    def harm_s(tokens: int) -> float:
        latency = latency_of("a")
        latency.of("a").step.q = 1e-7
        load = Load(decode_tokens=tokens, decode_requests=4)
        asked = scene([replace(candidate("a"), load=load)], latency=latency)
        asked.config = replace(asked.config, tpot_slo_s=target_s)
        return terms(asked)["a"].harm_s

    full = Weights().harm * 4 * PACE.alone_s(PROMPT, 0)
    found, longer = harm_s(tokens), harm_s(tokens + more)
    assert 0 < found <= full * (1 + 1e-9)
    if STEP_PRIOR_S + 1e-7 * (tokens + more) <= target_s:
        assert found <= longer
    if STEP_PRIOR_S + 1e-7 * tokens >= target_s:
        assert full * (MISSED - 1e-9) <= longer <= found


@given(candidates)
def test_a_cost_is_the_sum_of_its_terms(drawn: list[tuple[int, int, float]]) -> None:
    free = [candidate(f"i{i}", hit, decode=decode) for i, (hit, decode, _) in enumerate(drawn)]
    asked = scene(free, busy_s={f"i{i}": seconds for i, (_, _, seconds) in enumerate(drawn)})
    for one in by_cost(asked).options:
        paid = one.terms
        parts = paid.harm_s, paid.behind_s, paid.decode_s, paid.next_s, paid.memory_s
        assert min(parts) >= 0
        assert one.cost_s == pytest.approx(paid.ttft_s + sum(parts))


def test_the_next_turns_matter_more_than_a_moment_s_quiet() -> None:
    """Both idle now, nothing cached; one of them was busy for most of the last minute."""
    latency = latency_of("ab")
    for i in range(10):
        latency.reserve_prefill(latency.of("a"), i, 4.0, -40.0 + 4.0 * i)
        latency.end_prefill(latency.of("a"), i, -36.0 + 4.0 * i)
    assert latency.wait_s("a", 0.0) == 0.0
    assert names(by_cost(scene([candidate("a"), candidate("b")], latency=latency))) == ("b", None)


def test_home_is_kept_where_moving_gains_nothing() -> None:
    """A short prompt leaves no whole block behind, so no hit speaks for home."""
    free = [candidate("a"), candidate("b")]
    assert names(by_cost(scene(free, "b"))) == ("b", None)
    assert names(by_cost(scene(free, "a"))) == ("a", None)


def test_what_a_peer_holds_for_others_is_bounded() -> None:
    """One prompt may always be pinned; more only up to a part of the peer's cache."""
    quiet = candidate("b", 39_000)
    pinned = replace(quiet, load=replace(quiet.load, pinned_requests=1, pinned_tokens=30_000))

    def able(peer: Candidate, kv_tokens: int | None) -> bool:
        return can_prefill(scene([peer]), replace(peer, kv_tokens=kv_tokens))

    assert able(quiet, 50_000)
    assert able(pinned, None)
    assert able(pinned, 300_000)
    assert not able(pinned, 200_000)


def test_no_offload_that_the_prefill_timeout_would_end() -> None:
    asked = scene([candidate("a", decode=900_000), candidate("b", decode=20_000)], "a")
    hurried = replace(asked, config=replace(asked.config, prefill_timeout_s=0.5))
    assert any(one.prefill for one in by_cost(asked).options)
    assert not any(one.prefill for one in by_cost(hurried).options)


def test_kv_that_does_not_fit_costs_the_same_on_a_slow_instance_as_on_a_quick_one() -> None:
    """What is computed again later is computed anywhere; only the first token is slower there."""
    states, sessions = InstanceStates(), Sessions(600.0, 100)
    for name in "ab":
        sessions.assign(f"on {name}", states.add(name).cache, 0.0, 10 * PROMPT)
    latency = latency_of("ab")
    latency.of("a").prefill.p *= 2.0
    free = [replace(candidate(name), kv_tokens=2 * PROMPT) for name in "ab"]
    asked = scene(free, latency=latency)
    kv = LiveSessionKv(
        asked.facts, sessions, PrefixIndex(1 << 20), states, 0.0, Found(asked.facts.session_id)
    )
    asked = replace(asked, session_kv=kv)
    found = terms(asked)
    slow, quick = found["a"], found["b"]
    assert slow.ttft_s > 1.5 * quick.ttft_s
    fleet_s = asked.fleet.alone_s
    assert slow.next_s == quick.next_s == pytest.approx(WEIGHTS.turns * fleet_s)


@pytest.mark.parametrize(
    ("doubted", "hits", "decode", "stays"),
    [
        (True, (0, 0), 0, True),
        (True, (20_000, 20_000), 0, True),
        (False, (0, 0), 0, False),
        (True, (0, 20_000), 0, False),
        (True, (0, 0), 50_000, False),  # it would wait there
    ],
)
def test_a_doubted_home_is_kept_as_long_as_it_carries_no_more(
    hits: tuple[int, int], decode: int, *, doubted: bool, stays: bool
) -> None:
    """What an engine does not find at home is found nowhere else either."""
    home, other = candidate("home", hits[0], decode=decode), candidate("other", hits[1])
    latency = latency_of(["home", "other"])
    times = latency.of("home")
    for at in range(20):
        latency.reserve_prefill(times, at, 0.5, -20.0 + at)
        latency.end_prefill(times, at, -19.5 + at)
    view = scene([home, other], "home", latency=latency)
    view.free.is_home_doubted = doubted
    assert (by_cost(view).decode.instance.name == "home") is stays
