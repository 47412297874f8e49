"""Every rival runs a fleet to its end; each rule does what its project publishes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from analysis.league.fleet import EngineFleet, engines
from analysis.league.simulate import run_policy
from analysis.rivals.offload import (
    AibrixCombined,
    Placed,
    dynamo_2025,
    dynamo_isl_or_load,
    llm_d_decider,
)
from analysis.rivals.placement import (
    AibrixPrefixCache,
    ConsistentHash,
    RoundRobin,
    Smetric,
    cache_aware,
    dynamo_kv,
    least_requests,
    llm_d_scorers,
    lmetric,
    sticky,
)
from analysis.rivals.registry import BASELINE, RIVALS
from proxy.core.config import RouterConfig
from proxy.core.connectors import CONNECTORS, transfer_rules
from proxy.core.latency.model import Latency
from proxy.core.placement.candidates import Candidates
from proxy.core.placement.scene import PlacementView
from proxy.core.types import Candidate, Instance, Load, RequestFacts
from replayer.virtual.arrivals import Planned
from replayer.virtual.load import TraceTurn

BLOCK = 512
CONFIG = RouterConfig(prefill_throughput=20_000)
PROMPT = 10_000


def _planned() -> list[Planned]:
    planned = []
    for n in range(40):
        session, turn = n % 8, n // 8
        blocks = tuple(1000 * session + i for i in range(20 + 4 * turn))
        wait_for = (n - 8,) if turn else ()
        one = TraceTurn(f"s{session}", BLOCK * len(blocks) + 9, 30, 9, blocks, 0, (), 0.0, 0.0)
        planned.append(Planned(one, f"s{session}", 0.05 * n, 0.5, wait_for))
    return planned


@pytest.mark.parametrize("policy", RIVALS)
def test_every_rival_finishes_and_accounts_for_every_request(policy: str) -> None:
    fleet = EngineFleet(engines(3, 200_000, BLOCK))
    runs = [run_policy(policy, _planned(), fleet, BLOCK) for _ in range(2)]
    assert [row.outcome for row in runs[0].rows] == ["ok"] * 40
    assert runs[0].drift == 0
    assert runs[0].rows == runs[1].rows
    assert RIVALS[policy].source


def test_the_baseline_is_one_of_them() -> None:
    assert BASELINE in RIVALS


def _candidate(name: str, hit: int = 0, placed: int = 0, **load: int) -> Candidate:
    instance = Instance(name, f"http://{name}", f"http://{name}:8998")
    return Candidate(instance, Load(**load), hit, PROMPT - hit, 0, placed)


def _scene(*free: Candidate, home: str | None = None, tokens: int = PROMPT) -> PlacementView:
    facts = RequestFacts("m", "s", tokens, (), BLOCK)
    columns, transfers = Candidates.of(free, tokens), transfer_rules(CONNECTORS["mooncake"])
    latency = Latency(20_000, 0.5, 8192)
    return PlacementView(CONFIG, facts, home, columns, 0.0, 0.0, latency, transfers)


def _names(chosen: Sequence[Candidate]) -> list[str]:
    return [c.instance.name for c in chosen]


def _busy(requests: int) -> dict[str, int]:
    return {"decode_requests": requests, "decode_tokens": 1000 * requests}


def test_round_robin_takes_turns() -> None:
    rule, scene = RoundRobin(), _scene(_candidate("a"), _candidate("b"))
    assert _names([rule(scene) for _ in range(4)]) in (["a", "b"] * 2, ["b", "a"] * 2)


def test_least_requests_counts_every_phase() -> None:
    a = _candidate("a", prefill_requests=1, inbound_requests=1)
    assert least_requests(_scene(a, _candidate("b", **_busy(1)))).instance.name == "b"


def test_sticky_stays_at_home_however_loaded() -> None:
    a, b = _candidate("a", **_busy(50)), _candidate("b")
    assert sticky(_scene(a, b, home="a")).instance.name == "a"
    assert sticky(_scene(a, b)).instance.name == "b"


def test_consistent_hash_moves_few_sessions_when_one_leaves() -> None:
    rule = ConsistentHash()
    all_three = [_candidate(name) for name in "abc"]
    moved = 0
    for n in range(200):
        facts = RequestFacts("m", f"session {n}", PROMPT, (), BLOCK)
        before = rule(replace(_scene(*all_three), facts=facts)).instance.name
        after = rule(replace(_scene(*all_three[:2]), facts=facts)).instance.name
        moved += before != "c" and before != after
    assert moved == 0


@pytest.mark.parametrize(
    ("hit", "others", "expected"),
    [(3001, 0, "a"), (3000, 0, "b"), (9000, 64, "a"), (9000, 65, "b")],
)
def test_cache_aware_breaks_affinity_beyond_its_thresholds(
    hit: int, others: int, expected: str
) -> None:
    a = _candidate("a", hit=hit, placed=1, **_busy(others))
    assert cache_aware(_scene(a, _candidate("b"))).instance.name == expected


def test_dynamo_weighs_overlap_against_decode_tokens() -> None:
    a = _candidate("a", hit=8000, decode_tokens=7999)
    b = _candidate("b", placed=1)
    assert dynamo_kv(_scene(a, b)).instance.name == "a"
    assert dynamo_kv(_scene(replace(a, load=Load(decode_tokens=8001)), b)).instance.name == "b"


def test_lmetric_multiplies() -> None:
    a = _candidate("a", hit=9000, decode_tokens=200)
    assert lmetric(_scene(a, _candidate("b"))).instance.name == "b"
    assert lmetric(_scene(replace(a, load=Load(decode_tokens=100)), _candidate("b"))) is not None


def test_llm_d_adds_its_three_scores() -> None:
    a, b = _candidate("a", hit=PROMPT // 2, prefill_requests=1), _candidate("b")
    place = llm_d_scorers(100_000)
    # 3 x 0.5 for the prefix against 2 x 1 for the shorter queue.
    assert place(_scene(a, b)).instance.name == "b"
    assert place(_scene(replace(a, hit_tokens=7000), b)).instance.name == "a"


def test_aibrix_skips_matches_beyond_one_deviation() -> None:
    rule = AibrixPrefixCache()
    calm = [_candidate(name, **_busy(1)) for name in "bcd"]
    assert rule(_scene(_candidate("a", hit=5000, **_busy(1)), *calm)).instance.name == "a"
    assert rule(_scene(_candidate("a", hit=5000, **_busy(8)), *calm)).instance.name != "a"
    assert rule(_scene(_candidate("a", hit=5000, **_busy(20)), *calm)).instance.name != "a"


def test_smetric_leaves_the_cache_when_its_queue_misses_the_target() -> None:
    rule = Smetric()
    a, b = _candidate("a", hit=9000, **_busy(1)), _candidate("b", **_busy(1))
    first = rule(_scene(a, b))
    assert not first.prefill
    for _ in range(8):
        rule._workers["a"].rates.append(1000.0)
        rule._workers["b"].rates.append(20_000.0)
    assert rule(_scene(a, b)).decode.instance.name == "a"
    rule._workers["a"].pending[0] = 50_000.0
    assert rule(_scene(a, b)).decode.instance.name == "b"


@pytest.mark.parametrize(
    ("hit", "backlog", "remote"),
    [(PROMPT - 2047, 0, False), (PROMPT - 2048, 0, True), (0, 32_769, False), (0, 32_768, True)],
)
def test_dynamo_is_local_when_little_is_new_or_p_is_busy(
    hit: int, backlog: int, remote: bool
) -> None:
    d, p = _candidate("d", hit=hit), _candidate("p", prefill_tokens=backlog)
    assert dynamo_isl_or_load(_scene(d, p), d, p) is remote


@pytest.mark.parametrize(
    ("hit", "queue", "remote"),
    [(PROMPT - 1000, 0, False), (PROMPT - 1001, 1, True), (0, 2, False)],
)
def test_dynamo_2025_bounds_the_queue_in_requests(hit: int, queue: int, remote: bool) -> None:
    d, p = _candidate("d", hit=hit), _candidate("p", prefill_requests=queue)
    assert dynamo_2025(_scene(d, p), d, p) is remote


def test_llm_d_is_remote_from_its_threshold_on() -> None:
    p = _candidate("p")
    for hit, remote in ((PROMPT - 511, False), (PROMPT - 512, True)):
        d = _candidate("d", hit=hit)
        assert llm_d_decider(_scene(d, p), d, p) is remote


def test_a_placed_rule_needs_a_peer_to_be_remote() -> None:
    rule = Placed(least_requests, llm_d_decider)
    assert rule(_scene(_candidate("a"))).prefill is None
    choice = rule(_scene(_candidate("a"), _candidate("b")))
    assert choice.prefill is not None
    assert choice.prefill is not choice.decode


def test_aibrix_combined_serves_whole_only_beside_a_busy_pod() -> None:
    rule = AibrixCombined()
    calm = _scene(_candidate("a"), _candidate("b"))
    assert rule(calm).prefill is not None
    assert rule(_scene(_candidate("a"), _candidate("b", prefill_requests=3))).prefill is None
