"""Engines of a league's run."""

import pytest

from analysis.league.fleet import EngineFleet, engines, slower


def test_engines_hold_what_the_regime_gives_each_of_them() -> None:
    made = engines(3, 1000.0, 64)
    assert len(set(made)) == 1
    fleet = EngineFleet(made)
    assert fleet.kv_tokens == 3 * 16 * 64, "whole blocks, rounded up"
    assert made[0].max_model_len == 16 * 64


def test_a_slower_engine_takes_so_many_times_longer_for_any_step() -> None:
    (engine,) = engines(1, 1000.0, 64)
    twice = slower(engine, 2.0)
    one, two = engine.step, twice.step
    for name in ("a0", "a1", "a2", "a3", "a4"):
        assert getattr(two, name) == pytest.approx(2.0 * getattr(one, name))
    assert twice.num_blocks == engine.num_blocks
