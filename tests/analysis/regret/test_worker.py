"""A process that computes one call."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from analysis.regret.worker import call
from replayer.trace.loaders import read_trace
from replayer.trace.rows import TraceError
from tests.support.waiting import until_true


def test_what_is_wrong_with_the_input_is_raised_in_the_caller(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        call(_read, tmp_path / "none.jsonl")


def _read(path: Path) -> int:
    return len(list(read_trace(path)))


def test_a_worker_ends_with_its_caller(tmp_path: Path) -> None:
    """Its timer runs once it has read its call, which here leaves a file to say so."""
    begun = tmp_path / "begun"
    busy = f"import pathlib, signal; pathlib.Path({str(begun)!r}).touch(); signal.pause()"
    code = f"from analysis.regret.worker import call; call(exec, {busy!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as caller:
        until_true(begun.exists)
        workers = psutil.Process(caller.pid).children()
        assert ["analysis.regret.worker" in worker.cmdline() for worker in workers] == [True]
        caller.kill()
    _gone, alive = psutil.wait_procs(workers, timeout=20)
    for worker in alive:
        worker.kill()
    assert not alive
