"""The command `python -m bench.cost.instructions`: instructions that a request of this proxy takes.

CPU time varies with the machine's neighbours. valgrind counts instructions, of all threads
together, while the real client sends to the real server. It also simulates caches and branches,
from which cycles are estimated: code that runs once waits for memory, and a loop does not. What the
server does while nobody sends is measured too, and taken off by the second.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.cost.cli import WORK, terminate
from bench.measuring import build, upstream
from bench.measuring.build import BenchError
from bench.measuring.peers import BEFORE, PEERS, Peer, Running, Site, clone
from bench.measuring.processes import Cpus, children
from bench.measuring.scenarios import SCENARIOS, Scenario
from bench.measuring.window import Bench

START_S = 180.0
"""Longest start under valgrind."""
WARM_S = 4.0
DUMP_S = 60.0
CHOSEN = ("plain-c32", "ttft-c1", "body400k-c8")
"""Not `paced-c512`, whose streams have a pace of their own."""
_VALGRIND = (
    "valgrind --tool=callgrind --callgrind-out-file=counted --cache-sim=yes --branch-sim=yes"
    " --I1=32768,8,64 --D1=49152,12,64 --LL=2097152,16,64 {bin}/python "
)
"""Simulated: 32 and 48 KiB of first-level cache for code and data, and 2 MiB for both."""
_EVENTS = re.compile(r"^events: (.+)$", re.MULTILINE)
_TOTALS = re.compile(r"^totals: ([\d ]+)\n", re.MULTILINE)
_PENALTIES = {
    "I1mr": 10,
    "D1mr": 10,
    "D1mw": 10,
    "Bcm": 10,
    "Bim": 10,
    "ILmr": 100,
    "DLmr": 100,
    "DLmw": 100,
}
"""Cycles that each miss of a cache or a branch takes, as in KCachegrind's cycle estimation."""
Counted = tuple[float, float]
"""Instructions, and estimated cycles."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per scenario and state; exit 1 when something failed."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, terminate)
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
    except KeyboardInterrupt:
        sys.stderr.write("bench: stopped\n")
        return 130
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
        pairs = zip(counted, first, ("instructions", "cycles"), strict=True)
        told = "  ".join(f"{now:11,.0f} {what} {now / then:.3f}" for now, then, what in pairs)
        sys.stdout.write(f"{name:12} {state:8} {told}\n")
        sys.stdout.flush()


def under_valgrind(peer: Peer) -> Peer:
    """The same, counted; its own metrics are not read, which would count too."""
    return replace(peer, command=f"{_VALGRIND}{peer.command}", start_s=START_S, lag_metric=None)


def _count(bench: Bench, running: Running, name: str, scenario: Scenario, folder: Path) -> Counted:
    """Of one request: those of a window, less those of as long a time without any request."""
    load, pid = scenario.load, running.pids[-1]
    warm = replace(load, warm_s=0.01, window_s=WARM_S)  # what is learned first is not counted
    bench.measure(running, name, replace(scenario, load=warm), 0)
    _control("-z", pid)
    begun_s, before = time.monotonic(), bench.upstream.counts()
    window = bench.measure(running, name, replace(scenario, load=replace(load, warm_s=0.01)), 0)
    if window.faults:
        raise BenchError(f"{running.name}: {window.faults[0]}")
    # Those in flight at the window's end have been answered too.
    requests = bench.upstream.counts().since(before).requests
    busy_s, busy = time.monotonic() - begun_s, _dumped(folder, pid)
    begun_s = time.monotonic()
    time.sleep(load.window_s)
    part, idle = busy_s / (time.monotonic() - begun_s), _dumped(folder, pid)
    made, cycles = (
        (most - part * least) / requests for most, least in zip(busy, idle, strict=True)
    )
    return made, cycles


def _control(what: str, pid: int) -> None:
    done = subprocess.run(
        ["callgrind_control", what, str(pid)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise BenchError(f"callgrind_control {what}: {done.stderr.strip()[:200]}")


def _dumped(folder: Path, pid: int) -> Counted:
    """What was counted since the counters were last set to 0, which this does too."""
    before = set(folder.glob("counted.*"))
    _control("-d", pid)
    end_s = time.monotonic() + DUMP_S
    while time.monotonic() < end_s:
        for path in set(folder.glob("counted.*")) - before:
            if (found := counts(path.read_text())) is not None:
                return found
        time.sleep(0.2)
    raise BenchError(f"valgrind told no counts in {DUMP_S:.0f} s")


def counts(dump: str) -> Counted | None:
    """What a dump of callgrind tells in all; None where it is not complete yet."""
    events, totals = _EVENTS.search(dump), _TOTALS.search(dump)
    if events is None or totals is None:
        return None
    told = dict(zip(events[1].split(), map(int, totals[1].split()), strict=False))
    return told["Ir"], told["Ir"] + sum(_PENALTIES.get(name, 0) * n for name, n in told.items())


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
