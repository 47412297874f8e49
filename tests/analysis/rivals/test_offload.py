"""Rules of other projects about local or remote prefill: each does what its project publishes."""

from analysis.rivals.offload import (
    AibrixCombined,
    Placed,
    llm_d_decider,
)
from analysis.rivals.placement import (
    least_requests,
)
from tests.support.scenes import PROMPT, candidate, scene_of


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
