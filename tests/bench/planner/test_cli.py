"""The command line: what is played by default, what is refused, what is printed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.plan.measured import CLAIRVOYANT
from bench.planner import cli
from bench.planner.results import Result
from bench.planner.rules.rivals import RIVALS
from bench.routing import environments
from replayer.loads import LOADS, SYNTHETIC
from tests.analysis.plan.runs_for_tests import run


def options(*arguments: str) -> cli.Options:
    return cli._options(cli._parser().parse_args(arguments))


def test_all_is_played_by_default() -> None:
    made = options()
    assert made.policies == ("static", *RIVALS, CLAIRVOYANT)
    assert made.loads == LOADS
    assert (made.startups_s, made.seeds, made.router) == ((30.0, 120.0), (1,), "kv_router")


def test_a_policy_of_one_s_own_has_settings() -> None:
    made = options("--policies", 'a.b:C:{"x": [1, 2], "y": 3},static:4,all', "--startup", "0,5")
    assert made.policies[0] == "static"
    assert set(made.policies) > {'a.b:C:{"x": [1, 2], "y": 3}', "static:4"}
    assert made.startups_s == (0.0, 5.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--policies", "kedo"),
        ("--policies", "m:C:{"),
        ("--loads", "tide"),
        ("--startup", "-1"),
        ("--seeds", "0"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    error = capsys.readouterr().err
    assert error.startswith(f"bench-planner: argument {arguments[0]}")
    assert error.count("\n") == 1


def test_only_loads_that_can_be_made_become_jobs(tmp_path: Path) -> None:
    made = options("--work", str(tmp_path), "--seeds", "1,2", "--policies", "static:2")
    jobs = list(cli._jobs(made))
    assert [job.name for job in jobs] == [f"{name}-{seed}" for seed in (1, 2) for name in SYNTHETIC]
    engine = jobs[0].engine
    assert Path(engine.arguments).is_file()
    assert engine.replay_arguments(7.0)["startup_time"] == 7.0
    assert engine.replay_arguments(7.0)["engine"]["num_gpu_blocks"] == 4096


def test_the_environment_is_that_of_routing_and_more() -> None:
    plain, more = (cli.environment(has_presets=one) for one in (False, True))
    assert plain.name != more.name
    assert environments.REQUIREMENTS.read_text() in plain.fingerprint
    assert "aisimulate" not in plain.fingerprint
    assert "aisimulate==0.13.0.dev" in more.fingerprint


def test_earlier_runs_are_printed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run(CLAIRVOYANT, 4.0, 0.99, is_best=True), run("keda-queue", 5.0, 0.98)]
    Result(runs, {"agentic": "needs a file"}).save(tmp_path / "out.json")
    assert cli.main(["--report", str(tmp_path / "out.json")]) == 0
    text = capsys.readouterr().out
    assert "keda-queue" in text
    assert "left out: agentic: needs a file" in text
    assert cli.main(["--markdown", "--report", str(tmp_path / "out.json")]) == 0
    assert "| keda-queue | 98.0 | 5.00 | 1.25 |" in capsys.readouterr().out


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.json"
    assert cli.main(["--report", str(path)]) == 2
    assert capsys.readouterr().err == f"bench-planner: {path}: No such file or directory\n"
