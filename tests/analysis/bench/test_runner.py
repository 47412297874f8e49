"""Experiments as definitions, and the processes that compute their tasks."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from analysis.bench.options import flag
from analysis.bench.runner import Experiment, Result, rows_of, workers
from replayer.arguments import positive_count


def _load(by: int) -> int:
    return by


def _times(by: int, task: int) -> tuple[int, int]:
    return by * task, os.getpid()


@pytest.mark.parametrize("jobs", [1, 2])
def test_rows_are_in_the_order_of_tasks_whatever_the_number_of_processes(jobs: int) -> None:
    told: list[tuple[int, int]] = []
    with workers(jobs, _load, 3, 3) as compute:
        rows = rows_of(compute(_times, range(4)), 4, lambda done, of: told.append((done, of)))
    assert [row for row, _process in rows] == [0, 3, 6, 9]
    assert all((process == os.getpid()) is (jobs == 1) for _row, process in rows)
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


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
