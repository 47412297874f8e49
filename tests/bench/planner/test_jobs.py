"""Jobs and their processes: lines, failures, what a stop leaves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.planner.jobs import (
    Job,
    LeftOut,
    PlannerError,
    Played,
    Workers,
    line_of,
    read_line,
)
from tests.analysis.plan.runs_for_tests import RUN
from tests.bench.planner.runs_for_tests import ENGINE, written

JOB = Job(
    load="step",
    seed=2,
    startups_s=[30.0],
    policies=["static", 'm:C:{"a": 1}'],
    router="kv_router",
    effort=4,
    trace="trace",
    traces=None,
    engine=ENGINE,
)


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    JOB.save(tmp_path / "job")
    assert Job.read(tmp_path / "job") == JOB
    assert JOB.name == "step-2"


def test_a_line_is_a_run_or_what_was_left_out() -> None:
    left = LeftOut("dynamo-latency", "no aisimulate", is_fault=False)
    assert [read_line(line_of(one)) for one in (RUN, left)] == [RUN, left]


def program(tmp_path: Path, body: str) -> Path:
    """In the place of Python: it gets `-m bench.planner.worker JOB`."""
    path = written(tmp_path / "python", f"#!{sys.executable}\nimport sys\n{body}\n")
    path.chmod(0o755)
    return path


def test_lines_arrive_from_every_worker(tmp_path: Path) -> None:
    python = program(tmp_path, f"assert sys.argv[1] == '-m'\nprint({line_of(RUN)!r})")
    found: list[Played] = []
    jobs = [JOB, Job(**{name: getattr(JOB, name) for name in Job.__slots__} | {"seed": 3})]
    Workers(python, tmp_path / "runs", found.append).play_all(jobs, 2)
    assert found == [RUN, RUN]
    assert Job.read(tmp_path / "runs" / "step-3.job.json").seed == 3


def test_a_worker_that_fails_is_said_with_its_last_words(tmp_path: Path) -> None:
    python = program(tmp_path, "sys.exit('no dynamo here')")
    with pytest.raises(PlannerError, match=r"(?s)step-2 failed \(1\).*no dynamo here"):
        Workers(python, tmp_path / "runs", print).play_all([JOB], 1)


def test_no_worker_outlives_a_stop(tmp_path: Path) -> None:
    body = f"import time\nprint({line_of(RUN)!r}, flush=True)\ntime.sleep(60)"

    def stop(_: Played) -> None:
        raise KeyboardInterrupt

    workers = Workers(program(tmp_path, body), tmp_path / "runs", stop)
    with pytest.raises(KeyboardInterrupt):
        workers.play_all([JOB], 1)
    assert [child.wait(20) for child in workers._children] == [-15]
