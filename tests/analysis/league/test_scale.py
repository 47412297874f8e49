"""The load at which the baseline saturates, the KV that holds its working set, and their doubts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.cli import main
from analysis.league.fleet import EngineFleet, engines
from analysis.league.perturbations import PERTURBATIONS
from analysis.league.scale import KEEP_UP_RATIO, Bench, ScaleError, cell_doubt, exceeds
from analysis.rivals.registry import BASELINE
from replayer.trace.loaders import TraceRequest
from replayer.virtual.arrivals import LoadRules
from replayer.virtual.load import Source, as_source, load_source
from tests.support.league import RULES
from tests.support.traces import SAMPLE, write


@pytest.mark.long
def test_saturation_is_where_the_baseline_stops_keeping_up() -> None:
    bench = Bench(load_source(SAMPLE), 1, RULES, 60.0)
    rate = bench.saturation(1e9, bench.prefill_bound(), 32.0)
    assert bench.run(rate, 1e9)[1] >= KEEP_UP_RATIO
    assert bench.run(1.5 * rate, 1e9)[1] < KEEP_UP_RATIO


def _alone(count: int, tokens: int, gap_s: float) -> Source:
    """A trace of prompts that share nothing, one after another."""
    return as_source(
        [
            TraceRequest(
                request_id=f"r{n}",
                session_id=None,
                turn=0,
                arrival_s=gap_s * n,
                input_tokens=tokens,
                output_tokens=20,
                runs=((1000 * n, tokens // 512),),
                block_tokens=512,
                line=n,
            )
            for n in range(count)
        ]
    )


@pytest.mark.long
def test_the_search_goes_below_its_span_and_above_it() -> None:
    bench = Bench(_alone(20, 20_480, 1.0), 1, LoadRules(1.0, 60.0), 60.0)
    rate = bench.saturation(1e6, bench.prefill_bound(), 32.0)
    for high in (10.0 * rate, rate / 10.0):
        assert bench.saturation(1e6, high, 4.0) == pytest.approx(rate, rel=0.1)


@pytest.mark.long
def test_a_short_trace_saturates_where_a_long_one_does() -> None:
    rules = LoadRules(1.0, 60.0)
    short, long = (Bench(_alone(count, 20_480, 1.0), 1, rules, 60.0) for count in (5, 500))
    rates = [bench.saturation(1e6, bench.prefill_bound(), 32.0) for bench in (short, long)]
    assert rates[0] == pytest.approx(rates[1], rel=0.15)


def test_what_never_keeps_up_is_told() -> None:
    bench = Bench(_alone(20, 200_000, 1.0), 1, LoadRules(1.0, 20.0), 60.0)
    with pytest.raises(ScaleError, match="--horizon"):
        bench.saturation(1e6, bench.prefill_bound(), 32.0)


@pytest.mark.long
def test_a_working_set_that_cannot_exceed_the_kv_is_told() -> None:
    # Prompts that end soon and never come back, beside a single one that needs much KV.
    small = _alone(20, 20_480, 1.0)
    unit = tuple(replace(turn, prompt_tokens=60_000) for turn in small.units[0])
    source = replace(small, units=(unit, *small.units[1:]))
    scale = exceeds(Bench(source, 4, LoadRules(1.0, 20.0), 60.0))
    assert "does not exceed" in scale.doubt
    assert "60,020 tokens" in scale.doubt


def _row(policy: str, done: float, **values: float) -> dict[str, Any]:
    usual = {"work_tokens": 1e6, "goodput_ratio": 0.5, "working_set_ratio": 1.2}
    return {"policy": policy, "work_done_ratio": done, **usual, **values}


def _doubt(regime: str, load: float, rows: list[dict[str, Any]]) -> str:
    return cell_doubt(regime, load, rows, 1e6 / load)


@pytest.mark.parametrize(
    ("load", "done", "doubted"),
    [
        *((0.5, 1.0, ""), (0.5, 0.7, "higher"), (0.8, 0.85, "higher")),
        *((1.0, 0.95, ""), (1.0, 0.5, "higher"), (1.5, 0.4, "")),
    ],
)
def test_a_cell_is_held_against_its_load(load: float, done: float, doubted: str) -> None:
    rows = [_row(BASELINE, done), _row(BASELINE, done), _row("cost", 0.2)]
    doubt = _doubt("fits", load, rows)
    assert doubt.endswith(doubted)
    assert bool(doubt) == bool(doubted)


def test_a_cell_of_exceeds_that_does_not_exceed_is_marked() -> None:
    rows = [_row(BASELINE, 0.95, working_set_ratio=0.4)]
    assert "0.40 of the fleet's KV" in _doubt("exceeds", 0.8, rows)
    assert _doubt("exceeds", 0.5, rows) == _doubt("fits", 0.8, rows) == ""
    assert _doubt("exceeds", 0.8, [_row(BASELINE, 0.95)]) == ""


def test_a_load_that_the_baseline_does_not_feel_is_marked() -> None:
    rows = [_row(BASELINE, 1.0, goodput_ratio=0.99), _row("cost", 1.0, goodput_ratio=1.0)]
    assert _doubt("fits", 1.0, rows).endswith("lower")
    assert _doubt("fits", 0.8, rows) == _doubt("fits", 1.0, rows[1:]) == ""


@pytest.mark.parametrize(("offered", "doubted"), [(0.7, True), (0.9, False), (1.4, True)])
def test_seeds_that_offer_another_load_are_marked(offered: float, doubted: bool) -> None:
    rows = [_row(BASELINE, 1.0, work_tokens=1e6), _row(BASELINE, 1.0, work_tokens=2e6)]
    doubt = cell_doubt("fits", 0.5, rows, 1.5e6 / 0.5 / offered)
    assert (f"{offered:.2f} times" in doubt) == doubted


def test_without_the_baseline_the_policy_that_keeps_up_best_speaks() -> None:
    rows = [_row("cost", 0.97), _row("smetric", 0.5)]
    assert _doubt("fits", 0.5, rows) == _doubt("fits", 1.0, rows) == ""
    assert "smetric" in _doubt("fits", 0.5, rows[1:])


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


def test_a_cell_beyond_its_load_is_marked_and_giants_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "timestamp": 1e3 * n,
            "input_length": 600_000 if n == 5 else 40_000,
            "output_length": 20,
            "hash_ids": [1_000_000 * n + block for block in range(1172 if n == 5 else 79)],
        }
        for n in range(30)
    ]
    path, out = write(tmp_path / "t.jsonl", *rows), tmp_path / "rows.json"
    options = f"--instances 1 --load 0.5 --seeds 1 --horizon 60 --policies {BASELINE},cost"
    arguments = ["league", str(path), *options.split(), "--jobs", "1", f"--json={out}"]
    assert main([*arguments, "--scale", "4:300000"]) == 0
    document, printed = out.read_text(), capsys.readouterr().out
    assert '"doubt": "session-sticky has done' in document
    assert "left out: 1 requests of 1 sessions" in printed
    assert "given, load 0.5 ! session-sticky has done" in printed
    assert "given 0.5 !" in printed
