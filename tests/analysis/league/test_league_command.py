"""`analyze league`: its table, its files, what it refuses."""

from pathlib import Path
from typing import Any

import orjson
import plotly.graph_objects as go
import pytest

from analysis.cli import main
from analysis.league.summary import summarise
from tests.support.traces import SAMPLE


@pytest.fixture
def no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_image(*_values: Any, **_options: Any) -> None:
        raise RuntimeError("\nno browser was found\nand more")

    monkeypatch.setattr(go.Figure, "write_image", write_image)


@pytest.mark.parametrize(
    "wrong",
    [
        *("--seeds 0", "--first-seed -1", "--jobs 0", "--horizon nan", "--timeout 0"),
        *("--load x", "--load ,", "--scale 1", "--replicas 0", "--replicas 65", "--replicas x"),
        *("--share-tick x", "--share-tick 0", "--share-tick 3001"),
    ],
)
def test_bad_options_are_one_line(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["league", str(SAMPLE), *wrong.split()])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.count("\n") == 1
    assert wrong.split()[0] in told


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("--balance hash", "--balance: must be of random, session, not hash"),
        ("--replicas 2 --perturb hot-engine", "hot-engine must be with --replicas 1"),
    ],
)
def test_replicas_that_cannot_be_are_one_line(
    wrong: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["league", str(SAMPLE), *wrong.split()]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1


@pytest.mark.long
@pytest.mark.usefixtures("no_browser")
def test_the_command_prints_a_table_and_writes_rows_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "league.json"
    options = "--instances 2 --load 0.5,1 --seeds 2 --regime fits --horizon 30 --jobs 1"
    policies = "cost,session-sticky"
    arguments = ["league", str(SAMPLE), *options.split(), "--policies", policies]
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


def test_a_long_command_says_how_far_it_is_and_ends_with_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = "--instances 2 --load 0.5 --seeds 2 --horizon 30 --scale 0.2:200000 --jobs 1"
    policies = ["--policies", "cost,session-sticky"]
    assert main(["league", str(SAMPLE), *options.split(), *policies]) == 0
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        f"league: {n} of 4 runs" for n in range(1, 5)
    ]
    assert lines[0].endswith(" left")
    assert lines[-1].endswith(", 0 s left")
    last = said.out.splitlines()[-1]
    assert last.startswith("cost: TTFT p90 ")
    assert " to session-sticky, goodput " in last


@pytest.mark.figures
def test_a_trace_of_a_few_words_has_a_horizon_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In 900 s engines could serve millions of such requests, which would take for ever."""
    row = b'{"timestamp":0,"input_length":200,"output_length":2000}\n'
    trace = tmp_path / "t.jsonl"
    trace.write_bytes(row * 3)
    options = "--instances 2 --load 0.5 --seeds 1 --regime fits --jobs 1 --policies session-sticky"
    out = tmp_path / "league.json"
    assert main(["league", str(trace), *options.split(), "--json", str(out)]) == 0
    assert 30.0 < orjson.loads(out.read_bytes())["horizon_s"] < 300.0
    assert "--horizon" in capsys.readouterr().err
