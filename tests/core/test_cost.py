"""The cost policy: what it prefers, what it never does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.classify import Size
from proxy.core.connectors import CONNECTORS
from proxy.core.cost import MAX_WAIT_S, Weights, by_cost
from proxy.core.decide import Choice, RouterConfig, Scene, can_prefill
from proxy.core.latency import Latency
from proxy.core.types import Candidate, Instance, Load, Reason, RequestFacts

PROMPT = 40_000


def candidate(name: str, hit: int = 0, *, decode: int = 0, prefill: int = 0) -> Candidate:
    load = Load(
        prefill_tokens=prefill,
        prefill_requests=bool(prefill),
        decode_tokens=decode,
        decode_requests=decode // 10_000,
    )
    return Candidate(Instance(name, f"http://{name}", f"http://{name}:1"), load, hit, PROMPT - hit)


def scene(
    free: Sequence[Candidate],
    home: str | None = None,
    *,
    busy_s: dict[str, float] | None = None,
    connector: str = "mooncake",
    offloadable: bool = True,
) -> Scene:
    config = RouterConfig(prefill_throughput=20_000, kv_connector=connector)
    latency = Latency(20_000, 0.5, 8192)
    for i, (name, seconds) in enumerate((busy_s or {}).items()):
        latency.begin(name, i, seconds, 0.0)
    facts = RequestFacts("m", "s", PROMPT, [], 1.0, offloadable)
    return Scene(config, facts, home, free, lambda: 0.0, 0.0, latency)


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
    asked = scene([candidate("a", 39_000, decode=300_000), candidate("b")], "a")
    for i in range(10):
        asked.latency.begin("a", i, 4.0, -40.0 + 4.0 * i)
        asked.latency.end("a", i, -36.0 + 4.0 * i)
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
    free = [candidate(f"i{i}", hit, decode=decode) for i, (hit, decode, _) in enumerate(drawn)]
    busy_s = {f"i{i}": seconds for i, (_, _, seconds) in enumerate(drawn)}
    chosen = by_cost(scene(free, busy_s=busy_s, connector="none"))
    for other in free:
        name = other.instance.name
        if other is not chosen.decode:
            longer = busy_s | {name: busy_s[name] + more_s}
            assert by_cost(scene(free, busy_s=longer, connector="none")).decode is not other


def test_the_next_turns_matter_more_than_a_moment_s_quiet() -> None:
    """Both idle now, nothing cached; one of them was busy for most of the last minute."""
    asked = scene([candidate("a"), candidate("b")])
    for i in range(10):
        asked.latency.begin("a", i, 4.0, -40.0 + 4.0 * i)
        asked.latency.end("a", i, -36.0 + 4.0 * i)
    assert asked.latency.wait_s("a", 0.0) == 0.0
    assert names(by_cost(asked)) == ("b", None)


def test_home_is_kept_where_moving_gains_nothing() -> None:
    """A short prompt leaves no whole block behind, so no hit speaks for home."""
    free = [candidate("a"), candidate("b")]
    assert names(by_cost(scene(free, "b"))) == ("b", None)
    assert names(by_cost(scene(free, "a"))) == ("a", None)


def test_what_a_peer_holds_for_others_is_bounded() -> None:
    """One prompt may always be pinned; more only up to a part of the peer's cache."""
    quiet = candidate("b", 39_000)
    pinned = replace(quiet, load=replace(quiet.load, pinned_requests=1, pinned_tokens=30_000))
    connector = CONNECTORS["mooncake"]

    def able(peer: Candidate, kv_tokens: int | None) -> bool:
        asked = replace(scene([peer]), kv_tokens=lambda _name: kv_tokens)
        return can_prefill(asked, peer, connector)

    assert able(quiet, 50_000)
    assert able(pinned, None)
    assert able(pinned, 300_000)
    assert not able(pinned, 200_000)


def test_no_offload_that_the_prefill_timeout_would_end() -> None:
    asked = scene([candidate("a", decode=900_000), candidate("b", decode=20_000)], "a")
    hurried = replace(asked, config=replace(asked.config, prefill_timeout_s=0.5))
    assert any(one.prefill for one in by_cost(asked).options)
    assert not any(one.prefill for one in by_cost(hurried).options)
