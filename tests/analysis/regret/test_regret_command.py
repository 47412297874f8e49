"""`analyze regret`: what it prints, writes and refuses."""

from pathlib import Path

import orjson
import pytest

from analysis.cli import main
from tests.support.traces import SAMPLE

pytestmark = pytest.mark.figures

COMMAND = (
    "--instances 2 --load 0.8 --scale 0.2:200000 --load-horizon 60 --think-cap 5 --seeds 1 "
    "--decisions 3 --repeats 2 --futures 2 --horizon 10s --jobs 1"
)


def test_the_command_prints_regret_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "regret.json"
    assert main(["regret", str(SAMPLE), *COMMAND.split(), "--json", str(out)]) == 0
    found = orjson.loads(out.read_bytes())
    assert [one["policy"] for one in found["summary"]] == ["cost", "session-sticky"]
    for one in found["summary"]:
        assert one["mean_regret"].keys() == {"mean", "low", "high"}
        assert one["standard_error"] > 0.0
        assert sum(one["mix"].values()) == sum(one["oracle_mix"].values()) == one["decisions"]
    assert min(one["mean_regret_own_rollout"]["mean"] for one in found["summary"]) > -1.0
    assert [(r["policy"], r["mode"]) for r in found["runs"]] == [
        (policy, mode)
        for policy in ("cost", "session-sticky")
        for mode in ("watch", "rollout", "placebo")
    ]
    repeats = [len(r["repeated_s"]) for r in found["runs"]]
    assert repeats == [2, 0, 0] * 2, "only the policy's own run is repeated"
    decision = found["decisions"][0]
    assert {"seed", "at_s", "home", "chosen", "best", "gap_s", "candidates"} <= decision.keys()
    assert decision["gap_s"] >= 0.0
    printed, told = capsys.readouterr()
    lines = told.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        f"regret: {n} of 6 runs" for n in range(1, 7)
    ]
    assert printed.splitlines()[-1].startswith("session-sticky: mean regret ")
    for part in (
        "mean regret %",
        "noise floor %",
        "above floor %",
        "error %",
        "worst decisions",
        "oracle: rollout over",
    ):
        assert part in printed


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("--policies nobody", "--policies"),
        ("--regime nowhere", "--regime"),
        ("--instances 1", "--instances"),
        ("--decisions -1", "--decisions"),
        ("--repeats -1", "--repeats"),
        ("--profile none", "--profile"),
        ("--jobs 0", "--jobs"),
    ],
)
def test_bad_input_is_one_line(wrong: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["regret", str(SAMPLE), *wrong.split()]) == 2
    told = capsys.readouterr().err
    assert named in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("wrong", ["--oracle delphi", "--horizon soon", "--load 0", "--scale x"])
def test_bad_options_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["regret", str(SAMPLE), *wrong.split()])
    assert wrong.split()[0] in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["regret", "/nowhere.jsonl", *COMMAND.split()]) == 2
    assert capsys.readouterr().err.startswith("analyze: ")
