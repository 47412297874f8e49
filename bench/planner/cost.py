"""What a planner costs beside a fleet that idles: `python -m bench.planner.cost`.

Each process' CPU time over the same seconds: the planner, and the proxy with it and without it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console

from bench.measuring.build import BenchError
from bench.measuring.processes import Child
from replayer.arguments import OneLineParser, positive, positive_count

MIB = 1 << 20
START_S, LOOK_S = 60.0, 0.05
SETTLE_S = 5.0
"""Until imports are done and the first ticks are over."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Shares of one core, and resident MiB."""

    planner: float
    planner_mib: float
    proxy: float
    proxy_alone: float


def measure(instances: int, seconds: float, interval_s: float) -> Cost:
    """Measure an idle fleet, first without and then with a planner."""
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        sim = stack.enter_context(
            Child(_module("replayer.simulator.cli", "--instances", instances, *_PORTS))
        )
        last = rf"engine {instances - 1} (\S+) "
        _said(sim, last)
        urls = re.findall(r"engine \d+ (\S+) ", sim.log)
        fleet = ",".join(url.removeprefix("http://") for url in urls)
        proxy = stack.enter_context(
            Child(_module("proxy.cli", "--instances", fleet, "--host", "127.0.0.1", "--port", 0))
        )
        found = _said(proxy, r"listening on (?:http://)?(\S+)")
        address = found[1]
        alone = _share(proxy.pid, seconds)
        state = Path(folder) / "state.json"
        words = ("run", "--proxies", address, "--state-file", state, "--control", "127.0.0.1:0")
        more = ("--load-adjustment-interval-seconds", interval_s)
        planner = stack.enter_context(Child(_module("planner.cli", *words, *more)))
        _said(planner, r"planner listens on (\S+);")
        began_s = time.monotonic()
        before = _cpu_s(planner.pid), _cpu_s(proxy.pid)
        time.sleep(seconds)
        own, beside = _cpu_s(planner.pid) - before[0], _cpu_s(proxy.pid) - before[1]
        spent_s = time.monotonic() - began_s
        resident = psutil.Process(planner.pid).memory_info().rss / MIB
        return Cost(own / spent_s, resident, beside / spent_s, alone)


_PORTS = ("--port", 0, "--bootstrap-port", 0)


def _said(child: Child, pattern: str) -> re.Match[str]:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if (found := child.found(pattern)) is not None:
            return found
        time.sleep(LOOK_S)
    raise BenchError(f"not said within {START_S:g} s: {pattern}\n{child.tail()}")


def _module(name: str, *words: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, words)]


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _share(pid: int, seconds: float) -> float:
    time.sleep(SETTLE_S)
    before, began_s = _cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (_cpu_s(pid) - before) / (time.monotonic() - began_s)


def main() -> int:
    """Print the figures beside what is allowed."""
    parser: argparse.ArgumentParser = OneLineParser(prog="bench.planner.cost", description=__doc__)
    parser.add_argument("--instances", type=positive_count, default=8)
    parser.add_argument("--seconds", type=positive, default=60.0)
    parser.add_argument("--interval", type=positive, default=5.0, help="seconds between two ticks")
    given = parser.parse_args()
    cost = measure(given.instances, given.seconds, given.interval)
    more = cost.proxy - cost.proxy_alone
    lines = (
        f"{given.instances} idle instances, {given.seconds:g} s, a tick per {given.interval:g} s",
        f"planner  {100 * cost.planner:6.2f} % of a core   target 1.00",
        f"planner  {cost.planner_mib:6.0f} MiB resident  target 150",
        f"proxy    {100 * more:6.2f} % of a core   target 0.50: its reads;"
        f" {100 * cost.proxy:.2f} with them, {100 * cost.proxy_alone:.2f} without",
    )
    Console(highlight=False, soft_wrap=True).print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
