"""Fleets of other engines: each serves a load to its end, and differs as its profile says."""

import pytest

from analysis.league.profiles import FOREIGN, H100, PROFILES
from analysis.league.simulate import run_policy
from replayer.engine.types import EngineOptions
from replayer.virtual.arrivals import plan
from replayer.virtual.load import load_source
from tests.support.league import RULES
from tests.support.traces import SAMPLE

KV_TOKENS = 300_000
SOURCE = load_source(SAMPLE)


@pytest.mark.long
@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_serves_a_load(name: str) -> None:
    profile = PROFILES[name]
    source = load_source(SAMPLE, profile.block_tokens)
    fleet = profile.fleet(source, 3, KV_TOKENS, 60.0, RULES.horizon_s)
    planned = plan(source, RULES)
    run = run_policy("always", planned, fleet, source.block_tokens)
    assert [row.outcome for row in run.rows] == ["ok"] * len(planned)
    assert run.drift == 0
    # Where there is no connector even a policy that always offloads does not.
    assert any(row.prefill for row in run.rows) == ("kv_connector" not in profile.options)


def test_the_usual_engines_are_the_preset() -> None:
    fleet = H100.fleet(SOURCE, 3, KV_TOKENS, 60.0, 900.0)
    assert len(set(fleet.engines)) == 1
    assert fleet.engines[0].step == EngineOptions().step
    assert fleet.kv_tokens == pytest.approx(3 * KV_TOKENS, rel=0.01)
    assert (fleet.reports_kv, fleet.joins_s, fleet.way.mean_s) == (True, (), 0.0)


def test_foreign_engines_have_small_blocks_and_tell_nothing() -> None:
    source = load_source(SAMPLE, FOREIGN.block_tokens)
    fleet = FOREIGN.fleet(source, 2, KV_TOKENS, 60.0)
    assert source.block_tokens == 64
    assert not fleet.reports_kv
    short_s, long_s = (fleet.engines[0].alone_s(tokens) for tokens in (10_000, 100_000))
    assert long_s == pytest.approx(10 * short_s, rel=0.1), "no dearer with context"


def test_mixed_engines_alternate_and_each_has_room_for_the_longest_request() -> None:
    fleet = PROFILES["mixed"].fleet(SOURCE, 4, KV_TOKENS, 60.0)
    newer, older = fleet.engines[:2]
    assert newer.num_blocks == pytest.approx(2 * older.num_blocks, abs=1)
    assert older.alone_s(20_000) > 1.9 * newer.alone_s(20_000)
    assert fleet.engines[:2] == fleet.engines[2:]
    assert fleet.kv_tokens == pytest.approx(4 * KV_TOKENS, rel=0.01)
    tight = PROFILES["mixed"].fleet(SOURCE, 2, SOURCE.longest_tokens, 60.0)
    least = min(one.num_blocks * one.block_size for one in tight.engines)
    assert least >= SOURCE.longest_tokens


def test_the_last_engine_joins_during_a_load_only() -> None:
    slow = PROFILES["slow-start"]
    assert slow.fleet(SOURCE, 3, KV_TOKENS, 60.0, 900.0).joins_s == (0.0, 0.0, 360.0)
    assert slow.fleet(SOURCE, 3, KV_TOKENS, 60.0).joins_s == ()
    assert slow.fleet(SOURCE, 1, KV_TOKENS, 60.0, 900.0).joins_s == ()


def test_what_no_engine_can_hold_or_compute_in_time_is_left_out() -> None:
    assert H100.read(SAMPLE, 60.0).left_out.requests == 0
    small = H100.read(SAMPLE, 60.0, kv_tokens=30_000)
    assert small.longest_tokens <= 30_000
    assert 0 < small.left_out.sessions <= small.left_out.requests
    hasty = H100.read(SAMPLE, timeout_s=1.0)
    longest = max(turn.prompt_tokens for unit in hasty.units for turn in unit)
    assert EngineOptions().alone_s(longest) <= 1.0
    assert EngineOptions().alone_s(hasty.left_out.shortest_tokens) > 1.0
