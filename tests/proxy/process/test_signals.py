"""Signals to a process that starts: they wait, and end neither it nor a successor."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from replayer.simulator.host import SimFleet
from tests.support.harness import addresses, until
from tests.support.proxy_process import ProxyProcess

EARLY = """\
import os, signal, sys

def early(event, args):
    if event == "import" and args[0] == "proxy.app":
        for number in (signal.SIGHUP, signal.SIGUSR1):
            os.kill(os.getpid(), number)

sys.addaudithook(early)
"""
"""The process gets these in the middle of its start, as does its successor."""
READ_AGAIN = r"config read again \(SIGHUP\)"


async def test_what_comes_during_a_start_waits_for_its_end(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(EARLY)
    path = os.pathsep.join((str(tmp_path), str(Path.cwd())))
    async with SimFleet(1) as fleet:
        options = ("--instances", addresses(fleet)[0], "--drain-seconds", "0")
        with ProxyProcess(*options, env=os.environ | {"PYTHONPATH": path}) as process:
            await process.listens()
            await until(lambda: process.found(READ_AGAIN), "the first process reloads")
            process.send_signal(signal.SIGUSR2)
            pid = (await until(lambda: process.found(r"process (\d+) has taken over")))[1]
            try:
                text = rf"(?s){READ_AGAIN}.*{READ_AGAIN}"
                await until(lambda: process.found(text), "the second one does, too")
            finally:
                os.kill(int(pid), signal.SIGTERM)
