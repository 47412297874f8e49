"""Gaps of a stream beside a long prompt: the model against what real engines did."""

import pytest

from analysis.elastic.interference import (
    BATCHED_TOKENS,
    REAL_COLOCATED_P99_S,
    REAL_OFFLOADED_P99_S,
    gaps_beside,
)
from replayer.engine.types import EngineOptions

OPTIONS = EngineOptions(max_num_batched_tokens=BATCHED_TOKENS)


def test_the_model_disturbs_a_stream_as_real_engines_do() -> None:
    colocated = gaps_beside(OPTIONS, offloaded=False)
    offloaded = gaps_beside(OPTIONS, offloaded=True)
    assert colocated.p99_s == pytest.approx(REAL_COLOCATED_P99_S[0], rel=0.25)
    assert REAL_OFFLOADED_P99_S[0] <= offloaded.p99_s <= REAL_OFFLOADED_P99_S[1]
    # The prompt itself is later for the transfer, on real engines as well.
    assert colocated.ttft_s < offloaded.ttft_s < 2 * colocated.ttft_s


def test_a_gap_is_a_step_that_computes_a_chunk() -> None:
    step, cost = gaps_beside(OPTIONS, offloaded=False), OPTIONS.step
    least_s = cost.a0 + cost.a1 * (BATCHED_TOKENS - 1)
    assert least_s < step.p50_s < step.p99_s < 2 * least_s
