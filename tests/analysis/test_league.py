"""The league's figures, means, scale and command."""

import math
from pathlib import Path
from typing import Any

import orjson
import plotly.graph_objects as go
import pytest
from rich.console import Console

from analysis.cli import main
from analysis.league.fleet import EngineFleet, Scale, engines
from analysis.league.league import LeagueError, LeagueOptions, run_league
from analysis.league.perturbations import PERTURBATIONS
from analysis.league.scale import KEEP_UP_RATIO, Bench
from analysis.league.simulate import (
    Task,
    figures,
    run_policy,
    run_task,
    spread,
    working_set_tokens,
)
from analysis.league.summary import mean_and_interval, summarise
from analysis.league.verdict import print_verdicts, verdicts
from replayer.virtual.arrivals import LoadRules, plan
from replayer.virtual.load import load_source
from replayer.virtual.requests import VirtualRow

TRACE = Path(__file__).parents[2] / "replayer" / "data" / "agentic_sample.trace.jsonl.gz"
RULES = LoadRules(rate=0.2, horizon_s=120.0, think_cap_s=5.0)


def _row(index: int, **values: Any) -> VirtualRow:
    defaults: dict[str, Any] = {"ttft_s": 1.0, "end_s": 2.0}
    return VirtualRow(index, "s", 0.0, 1000, 101, 1000, **{**defaults, **values})


def test_percentiles_are_nearest_rank_and_failures_infinite() -> None:
    assert spread([1.0, 2.0, 3.0, math.inf], (50, 90)) == {"p50": 2.0, "p90": None, "mean": None}
    assert spread([], (50,)) == {"p50": None, "mean": None}


def test_the_mean_over_seeds_has_an_interval() -> None:
    mean, low, high = mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert 1.0 <= low < mean < high <= 3.0
    assert mean_and_interval([1.0, math.inf]) == (math.inf, 1.0, math.inf)


def test_a_context_counts_from_its_request_to_the_next() -> None:
    rows = [
        VirtualRow(0, "a", 50.0, 100, 1, 1, end_s=60.0),
        VirtualRow(1, "a", 75.0, 200, 1, 1, end_s=100.0),
        VirtualRow(2, "b", 0.0, 1000, 1, 1, end_s=40.0),
    ]
    assert working_set_tokens(rows, 100.0) == pytest.approx((25 * 100 + 25 * 200) / 50)


def test_figures_of_a_run() -> None:
    source = load_source(TRACE)
    planned = plan(source, RULES)
    fleet = EngineFleet(engines(2, 400_000, source.block_tokens))
    run = run_policy("session-sticky", planned, fleet, source.block_tokens)
    row = figures(run, planned, RULES, fleet.kv_tokens)
    assert row["requests_run"] == len(planned) > row["requests"] > 0
    assert row["failures"] == row["offloads"] == row["moved_bytes"] == row["drift"] == 0
    assert 0.0 < row["hit_ratio"] < 1.0
    assert row["ttft_s"]["p50"] <= row["ttft_s"]["p90"] <= row["ttft_s"]["p99"]
    assert 0.0 <= row["goodput_ratio"] <= 1.0


def test_saturation_is_where_the_baseline_stops_keeping_up() -> None:
    bench = Bench(load_source(TRACE), 1, RULES, 60.0)
    rate = bench.saturation(1e9, bench.prefill_bound(), 32.0)
    assert bench.run(rate, 1e9)[1] >= KEEP_UP_RATIO
    assert bench.run(1.5 * rate, 1e9)[1] < KEEP_UP_RATIO


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_every_perturbation_runs(name: str) -> None:
    source = load_source(TRACE)
    rules, fleet = PERTURBATIONS[name](RULES, EngineFleet(engines(2, 400_000, source.block_tokens)))
    planned = plan(source, rules)
    run = run_policy("always", planned, fleet, source.block_tokens)
    assert len(run.rows) == len(planned)
    assert run.drift == 0


@pytest.fixture
def no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_image(*_values: Any, **_options: Any) -> None:
        raise RuntimeError("\nno browser was found\nand more")

    monkeypatch.setattr(go.Figure, "write_image", write_image)


def test_a_quarter_of_the_kv_still_takes_the_longest_request() -> None:
    fleet = EngineFleet(engines(1, 400_000, 512), longest_tokens=150_000)
    _rules, small = PERTURBATIONS["small-kv"](RULES, fleet)
    assert 150_000 < small.kv_tokens < 152_000
    _rules, small = PERTURBATIONS["small-kv"](RULES, EngineFleet(engines(1, 400_000, 512)))
    assert small.kv_tokens == pytest.approx(100_000, rel=0.01)


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LeagueError, match="nobody"):
        run_league(LeagueOptions(TRACE, policies=("nobody",)), lambda _n, _of: None)
    assert main(["league", str(TRACE), "--policies", "nobody"]) == 2
    assert "--policies" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        *("--seeds 0", "--first-seed -1", "--jobs 0", "--horizon nan", "--timeout 0"),
        *("--load x", "--load ,", "--scale 1"),
    ],
)
def test_bad_options_are_one_line(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["league", str(TRACE), *wrong.split()])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.count("\n") == 1
    assert wrong.split()[0] in told


def test_a_scale_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--instances 2 --load 1 --seeds 1 --scale 0.1:300000 --horizon 60 --jobs 1"
    assert main(["league", str(TRACE), *options.split(), "--policies", "cost"]) == 0
    printed = capsys.readouterr().out
    assert "given: load 1.0 is 0.1 session starts/s" in printed


def test_other_seeds_can_be_asked_for(tmp_path: Path) -> None:
    options = "--instances 2 --load 1 --scale 0.1:300000 --horizon 60 --jobs 1 --policies cost"
    seen: list[list[Any]] = []
    for seeds in ("--seeds 2", "--seeds 1 --first-seed 1"):
        out = tmp_path / "rows.json"
        assert main(["league", str(TRACE), *options.split(), *seeds.split(), f"--json={out}"]) == 0
        seen.append(orjson.loads(out.read_bytes())["rows"])
    both, second = seen
    assert [row["seed"] for row in both] == [0, 1]
    assert second == both[1:]


def test_a_worker_computes_what_this_process_computes() -> None:
    rules = LoadRules(rate=0.1, horizon_s=60.0, think_cap_s=60.0)
    source = load_source(TRACE)
    fleet = EngineFleet(engines(2, 300_000, source.block_tokens))
    here = run_task(source, Task("always", 1.0, "given", "none", rules, fleet))
    options = LeagueOptions(
        TRACE,
        instances=2,
        loads=(1.0,),
        policies=("always",),
        seeds=1,
        horizon_s=60.0,
        given=Scale("given", 300_000, 0.1, 0.0),
    )
    assert run_league(options, lambda _n, _of: None).rows == [here]


@pytest.mark.usefixtures("no_browser")
def test_the_command_prints_a_table_and_writes_rows_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "league.json"
    options = "--instances 2 --load 0.5,1 --seeds 2 --regime fits --horizon 60 --jobs 1"
    policies = "cost,session-sticky"
    arguments = ["league", str(TRACE), *options.split(), "--policies", policies]
    assert main([*arguments, "--json", str(out), "--figures", str(tmp_path / "figures")]) == 0
    document = orjson.loads(out.read_bytes())
    rows = document["rows"]
    assert [(r["load"], r["seed"], r["policy"]) for r in rows] == [
        (load, seed, policy)
        for load in (0.5, 1.0)
        for seed in (0, 1)
        for policy in policies.split(",")
    ]
    needed = {"requests", "failures", "goodput_ratio", "ttft_s", "tpot_s", "e2e_s", "hit_ratio"}
    assert needed | {"offloads", "moved_bytes", "regime"} <= rows[0].keys()
    printed = capsys.readouterr().out
    assert "fits, load 0.5" in printed
    assert "session-sticky" in printed
    assert (tmp_path / "figures" / "league-load-0.5.html").exists()
    assert "(no league-load-0.5.png: no browser was found)" in printed
    best = [one["goodput_ratio"][0] for one in summarise(rows) if one["load"] == 1.0]
    assert best == sorted(best, reverse=True)


def summary(policy: str, goodput: float, ttft_p90: float, failures: float = 0.0) -> dict[str, Any]:
    figures = {
        "goodput_ratio": goodput,
        "ttft_s.p50": 0.2,
        "ttft_s.p90": ttft_p90,
        "tpot_s.p90": 0.03,
        "makespan_s": 900.0,
        "failures": failures,
    }
    cell = {"regime": "fits", "perturb": "none", "load": 0.8, "policy": policy}
    return cell | {name: (value, value, value) for name, value in figures.items()}


def test_the_verdict_names_the_best_and_what_it_lost(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        summary("cost", 0.6, 2.0),
        summary("session-sticky", 0.5, 4.0),
        summary("consistent-hash", 0.75, math.inf, failures=4.0),
    ]
    (verdict,) = verdicts(rows)
    assert verdict.goodput_gap == pytest.approx(-0.2)
    assert verdict.ttft_gap == 0.0
    assert verdict.against_baseline("ttft_s.p90") == pytest.approx(-0.5)
    print_verdicts(rows, Console(width=220))
    printed = capsys.readouterr().out
    assert "75.0 consistent-hash (4.0 failed)" in printed
    assert "-20.0 %" in printed
    print_verdicts(rows[1:], Console(width=220))
    assert capsys.readouterr().out == ""
