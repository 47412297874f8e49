"""The command `profile`, as a process: what it writes, and that an interrupt ends what it began."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.measuring.processes import Child
from planner.config.profiles import JSON, NPZ, read_profile
from planner.profiling.cli import declare, run
from replayer.arguments import InputError, OneLineParser
from replayer.simulator.host import SimFleet
from replayer.terminal import Terminal
from tests.support.harness import until
from tests.support.sim_http import is_idle

COMMAND = """
import sys
from planner.profiling.cli import declare, run
from replayer.arguments import OneLineParser
from replayer.terminal import Terminal

parser = OneLineParser(prog="profile")
declare(parser)
sys.exit(run(parser.parse_args(), Terminal()))
"""
ENGINE: dict[str, Any] = {"max_model_len": 4096, "num_gpu_blocks": 1025, "max_num_seqs": 16}
GRID = ("--prefill-granularity", "4", "--decode-granularity", "2", "--max-num-seqs", "16")


def profiling(url: str, out: Path, *more: str) -> Child:
    """The command on an instance."""
    return Child(
        [sys.executable, "-c", COMMAND, "--instance", url, "--out", str(out), *GRID, *more]
    )


@pytest.mark.long
async def test_it_measures_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "new" / "profile"
    async with SimFleet(1, speed=10.0, **ENGINE) as fleet:
        with profiling(fleet.engines[0].url, out) as process:
            assert await process.ended() == 0
            lines = process.log.splitlines()
        assert is_idle(fleet.engines[0])
    profile = read_profile(out)
    assert [point.isl_tokens for point in profile.prefill] == [128, 392, 1203, 3686]
    assert [point.context_tokens for point in profile.decode] == [128, 128, 3686, 3686]
    assert lines[0].startswith("sim-8b at http://127.0.0.1:")
    assert len(lines) == 1 + 4 + 4 + 2 + 2
    assert lines[-4].startswith("first token: left out one by one, 2 points are foretold to ")
    assert lines[-3] == "tokens after it: no point stands between others"
    assert lines[-1] == f"written: {out / JSON['decode']}"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupt_ends_what_it_began(tmp_path: Path, number: signal.Signals) -> None:
    """While streams run that would go on for half a minute."""
    async with SimFleet(1, speed=1.0, **ENGINE) as fleet:
        engine = fleet.engines[0]
        with profiling(engine.url, tmp_path / "out") as process:
            await until(lambda: engine.stats()["running"] > 4)
            process.send_signal(number)
            assert await process.ended() == 130
            assert process.log.endswith("profile: interrupted; nothing is written\n")
            assert "Traceback" not in process.log
        await until(lambda: is_idle(engine), "the engine has no request")
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.long
async def test_one_line_where_it_breaks_off(tmp_path: Path) -> None:
    async with SimFleet(1, speed=10.0, **(ENGINE | {"max_num_seqs": 2})) as fleet:
        with profiling(fleet.engines[0].url, tmp_path, "--timeout", "1") as process:
            assert await process.ended() == 1
            last = process.log.splitlines()[-1]
    assert last.startswith("profile: ")
    assert "--max-num-seqs" in last
    assert os.listdir(tmp_path) == []


def options(*given: str) -> argparse.Namespace:
    parser = OneLineParser(prog="profile")
    declare(parser)
    return parser.parse_args(["--instance", "127.0.0.1:9", *given])


def test_a_folder_that_has_another_form(tmp_path: Path) -> None:
    path = tmp_path / NPZ["decode"]
    path.parent.mkdir()
    path.write_bytes(b"")
    with pytest.raises(InputError, match=r"has selected_decode_interpolation/raw_data\.npz, which"):
        run(options("--out", str(tmp_path)), Terminal())


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match=r"--out \S+file/x: Not a directory"):
        run(options("--out", str(tmp_path / "file" / "x")), Terminal())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--prefill-granularity", "1"], "--prefill-granularity: must be at least 2, not '1'"),
        (["--decode-granularity", "x"], "--decode-granularity: must be an integer >= 1"),
        (["--gpus", "0"], "--gpus: must be an integer >= 1"),
        (["--timeout", "nan"], "--timeout: must be a finite number"),
        (["--instance", "ftp://a"], "--instance: must be http(s)://HOST:PORT, not 'ftp://a'"),
        (["--instance", "me:secret@a:1"], "--instance: must be http(s)://HOST:PORT; use --api-key"),
    ],
)
def test_bad_options(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        options(*given)
    line = capsys.readouterr().err
    assert told in line
    assert line.count("\n") == 1
    assert "secret" not in line
