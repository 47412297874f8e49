"""NIXL's idle threads: one per engine polls its network without a pause, and takes a whole core.

On two cores a pair would starve itself. With a high nice value they poll when nobody else computes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

LOOK_S = 1.5
POLLS_RATIO = 0.1
"""A thread of an idle engine that takes more of a core than this."""
NICE = 15


def calm(leader: int) -> int:
    """Lower the priority of the polling threads of an engine that idles; how many there were."""
    pids = [pid for pid in _session(leader) if pid != leader]
    before = {pid: _seconds(pid) for pid in pids}
    time.sleep(LOOK_S)
    polling = [
        thread
        for pid in pids
        for thread, used_s in _seconds(pid).items()
        if thread != pid and used_s - before[pid].get(thread, 0.0) > POLLS_RATIO * LOOK_S
    ]
    for thread in polling:
        os.setpriority(os.PRIO_PROCESS, thread, NICE)
    return len(polling)


def _session(leader: int) -> list[int]:
    """The processes of an engine: all that it started belong to its session."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == leader:
                found.append(int(entry.name))
        except ProcessLookupError:
            continue
    return found


def _seconds(pid: int) -> dict[int, float]:
    """CPU time of each thread, as proc(5) has it behind the name."""
    tick = os.sysconf("SC_CLK_TCK")
    used = {}
    for entry in Path(f"/proc/{pid}/task").iterdir():
        fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        used[int(entry.name)] = (int(fields[11]) + int(fields[12])) / tick
    return used
