"""Experiments as definitions, and the processes that compute their tasks."""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import orjson
import psutil
import pytest
from rich.console import Console

from analysis.bench.options import flag
from analysis.bench.runner import Experiment, Result, rows_of, workers
from bench.measuring.processes import Child
from replayer.arguments import positive_count
from replayer.trace.loaders import read_trace
from replayer.trace.rows import TraceError
from tests.support.waiting import until_true


def _load(by: int) -> int:
    return by


def _times(by: int, task: int) -> tuple[int, int]:
    return by * task, os.getpid()


@pytest.mark.long
@pytest.mark.parametrize("jobs", [1, 2])
def test_rows_are_in_the_order_of_tasks_whatever_the_number_of_processes(jobs: int) -> None:
    told: list[tuple[int, int]] = []
    with workers(jobs, _load, 3, 3) as compute:
        rows = rows_of(compute(_times, range(4)), 4, lambda done, of: told.append((done, of)))
    assert [row for row, _process in rows] == [0, 3, 6, 9]
    assert all((process == os.getpid()) is (jobs == 1) for _row, process in rows)
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.long
def test_tasks_apart_have_each_a_process_of_its_own() -> None:
    with workers(1, _load, 3, 3, apart=True) as compute:
        processes = {process for _row, process in compute(_times, range(2))}
    assert len(processes) == 2
    assert os.getpid() not in processes


def _read(_state: int, path: Path) -> int:
    return len(list(read_trace(path)))


def test_what_is_wrong_with_the_input_is_raised_in_the_caller(tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"
    with workers(2, _load, 0, 0) as compute, pytest.raises(TraceError, match="cannot be read"):
        list(compute(_read, [missing]))


BUSY = """
import pathlib, signal, sys
from analysis.bench.runner import workers

def load(begun):
    return begun

def wait(begun, _task):
    pathlib.Path(begun).touch()
    signal.pause()

if __name__ == "__main__":
    with workers(1, load, sys.argv[1], None, apart=True) as compute:
        list(compute(wait, [0]))
"""


def test_a_worker_ends_with_its_caller(tmp_path: Path) -> None:
    """Its task leaves a file to say that it has begun."""
    begun, script = tmp_path / "begun", tmp_path / "busy.py"
    script.write_text(BUSY)
    path = os.pathsep.join(one for one in sys.path if one)
    environment = {**os.environ, "PYTHONPATH": path}
    with Child([sys.executable, str(script), str(begun)], env=environment) as caller:
        until_true(begun.exists)
        started = psutil.Process(caller.pid).children()
        caller.kill()
    _gone, alive = psutil.wait_procs(started, timeout=20)
    for process in alive:
        process.kill()
    assert started
    assert not alive


@dataclass(frozen=True, slots=True)
class Asked:
    number: int = flag(positive_count, "a number", 2)
    json: Path | None = flag(Path, "a file", None)


def test_a_definition_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def perform(options: Asked, console: Console) -> Result:
        console.print(f"table of {options.number}")
        return Result([options.number], ("said",), lambda: ["page.html"], status=1)

    experiment = Experiment(Asked, perform, width=40, text="What it does.")
    parser = argparse.ArgumentParser()
    experiment.declare(parser)
    assert parser.description == "What it does."
    out = tmp_path / "x.json"
    given = parser.parse_args(["--number", "5", "--json", str(out)])
    assert experiment.run(given, Console(width=30)) == 1
    assert orjson.loads(out.read_bytes()) == [5]
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["table of 5", f"written: {out}", "written: page.html", "said"]
