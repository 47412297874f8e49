"""Rules of other projects about local or remote prefill: each does what its project publishes."""

import pytest

from analysis.rivals.offload import (
    AibrixCombined,
    Placed,
    dynamo_2025,
    dynamo_isl_or_load,
    llm_d_decider,
)
from analysis.rivals.placement import (
    least_requests,
)
from tests.support.scenes import PROMPT, candidate, scene_of


@pytest.mark.parametrize(
    ("hit", "backlog", "remote"),
    [(PROMPT - 2047, 0, False), (PROMPT - 2048, 0, True), (0, 32_769, False), (0, 32_768, True)],
)
def test_dynamo_is_local_when_little_is_new_or_p_is_busy(
    hit: int, backlog: int, remote: bool
) -> None:
    d, p = candidate("d", hit=hit), candidate("p", prefill_tokens=backlog)
    assert dynamo_isl_or_load(scene_of(d, p), d, p) is remote


@pytest.mark.parametrize(
    ("hit", "queue", "remote"),
    [(PROMPT - 1000, 0, False), (PROMPT - 1001, 1, True), (0, 2, False)],
)
def test_dynamo_2025_bounds_the_queue_in_requests(hit: int, queue: int, remote: bool) -> None:
    d, p = candidate("d", hit=hit), candidate("p", prefill_requests=queue)
    assert dynamo_2025(scene_of(d, p), d, p) is remote


def test_llm_d_is_remote_from_its_threshold_on() -> None:
    p = candidate("p")
    for hit, remote in ((PROMPT - 511, False), (PROMPT - 512, True)):
        d = candidate("d", hit=hit)
        assert llm_d_decider(scene_of(d, p), d, p) is remote


def test_a_placed_rule_needs_a_peer_to_be_remote() -> None:
    rule = Placed(least_requests, llm_d_decider)
    assert rule(scene_of(candidate("a"))).prefill is None
    choice = rule(scene_of(candidate("a"), candidate("b")))
    assert choice.prefill is not None
    assert choice.prefill is not choice.decode


def test_aibrix_combined_serves_whole_only_beside_a_busy_pod() -> None:
    rule = AibrixCombined()
    calm = scene_of(candidate("a"), candidate("b"))
    assert rule(calm).prefill is not None
    assert rule(scene_of(candidate("a"), candidate("b", prefill_requests=3))).prefill is None
