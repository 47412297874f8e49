"""`analyze plan`: its tables, its file, what it refuses."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from analysis.cli import main
from tests.analysis.plan.test_traffic import row, written


@pytest.mark.parametrize(
    "wrong",
    [
        *("--startup -1", "--startup x", "--startup ,", "--slo 2", "--slo 2/0", "--slo x/1"),
        *("--attain 0", "--attain 1.1", "--thin 0", "--seeds 0", "--max-replicas 0", "--gpus 0"),
        *("--effort -1", "--timeout 0", "--interval 0", "--grace -1", "--jobs 0"),
    ],
)
def test_bad_options_are_one_line(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *wrong.split()])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.count("\n") == 1
    assert wrong.split()[0] in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--policies nobody", "analyze: --policies: must be of static, clairvoyant, founding, "),
        ("--spread 0.5", "analyze: --spread: must be a number >= 1, not 0.5"),
        ("--predictors oracle", "analyze: --predictors: must be of all, constant, "),
        ("mooncake", "analyze: mooncake: needs conversation_trace.jsonl in the folder of --traces"),
        ("no.jsonl", "analyze: no.jsonl: "),
    ],
)
def test_what_cannot_be_played_is_one_line(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith(told)
    assert said.count("\n") == 1


def test_the_command_prints_its_tables_and_writes_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(tmp_path / "t.jsonl", *(row(5000 * n, [n, n + 90]) for n in range(6)))
    out = tmp_path / "runs.json"
    words = "--startup 0,30 --policies clairvoyant,founding --max-replicas 2 --effort 0"
    assert main(["plan", str(trace), *words.split(), "--jobs", "1", "--json", str(out)]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("plan: 1 of 2 runs")
    assert said.out.count("headroom of t.jsonl, start-up ") == 2
    assert "t.jsonl, start-up 30 s (6 requests)" in said.out
    document = orjson.loads(out.read_bytes())
    assert {run["policy"] for run in document["runs"]} == {
        *("clairvoyant", "unwarned", "founding", "static:1", "static:2")
    }
    assert all(run["broken"] == 0 for run in document["runs"])
    assert len(document["headroom"]) == 2


def test_predictors_are_judged_by_arrivals_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(tmp_path / "t.jsonl", *(row(5000 * n, [n, n + 90]) for n in range(60)))
    out = tmp_path / "found.json"
    words = f"{trace} --predictors constant,kalman --startup 0,60 --json {out}"
    assert main(["plan", *words.split()]) == 0
    assert "t.jsonl, intervals of 30 s" in capsys.readouterr().out
    found = orjson.loads(out.read_bytes())["predictors"]
    assert [(one["predictor"], one["ahead"]) for one in found] == [
        *(("constant", 1), ("kalman", 1)),
        *(("constant", 3), ("kalman", 3)),
    ]
    assert all(one["react_s"] is None for one in found)
