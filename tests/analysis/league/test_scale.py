"""The load at which the baseline saturates, and the KV that holds its working set."""

import pytest

from analysis.cli import main
from analysis.league.fleet import EngineFleet, engines
from analysis.league.perturbations import PERTURBATIONS
from analysis.league.scale import KEEP_UP_RATIO, Bench
from replayer.virtual.load import load_source
from tests.support.league import RULES
from tests.support.traces import SAMPLE


def test_saturation_is_where_the_baseline_stops_keeping_up() -> None:
    bench = Bench(load_source(SAMPLE), 1, RULES, 60.0)
    rate = bench.saturation(1e9, bench.prefill_bound(), 32.0)
    assert bench.run(rate, 1e9)[1] >= KEEP_UP_RATIO
    assert bench.run(1.5 * rate, 1e9)[1] < KEEP_UP_RATIO


def test_a_quarter_of_the_kv_still_takes_the_longest_request() -> None:
    fleet = EngineFleet(engines(1, 400_000, 512), longest_tokens=150_000)
    _rules, small = PERTURBATIONS["small-kv"](RULES, fleet)
    assert 150_000 < small.kv_tokens < 152_000
    _rules, small = PERTURBATIONS["small-kv"](RULES, EngineFleet(engines(1, 400_000, 512)))
    assert small.kv_tokens == pytest.approx(100_000, rel=0.01)


def test_a_scale_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--instances 2 --load 1 --seeds 1 --scale 0.1:300000 --horizon 60 --jobs 1"
    assert main(["league", str(SAMPLE), *options.split(), "--policies", "cost"]) == 0
    printed = capsys.readouterr().out
    assert "given: load 1.0 is 0.1 session starts/s" in printed
