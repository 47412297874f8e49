"""A process that computes one call."""

import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.waiting import until_true


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
