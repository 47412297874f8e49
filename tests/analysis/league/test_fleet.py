"""Engines of a league's run: KV in whole blocks, and steps that take longer."""

import pytest

from analysis.league.fleet import ABORT_TIMEOUT_S, EngineFleet, engines, slower
from replayer.engine.types import EngineOptions


def test_kv_is_in_whole_blocks_and_holds_what_was_asked_for() -> None:
    fleet = EngineFleet(engines(3, 1_000.0, 512))
    assert [one.num_blocks for one in fleet.engines] == [2] * 3
    assert fleet.kv_tokens == 3 * 1024
    [one] = engines(1, 1.0, 512)
    assert (one.num_blocks, one.max_model_len) == (2, 1024), "never fewer than two blocks"
    assert one.abort_timeout_s == ABORT_TIMEOUT_S


def test_a_slower_engine_is_slower_in_every_part() -> None:
    usual = EngineOptions()
    slow = slower(usual, 3.0)
    for load in ((100, 50.0, 0, 0), (0, 0.0, 8, 9_000), (2_000, 9.0, 4, 10)):
        assert slow.step.step_s(*load) == pytest.approx(3.0 * usual.step.step_s(*load))
    assert slow.num_blocks == usual.num_blocks
