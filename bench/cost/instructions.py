"""The command `python -m bench.cost.instructions`: instructions that a request of this proxy takes.

CPU time varies with the machine's neighbours and with where a process's memory happens to lie: by a
tenth between two starts of one program. Instructions do not. valgrind counts them, all threads
together, while the real client sends to the real server. What the server does while nobody sends
is measured too, and taken off by the second.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.cost.cli import WORK
from bench.measuring import build, upstream
from bench.measuring.build import BenchError
from bench.measuring.peers import BEFORE, PEERS, Peer, Running, Site, clone
from bench.measuring.processes import Cpus, children
from bench.measuring.scenarios import SCENARIOS, Scenario
from bench.measuring.window import Bench

START_S = 120.0
"""Under valgrind a start takes forty times as long."""
DUMP_S = 60.0
CHOSEN = ("plain-c32", "ttft-c1", "body400k-c8")
"""Not `paced-c512`: so many streams do not keep their pace under valgrind."""
_TOTALS = re.compile(r"^totals: (\d+)", re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per scenario and state; exit 1 when something failed."""
    options = _parser().parse_args(argv)
    states = {"ours": PEERS["ours"]}
    if options.before is not None:
        states = {BEFORE: clone(options.before)} | states
    try:
        if not shutil.which("valgrind"):
            raise BenchError("valgrind is not installed")
        for name in options.scenarios.split(","):
            if name not in CHOSEN:
                raise BenchError(f"--scenarios {name}: must be of {', '.join(CHOSEN)}")
            _compare(name, states, options.seconds, options.work.absolute())
    except BenchError as error:
        sys.stderr.write(f"bench: FAILED: {error}\n")
        return 1
    return 0


def _compare(name: str, states: dict[str, Peer], seconds: float, work: Path) -> None:
    scenario = SCENARIOS[name]
    scenario = replace(scenario, load=replace(scenario.load, window_s=seconds))
    cpus = Cpus.of_this_machine()
    build.build(work / "bin")
    first = None
    for state, peer in states.items():
        with children() as started:
            engine = upstream.start(
                started, work / "bin" / "upstream", cpus.load, work / "upstream"
            )
            site = Site(work, work / "venvs", cpus, started, engine)
            bench = Bench(work / "bin", work / "bodies", cpus, engine)
            folder = work / f"peer-valgrind-{state}"
            running = site.start(state, under_valgrind(peer), folder.name.removeprefix("peer-"))
            counted = _count(bench, running, name, scenario, folder)
        first = first or counted
        told = f"{counted:10,.0f} instructions a {scenario.unit}, {counted / first:.3f}"
        sys.stdout.write(f"{name:12} {state:8} {told}\n")
        sys.stdout.flush()


def under_valgrind(peer: Peer) -> Peer:
    """The same, counted; its own metrics are not read, which would count too."""
    command = (
        f"valgrind --tool=callgrind --callgrind-out-file=counted {{bin}}/python {peer.command}"
    )
    return replace(peer, command=command, start_s=START_S, lag_metric=None)


def _count(bench: Bench, running: Running, name: str, scenario: Scenario, folder: Path) -> float:
    """Instructions of a request: of a window, less those of as long a time without any."""
    load, pid = scenario.load, running.pids[-1]
    bench.measure(running, name, scenario, 0)  # what is learned and filled in first is not counted
    _control("-z", pid)
    begun_s = time.monotonic()
    window = bench.measure(running, name, replace(scenario, load=replace(load, warm_s=0.01)), 0)
    if window.faults:
        raise BenchError(f"{running.name}: {window.faults[0]}")
    busy_s, busy = time.monotonic() - begun_s, _dumped(folder, pid)
    begun_s = time.monotonic()
    time.sleep(load.window_s)
    idle_s, idle = time.monotonic() - begun_s, _dumped(folder, pid)
    return (busy - idle / idle_s * busy_s) / window.requests


def _control(what: str, pid: int) -> None:
    subprocess.run(["callgrind_control", what, str(pid)], check=True, capture_output=True)


def _dumped(folder: Path, pid: int) -> int:
    """Instructions since the counter was last set to 0, which this does too."""
    before = set(folder.glob("counted.*"))
    _control("-d", pid)
    end_s = time.monotonic() + DUMP_S
    while time.monotonic() < end_s:
        for path in set(folder.glob("counted.*")) - before:
            if found := _TOTALS.search(path.read_text()):
                return int(found[1])
        time.sleep(0.2)
    raise BenchError(f"valgrind told no counts in {DUMP_S:.0f} s")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.cost.instructions", description=__doc__)
    add = parser.add_argument
    add("--scenarios", metavar="X,Y", default=",".join(CHOSEN), help="%(default)s")
    add("--before", type=Path, metavar="CLONE", help="another clone, after `make compiled`")
    add("--seconds", type=float, default=12.0, help="of each window, %(default)s")
    add("--work", type=Path, default=WORK, metavar="DIR", help="%(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
