"""The fleet of an experiment around one saturation rate: what is given, and what is found."""

from __future__ import annotations

import pytest

from analysis.league.capacity.setting import CapacityError, CapacityOptions
from analysis.league.fleet import Scale
from analysis.league.scale import find_setting
from tests.support.traces import SAMPLE

GIVEN = CapacityOptions(
    SAMPLE, instances=3, seeds=2, first_seed=5, given=Scale("given", 300_000, 6.0, 0.0), timeout_s=9
)


def test_a_scale_that_is_given_is_taken() -> None:
    told: list[str] = []
    setting = find_setting(GIVEN, told.append)
    assert setting.scale == GIVEN.given
    assert len(setting.fleet.engines) == 3
    assert setting.fleet.timeout_s == 9
    assert setting.fleet.kv_tokens >= 3 * 300_000
    assert told == [
        f"load 1.0 is 6 session starts per second; {setting.rules.horizon_s:.3g} s each"
    ]
    assert list(GIVEN.drawn) == [5, 6]
    rules = setting.at(0.5, 6)
    assert (rules.rate, rules.seed) == (3.0, 6)
    assert rules.horizon_s == setting.rules.horizon_s > 0


@pytest.mark.long
def test_a_scale_is_searched_for_and_each_run_is_told() -> None:
    told: list[str] = []
    options = CapacityOptions(SAMPLE, instances=2, horizon_s=30.0)
    setting = find_setting(options, told.append)
    first, *runs, last = told
    assert first == "looking for the load that 2 engines take"
    assert len(runs) > 2
    assert all("session starts per second session-sticky does" in line for line in runs)
    assert last == f"load 1.0 is {setting.scale.rate:.3g} session starts per second; 30 s each"
    assert setting.rules.horizon_s == 30.0


def test_what_no_engine_can_hold_is_left_out_and_told() -> None:
    told: list[str] = []
    options = CapacityOptions(SAMPLE, given=Scale("given", 60_000, 6.0, 0.0), horizon_s=30.0)
    find_setting(options, told.append)
    assert told[0].startswith("left out: ")


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(CapacityError, match="--profile: must be of h100"):
        find_setting(CapacityOptions(SAMPLE, profile="none"), lambda _what: None)
