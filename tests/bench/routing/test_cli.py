"""The command line: what is run by default, what is refused in one line, what is printed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.routing import cli
from bench.routing.environments import RoutingError
from bench.routing.systems import RIVALS
from tests.bench.routing.runs_for_tests import result, run


def options(*arguments: str) -> cli.Options:
    return cli._options(cli._parser().parse_args(arguments))


def test_all_is_run_by_default() -> None:
    made = options()
    assert [shape.name for shape in made.shapes] == ["4x262k", "8x166k"]
    assert made.loads == ("low", "mid", "high")
    assert made.seeds == (1, 2, 3)
    ours = (("cache-proxy", "gauges"), ("cache-proxy", "plain"))
    assert made.runs == (*((rival, "") for rival in RIVALS), *ours)
    assert not made.checks


def test_the_quick_run_is_one_pair() -> None:
    made = options("--quick")
    assert made.runs == (("dynamo-kv", ""), ("cache-proxy", "gauges"))
    assert (len(made.shapes), made.loads, made.seeds) == (1, ("low",), (1,))
    assert made.checks
    assert options("--quick", "--loads", "high", "--seeds", "4-5").seeds == (4, 5)


def test_another_clone_runs_in_the_same_modes(tmp_path: Path) -> None:
    (tmp_path / "proxy").mkdir()
    made = options("--systems", "cache-proxy", "--modes", "events", "--before", str(tmp_path))
    assert made.runs == (("cache-proxy", "events"), ("before", "events"))
    assert made.before == tmp_path.resolve()


def test_more_cpus_and_fewer_systems_at_a_time_are_faster() -> None:
    assert cli.default_speedup(2, 8, 1) == cli.SPEEDUPS[-1]
    assert cli.default_speedup(2, 8, 2) == 1.5
    assert cli.default_speedup(4, 8, 2) == cli.default_speedup(2, 4, 2) == cli.SPEEDUPS[-1]
    assert cli.default_speedup(1, 8, 9) == cli.SPEEDUPS[0]


def test_more_systems_at_a_time_than_can_watch_their_engines_are_refused() -> None:
    runs = options("--modes", "gauges,plain,events").runs
    assert len(runs) == 7
    cli.check_inotify(runs, 4, 7, 126)
    cli.check_inotify(runs, 8, 7, None)
    cli.check_inotify(runs, 8, 1, 40)
    with pytest.raises(RoutingError, match=r"--parallel 7: needs 250 inotify .* allows 128"):
        cli.check_inotify(runs, 8, 7, 128)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--systems", "dynamo"), "--systems: must be of dynamo-kv, "),
        (("--modes", "fast"), "--modes: must be of gauges, plain, events, not 'fast'"),
        (("--loads", "full"), "--loads: must be of low, mid, high, not 'full'"),
        (("--shapes", "4"), "--shapes: must be of 4x262k, 8x166k, or engines x KV tokens"),
        (("--trace", "no-such-file"), "no-such-file: cannot be read: No such file or directory"),
        (("--report", "no-such-file"), "no-such-file: No such file or directory"),
        (("--report", __file__), f"{__file__}: must be what --out has written"),
        (("--before", "no-such-folder"), "--before: no-such-folder has no clone of the project"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments, "--no-install"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"bench-routing: {said}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("text", ["0", "-1", "3-1", "a", "1-b"])
def test_seeds_count_from_one(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options(f"--seeds={text}")
    assert ended.value.code == 2
    assert "--seeds" in capsys.readouterr().err


def test_earlier_results_are_printed_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result(run("dynamo-kv", 1, [1.0, 2.0])).save(tmp_path / "a.json")
    result(run("cache-proxy", 1, [1.0, 1.0], "gauges")).save(tmp_path / "b.json")
    assert cli.main(["--report", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    printed = capsys.readouterr().out
    assert "4x262k, low load" in printed
    assert "cache-proxy gauges" in printed
    assert "0.67" in printed


def test_a_result_with_lost_requests_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result(run("dynamo-kv", 1, [1.0, 2.0], lost=1, sent=3)).save(tmp_path / "a.json")
    assert cli.main(["--report", str(tmp_path / "a.json")]) == 1
    assert "FAILED: 4x262k, low, seed 1, dynamo-kv: 1 of 3 requests lost" in capsys.readouterr().err
