"""`analyze what-if` and `replay what-if`: the verdict, its doubts, and what is refused."""

import sys

import orjson
import pytest

from analysis.check import what_if
from analysis.check.fit import NAMES, Fit
from analysis.cli import main
from replayer.replay.__main__ import main as replay
from tests.support.checked_runs import FITTED_BLOCK_TOKENS, PROXY, SLOW
from tests.support.logged import line, write_log, write_options
from tests.support.recorded import read_lines, write_lines, write_run
from tests.support.traces import sample_in_blocks_of


@pytest.fixture
def log(tmp_path, monkeypatch):
    """The log of a run whose constants are known; that a fit finds them test_fit.py shows."""
    monkeypatch.setattr(what_if, "fit", lambda *_: Fit(SLOW, frozenset(NAMES), {}, 0))
    trace = sample_in_blocks_of(FITTED_BLOCK_TOKENS, tmp_path)
    write_run(tmp_path, SLOW, PROXY, 1, 80, trace=trace, offload_policy="never")
    return tmp_path / "proxy.jsonl"


def test_the_first_line_is_the_verdict(log, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main(["what-if", str(log), "--instances", "3", "--json", str(out)]) == 0
    told = capsys.readouterr()
    first, second, *_ = told.out.splitlines()
    start = "never on 3 would have had TTFT p90 "
    assert first.startswith(start)
    assert " % lower than never on 1 (95 % interval -" in first
    assert second.startswith("virtual time beside the log, under never: TTFT p50 ")
    assert ", within 10 % (" in second
    assert "what-if: 10 of 10 runs" in told.err
    document = orjson.loads(out.read_bytes())
    assert document["verdict"] == first
    assert document["trusted"] is True
    assert document["asked"]["instances"] == 3
    p90 = document["figures"][1]
    assert p90["name"] == "ttft_s p90"
    assert p90["low"] <= p90["change"] <= p90["high"] < 0


def test_without_a_change_it_says_how_well_the_run_is_reproduced(log, capsys):
    assert main(["what-if", str(log)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("never, the policy that ran, is reproduced: TTFT p50 ")


def test_a_policy_that_makes_no_difference(log, capsys):
    assert main(["what-if", str(log), "--policy", "cost"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    told = "cost would have had a TTFT p90 that cannot be told from that of never (95 % interval "
    assert first.startswith(told)
    assert first.endswith("goodput equal.")


def test_other_options_are_compared_too(log, tmp_path, capsys):
    ran = write_options(tmp_path / "ran.toml", {"offload_policy": "never", "heavy_threshold": 4000})
    other = write_options(tmp_path / "other.toml", {"placement": "load"})
    arguments = ["what-if", str(log), "--config", str(ran), "--other-config", str(other)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("never with other.toml would have had ")
    assert (
        main([*arguments[:-2], "--config", str(write_options(ran, {"offload_policy": "cost"}))])
        == 2
    )
    assert "has offload_policy cost, but the log never" in capsys.readouterr().err


def test_a_run_that_is_not_reproduced_gives_no_verdict(log, capsys):
    rows = read_lines(log)
    for row in rows:
        row["t_first_token"] += 0.5
        row["t_done"] += 0.5
    write_lines(log, rows)
    assert main(["what-if", str(log), "--policy", "always"]) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("Not to be trusted: always would have had ")
    assert ", not within 10 % (" in second


def test_replay_has_it_too(log, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["replay", "what-if", str(log), "--policy", "never"])
    assert replay() == 0
    assert "never, the policy that ran, is reproduced" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("--policy", "best"), "--policy: must be of cost, session-sticky, "),
        (("--instances", "257"), "--instances: must be 1 to 256, not 257"),
        (("--model", "n"), "{log}: --model must be one of 'm', not 'n'"),
        (("--kv-tokens", "9"), "--kv-tokens: must be 1,642 at least"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch, more, text):
    path = write_log(tmp_path / "log", [line("s", 0, 0.0)])
    monkeypatch.setattr(sys, "argv", ["replay", "what-if", str(path), *more])
    assert replay() == 2
    told = capsys.readouterr().err
    assert told.startswith("replay: " + text.format(log=path))
    assert told.count("\n") == 1


def test_a_policy_of_somebody_else_cannot_be_repeated(tmp_path, capsys):
    path = write_log(tmp_path / "log", [line("s", 0, 0.0, policy="mine")])
    assert main(["what-if", str(path)]) == 2
    assert "ran with mine, which virtual time does not have" in capsys.readouterr().err
