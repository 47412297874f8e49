"""Placement rules of other projects: each does what its project publishes."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from analysis.rivals.placement import (
    AibrixPrefixCache,
    ConsistentHash,
    RoundRobin,
    Smetric,
    cache_aware,
    least_requests,
    llm_d_scorers,
    sticky,
)
from proxy.core.placement.candidates import Candidate
from proxy.core.types import RequestFacts
from tests.support.scenes import BLOCK, PROMPT, candidate, scene_of


def _names(chosen: Sequence[Candidate]) -> list[str]:
    return [c.instance.name for c in chosen]


def _busy(requests: int) -> dict[str, int]:
    return {"decode_requests": requests, "decode_tokens": 1000 * requests}


def test_round_robin_takes_turns() -> None:
    rule, scene = RoundRobin(), scene_of(candidate("a"), candidate("b"))
    assert _names([rule(scene) for _ in range(4)]) in (["a", "b"] * 2, ["b", "a"] * 2)


def test_least_requests_counts_every_phase() -> None:
    a = candidate("a", prefill_requests=1, inbound_requests=1)
    assert least_requests(scene_of(a, candidate("b", **_busy(1)))).instance.name == "b"


def test_sticky_stays_at_home_however_loaded() -> None:
    a, b = candidate("a", **_busy(50)), candidate("b")
    assert sticky(scene_of(a, b, home="a")).instance.name == "a"
    assert sticky(scene_of(a, b)).instance.name == "b"


def test_consistent_hash_moves_few_sessions_when_one_leaves() -> None:
    rule = ConsistentHash()
    all_three = [candidate(name) for name in "abc"]
    moved = 0
    for n in range(200):
        facts = RequestFacts("m", f"session {n}", PROMPT, (), BLOCK)
        before = rule(replace(scene_of(*all_three), facts=facts)).instance.name
        after = rule(replace(scene_of(*all_three[:2]), facts=facts)).instance.name
        moved += before != "c" and before != after
    assert moved == 0


@pytest.mark.parametrize(
    ("hit", "others", "expected"),
    [(3001, 0, "a"), (3000, 0, "b"), (9000, 64, "a"), (9000, 65, "b")],
)
def test_cache_aware_breaks_affinity_beyond_its_thresholds(
    hit: int, others: int, expected: str
) -> None:
    a = candidate("a", hit=hit, placed=1, **_busy(others))
    assert cache_aware(scene_of(a, candidate("b"))).instance.name == expected


def test_llm_d_adds_its_three_scores() -> None:
    a, b = candidate("a", hit=PROMPT // 2, prefill_requests=1), candidate("b")
    place = llm_d_scorers(100_000)
    # 3 x 0.5 for the prefix against 2 x 1 for the shorter queue.
    assert place(scene_of(a, b)).instance.name == "b"
    assert place(scene_of(replace(a, hit_tokens=7000), b)).instance.name == "a"


def test_aibrix_skips_matches_beyond_one_deviation() -> None:
    rule = AibrixPrefixCache()
    calm = [candidate(name, **_busy(1)) for name in "bcd"]
    assert rule(scene_of(candidate("a", hit=5000, **_busy(1)), *calm)).instance.name == "a"
    assert rule(scene_of(candidate("a", hit=5000, **_busy(8)), *calm)).instance.name != "a"
    assert rule(scene_of(candidate("a", hit=5000, **_busy(20)), *calm)).instance.name != "a"


def test_smetric_leaves_the_cache_when_its_queue_misses_the_target() -> None:
    rule = Smetric()
    a, b = candidate("a", hit=9000, **_busy(1)), candidate("b", **_busy(1))
    first = rule(scene_of(a, b))
    assert not first.prefill
    for _ in range(8):
        rule._workers["a"].rates.append(1000.0)
        rule._workers["b"].rates.append(20_000.0)
    assert rule(scene_of(a, b)).decode.instance.name == "a"
    rule._workers["a"].pending += 50_000.0
    assert rule(scene_of(a, b)).decode.instance.name == "b"


def test_smetric_charges_a_request_once_however_often_it_is_placed() -> None:
    """As after a failure: only the last place has its work, and none once it is over."""
    rule = Smetric()
    a, b = candidate("a", hit=9000, **_busy(1)), candidate("b", **_busy(1))
    scene, again = scene_of(a, b), scene_of(b)
    rule(scene)
    again.facts = scene.facts
    route = rule(again).decode
    assert rule._workers["a"].pending == 0.0 < rule._workers[route.instance.name].pending
    at: Any = SimpleNamespace(decode=route.instance)
    rule.on_finish(at, scene.facts, 9, 1.0, 2.0)
    rule.on_failed(at, scene.facts, 2.0)
    assert not rule._charged
    assert rule._workers["b"].pending == 0.0
