"""The league's figures, means, scale and command."""

from pathlib import Path
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
