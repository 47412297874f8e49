"""The simulator's self-check, on runs made in virtual time with constants that are known."""

import pytest

from analysis.check.check import (
    Check,
    Compared,
    FittedModel,
    as_placed,
    check_run,
    engine_sizes,
    instance_names,
    ks_distance,
    predict,
)
from analysis.check.fit import Constants, Fit
from analysis.check.logs import read_run_log, samples_of
from replayer.engine.costs import IntakeCost
from replayer.virtual.recorded import read_recorded
from tests.support.checked_runs import PROXY, SLOW, assert_recovered, write_run_to_fit
from tests.support.recorded import write_run

pytestmark = pytest.mark.figures

FAST = Constants(
    a0=5e-3, a1=30e-6, a2=4e-5, a3=2e-8, a4=1.2e-9, x0=0.02, x1=4e-6,
    intake=2e-3, intake_per_token=1e-6,
)  # fmt: skip


def ratios(check: Check) -> dict[str, float]:
    return {one.name: one.ratio for one in (*check.times, *check.counts) if one.ratio is not None}


def test_fitted_constants_predict_a_run_of_the_cost_policy(tmp_path):
    write_run_to_fit(tmp_path, FAST, scale=6.0, limit=30, offload_policy="cost")
    check = check_run(tmp_path)
    assert_recovered(check, FAST)
    found = ratios(check)
    assert found == pytest.approx(dict.fromkeys(found, 1.0), abs=0.1)
    assert check.within(0.1)
    assert check.ks_ratio < 0.1
    assert all(one.low <= one.predicted <= one.high for one in check.times)


@pytest.mark.parametrize("policy", ["always", "seed-heuristic", "cost"])
def test_with_the_true_constants_the_prediction_is_the_run(tmp_path, policy):
    write_run(tmp_path, SLOW, PROXY, scale=6.0, offload_policy=policy)
    recorded = read_recorded(tmp_path)
    log = read_run_log(tmp_path, recorded)
    own = SLOW.scaled(1 / 6.0)
    engines = [own.engine(one) for one in engine_sizes(recorded)]
    proxy = IntakeCost(PROXY.fixed_s / 6.0, PROXY.per_token_s / 6.0)
    run = predict(recorded, log, engines, proxy)
    waited_s = [row["first_token_s"] - row["sent_s"] for row in log.client.values()]
    assert [row.ttft_s for row in run.rows] == pytest.approx(waited_s, rel=1e-9)
    model = FittedModel(Fit(own, frozenset(), {}, 0), proxy, engines)
    placed_s = as_placed(samples_of(recorded, log, instance_names(recorded)), model)
    # Times of the log are unix seconds, a quarter of a microsecond apart: a step's end may be
    # missed by that, which costs a whole step.
    off = [abs(a - b) for a, b in zip(placed_s, waited_s, strict=True)]
    assert sum(one > 1e-5 for one in off) < len(off) / 10


def test_within_is_relative_to_the_prediction():
    assert Compared("ttft_s p50", 1.15, 1.0, 1.0, 1.0).within(0.15)
    assert not Compared("ttft_s p50", 1.0, 1.2, 1.2, 1.2).within(0.15)
    assert Compared("offloads", 0, 3, 2, 4).ratio is None


def test_ks_distance():
    assert ks_distance([1.0, 2.0], [1.0, 2.0]) == 0.0
    assert ks_distance([1.0, 2.0], [3.0, 4.0]) == 1.0
    assert ks_distance([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.5, 9.0]) == 0.25


def test_a_recorded_run_keeps_its_schedule_and_options(tmp_path):
    write_run(tmp_path, SLOW, PROXY, limit=20, scale=6.0)
    recorded = read_recorded(tmp_path)
    config = recorded.config()
    assert config.kv_transfer_time_s == 0.1
    assert config.prefix_cache_bytes == 256 << 20
    assert config.shadow_policy is None
    assert recorded.rules.speedup == 12.0
    assert recorded.time_scale == 6.0
