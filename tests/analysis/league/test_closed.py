"""Closed loops of the league: what is kept of sessions, and the command."""

from pathlib import Path

import orjson
import pytest

from analysis.cli import main
from analysis.league import closed
from analysis.league.closed import ClosedLoad, closed_loads, closed_source
from replayer.arguments import InputError
from tests.support.traces import GOOD, SAMPLE, write


def test_sessions_are_cut_and_each_turn_waits_for_the_one_before(tmp_path: Path) -> None:
    rows = [
        {**GOOD, "session_id": "a", "output_length": 900, "delay": 3_000} for _ in range(14)
    ] + [
        {**GOOD, "session_id": "b", "input_length": 9},
        {**GOOD, "session_id": "b/sub", "parent_session_id": "b", "request_id": "sub"},
        {**GOOD, "session_id": "b", "wait_for": ["b:0", "sub"], "hash_ids": [1]},
        {**GOOD, "session_id": "c", "input_length": 300_000, "hash_ids": list(range(586))},
    ]
    source = closed_source(write(tmp_path / "t.jsonl", *rows), None, closed.KV_TOKENS)
    a, b, sub = source.units
    assert [turn.wait_for for turn in a] == [(), *[(n,) for n in range(closed.TURNS - 1)]]
    assert {turn.output_tokens for turn in a} == {closed.OUTPUT_TOKENS}
    assert a[1].delay_s == 3.0
    assert ([len(b), len(sub)], b[1].wait_for) == ([2, 1], (0,))
    assert (source.left_out.requests, source.left_out.sessions) == (1, 1)


def test_a_trace_without_fitting_sessions_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD)
    with pytest.raises(InputError, match="at most 4 tokens"):
        closed_source(path, None, closed.OUTPUT_TOKENS + 4)
    row = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}
    with pytest.raises(InputError, match="session_id"):
        closed_source(write(tmp_path / "m.jsonl", row), None, closed.KV_TOKENS)


def test_loads_have_names_or_numbers() -> None:
    assert closed_loads("low,3/7") == (closed.LOADS["low"], ClosedLoad(3, 7))


@pytest.mark.parametrize("wrong", ["", "huge", "3", "0/4", "3/x"])
def test_a_wrong_load_is_one_line(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["league", str(SAMPLE), "--closed", wrong])
    told = capsys.readouterr().err
    assert (ended.value.code, told.count("\n")) == (2, 1)
    assert "--closed" in told


@pytest.mark.parametrize(
    "wrong", ["--profile nothing", "--closed low --kv-tokens 400", "--closed low --policies nobody"]
)
def test_what_cannot_be_run_is_one_line(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["league", str(SAMPLE), *wrong.split()]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert wrong.split()[-2] in told


def test_the_command_runs_closed_loops_on_foreign_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    options = "--profile foreign --closed 2/3,4/8 --instances 2 --policies cost,session-sticky"
    arguments = ["league", str(SAMPLE), *options.split(), "--seeds", "1", "--jobs", "1"]
    assert main([*arguments, f"--json={out}"]) == 0
    document = orjson.loads(out.read_bytes())
    rows = document["rows"]
    assert [(row["load"], row["policy"]) for row in rows] == [
        (load, policy) for load in (2, 4) for policy in ("cost", "session-sticky")
    ]
    assert (document["profile"], document["regimes"], document["doubts"]) == ("foreign", [], [])
    for row in rows:
        assert row["requests"] == row["requests_run"]
        assert row["failures"] == row["offloads"] == row["drift"] == 0
        assert 0.0 < row["hit_ratio"] < 1.0
        assert 0.0 <= row["hit_error_ratio"] < 0.2
    # The smaller load has fewer than 50 requests, after which predictions are counted.
    assert rows[0]["ttft_error"]["p50"] is None
    assert 0.0 <= rows[2]["ttft_error"]["p50"] <= rows[2]["ttft_error"]["p90"]
    assert "closed, load 2" in capsys.readouterr().out
