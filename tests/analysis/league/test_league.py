"""The league's figures, means, scale and command."""

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson
import pytest

from analysis.cli import main
from analysis.league.fleet import EngineFleet, Scale, engines
from analysis.league.league import LeagueError, LeagueOptions, run_league
from analysis.league.simulate import Task, run_task
from replayer.virtual.arrivals import LoadRules
from replayer.virtual.load import load_source
from replayer.virtual.requests import VirtualRow
from tests.support.traces import SAMPLE


def _row(index: int, **values: Any) -> VirtualRow:
    defaults: dict[str, Any] = {"ttft_s": 1.0, "end_s": 2.0}
    return VirtualRow(index, "s", 0.0, 1000, 101, 1000, **{**defaults, **values})


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LeagueError, match="nobody"):
        run_league(LeagueOptions(SAMPLE, policies=("nobody",)), lambda _n, _of: None)
    assert main(["league", str(SAMPLE), "--policies", "nobody"]) == 2
    assert "--policies" in capsys.readouterr().err


def test_other_seeds_can_be_asked_for(tmp_path: Path) -> None:
    options = "--instances 2 --load 1 --scale 0.1:300000 --horizon 60 --jobs 1 --policies cost"
    seen: list[list[Any]] = []
    for seeds in ("--seeds 2", "--seeds 1 --first-seed 1"):
        out = tmp_path / "rows.json"
        assert main(["league", str(SAMPLE), *options.split(), *seeds.split(), f"--json={out}"]) == 0
        seen.append(orjson.loads(out.read_bytes())["rows"])
    both, second = seen
    assert [row["seed"] for row in both] == [0, 1]
    assert second == both[1:]


@pytest.mark.long
def test_replicas_that_share_decide_as_well_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same load: one router, two and four that share, and four that share nothing."""
    options = "--instances 4 --load 0.8 --scale 6:300000 --seeds 2 --horizon 40 --policies cost"
    rows: dict[str, list[dict[str, Any]]] = {}
    for wanted in ("1", "2", "4", "4 --share-tick none"):
        out, asked = tmp_path / "rows.json", f"{options} --jobs 1 --replicas {wanted}"
        assert main(["league", str(SAMPLE), *asked.split(), f"--json={out}"]) == 0
        document = orjson.loads(out.read_bytes())
        assert ("share_tick_s" in document) == (wanted != "1")
        rows[wanted] = document["rows"]
    goodput = {name: fmean(row["goodput_ratio"] for row in of) for name, of in rows.items()}
    p90_s = {name: fmean(row["ttft_s"]["p90"] for row in of) for name, of in rows.items()}
    with capsys.disabled():
        for name in rows:
            figures = f"goodput {100 * goodput[name]:.1f} %, TTFT p90 {p90_s[name]:.2f} s"
            sys.stdout.write(f"\nreplicas {name}: {figures}")
    assert all(row["drift"] == row["failures"] == 0 for of in rows.values() for row in of)
    for shared in ("2", "4"):
        assert goodput[shared] >= goodput["1"] - 0.03
        assert p90_s[shared] <= 1.2 * p90_s["1"]
    assert goodput["4"] > goodput["4 --share-tick none"]
    assert p90_s["4 --share-tick none"] > 1.4 * p90_s["4"]


@pytest.mark.long
def test_a_worker_computes_what_this_process_computes() -> None:
    rules = LoadRules(rate=0.1, horizon_s=60.0, think_cap_s=60.0)
    source = load_source(SAMPLE)
    fleet = EngineFleet(engines(2, 300_000, source.block_tokens))
    here = run_task(source, Task("always", 1.0, "given", "none", rules, fleet))
    options = LeagueOptions(
        SAMPLE,
        instances=2,
        loads=(1.0,),
        policies=("always",),
        seeds=1,
        horizon_s=60.0,
        given=Scale("given", 300_000, 0.1, 0.0),
        jobs=2,
    )
    assert run_league(options, lambda _n, _of: None).rows == [here]
