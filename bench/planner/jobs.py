"""Jobs for workers in Dynamo's environment, and the processes that do them."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from analysis.plan.measured import Run
from bench.planner.engine import Engine
from bench.planner.results import run_of

ROOT = Path(__file__).parents[2]
ERROR_CHARS = 800


class PlannerError(Exception):
    """The comparison cannot be run, or cannot go on; the text is for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one process plays: policies on one load."""

    load: str
    seed: int
    startups_s: Sequence[float]
    policies: Sequence[str]
    """Names of RIVALS, `static`, `static:N`, `clairvoyant`, `MODULE:CLASS[:JSON]`."""
    router: str
    effort: int
    trace: str
    """The file that the replay reads. The worker writes it."""
    traces: str | None
    """Where recorded loads come from."""
    engine: Engine

    @property
    def name(self) -> str:
        """Names its files."""
        return f"{self.load}-{self.seed}"

    def save(self, path: Path) -> None:
        """Write it for the worker."""
        path.write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read what `save` wrote."""
        row = json.loads(path.read_text("utf-8"))
        return cls(**row | {"engine": Engine(**row["engine"])})


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A policy that could not be played, and why."""

    policy: str
    why: str
    is_fault: bool


Played = Run | LeftOut


def line_of(played: Played) -> str:
    """A line of a worker's output."""
    kind = "run" if isinstance(played, Run) else "left_out"
    return json.dumps({kind: asdict(played)})


def read_line(line: str) -> Played:
    """Read such a line."""
    row = json.loads(line)
    return run_of(row["run"]) if "run" in row else LeftOut(**row["left_out"])


class Workers:
    """Processes of another Python; each does a job."""

    def __init__(self, python: Path, folder: Path, done: Callable[[Played], None]) -> None:
        self._python, self._folder, self._done = python, folder, done
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[str]] = set()
        self._is_over = False

    def play_all(self, jobs: Sequence[Job], parallel: int) -> None:
        """Do the jobs, so many at a time; raises PlannerError where a worker fails."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(parallel) as pool, ExitStack() as unless_done:
            # At a signal too: no worker may outlive the command.
            unless_done.callback(self._end)
            unless_done.callback(pool.shutdown, wait=False, cancel_futures=True)
            for one in as_completed([pool.submit(self._play, job) for job in jobs]):
                one.result()
            unless_done.pop_all()

    def _play(self, job: Job) -> None:
        asked, log = (self._folder / f"{job.name}{end}" for end in (".job.json", ".log"))
        job.save(asked)
        with log.open("w") as errors, self._start(asked, errors.fileno()) as child:
            with ExitStack() as unless_read:  # the end of the outer block waits for it
                unless_read.callback(child.terminate)
                self._read(child)
                unless_read.pop_all()
        status = child.returncode
        if status and not self._is_over:
            said = log.read_text(errors="replace")[-ERROR_CHARS:].strip()
            raise PlannerError(f"the worker of {job.name} failed ({status}):\n{said}")

    def _read(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            played = read_line(line)
            with self._lock:
                self._done(played)

    def _start(self, asked: Path, errors: int) -> subprocess.Popen[str]:
        command = [str(self._python), "-m", "bench.planner.worker", str(asked)]
        with self._lock:
            if self._is_over:
                raise PlannerError("stopped")
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env=_environment(), text=True
            )
            self._children.add(child)
        return child

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            for child in self._children:
                child.terminate()


def _environment() -> dict[str, str]:
    """This process's, with the project on the path; Dynamo logs each request by default."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(one for one in paths if one)
    return {"DYN_LOG": "error", **os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
