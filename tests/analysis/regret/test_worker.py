"""A process that computes one call."""

import subprocess
import sys
import time

import psutil


def test_a_worker_ends_with_its_caller() -> None:
    code = "import time; from analysis.regret.worker import call; call(time.sleep, 50)"
    with subprocess.Popen([sys.executable, "-c", code]) as caller:
        workers: list[psutil.Process] = []
        while not workers or "analysis.regret.worker" not in workers[0].cmdline():
            time.sleep(0.05)
            workers = psutil.Process(caller.pid).children()
        # Its timer runs once it has read its call.
        time.sleep(1.0)
        caller.kill()
    _gone, alive = psutil.wait_procs(workers, timeout=20)
    for worker in alive:
        worker.kill()
    assert not alive
