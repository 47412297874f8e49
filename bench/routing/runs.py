"""Runs: systems side by side on the same work, each with engines of its own.

Systems that run at the same time see the same neighbours. The client of each is a process of its
own: the command `replay`, whose clock is the engines'.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.runs import RunError, read_rows
from bench.measuring.build import BenchError
from bench.routing.engine import MODEL, write_engine
from bench.routing.environments import RoutingError
from bench.routing.load import THINK_CAP_S, Sessions, Shape, Work, write_trace
from bench.routing.measured import Run, answers
from bench.routing.systems import Site, System
from replayer.demo.processes import ChildProcess, Children

REQUEST_LIMIT_S = 900.0
RUN_LIMIT_S = 14_400.0
"""Longest answer, and longest run, in engine time; beyond them requests count as lost."""
SETTLE_S = 2.0
"""From a router's first answer to the first request: it may know only some of the engines yet."""
LEAST_LIMIT_S = 60.0
"""Of real time: no request is given up earlier, however fast the engines are."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A fleet, a load and a seed: the work that systems are compared on."""

    shape: Shape
    load: str
    seed: int
    turns: int

    @property
    def name(self) -> str:
        """For folders and lines."""
        return f"{self.shape.name} {self.load} seed {self.seed}"


@dataclass(slots=True)
class _Client:
    """The client of a system while it runs, and what the machine had done when it ended."""

    system: System
    process: ChildProcess
    out: Path
    busy_ratio: float | None = None


class Runner:
    """Runs cells; every file of them is below `work`."""

    def __init__(self, sessions: Sessions, site: Site, work: Path) -> None:
        self._sessions, self._site, self._work = sessions, site, work

    def work_of(self, cell: Cell) -> Work:
        """What the systems of a cell have to serve."""
        return self._sessions.draw(cell.shape, cell.load, cell.seed, turns=cell.turns)

    def run(self, cell: Cell, batch: Sequence[tuple[str, str]]) -> list[Run]:
        """Run these systems, by name and mode, side by side; one that fails has a fault."""
        work, folder = self.work_of(cell), self._work / cell.name.replace(" ", "-")
        engine = write_engine(folder / "engine", cell.shape.kv_tokens, self._site.speedup)
        trace = folder / "trace.jsonl"
        write_trace(trace, work.requests)
        systems = [
            System(name, mode, cell.shape, folder / f"{name}-{mode}".strip("-"), engine)
            for name, mode in batch
        ]
        children = Children()
        with children.stopped_at_the_end():
            try:
                targets = self._start(systems, children)
                time.sleep(SETTLE_S)
                clients = [
                    self._client(children, system, target, trace, work.at_a_time, cell.seed)
                    for system, target in targets.items()
                    if not isinstance(target, Exception)
                ]
                self._wait(clients)
            finally:
                children.terminate()
        faults = {s: str(target) for s, target in targets.items() if isinstance(target, Exception)}
        ran = {client.system: client for client in clients}
        return [
            self._measured(cell, work, system, ran.get(system), faults.get(system, ""))
            for system in systems
        ]

    def _start(
        self, systems: Sequence[System], children: Children
    ) -> dict[System, str | Exception]:
        targets: dict[System, str | Exception] = {}
        for system in systems:
            try:
                targets[system] = system.start(children, self._site)
            except (RoutingError, BenchError, OSError) as error:
                targets[system] = error
        return targets

    def _client(
        self,
        children: Children,
        system: System,
        target: str,
        trace: Path,
        at_a_time: int,
        seed: int,
    ) -> _Client:
        out, speedup = system.folder / "replay", f"{self._site.speedup:g}"
        shutil.rmtree(out, ignore_errors=True)
        limit_s = max(LEAST_LIMIT_S, REQUEST_LIMIT_S / self._site.speedup)
        pace = ["--mode", "sessions", "--concurrency", str(at_a_time), "--speedup", speedup]
        pace += ["--ramp", f"{THINK_CAP_S:g}", "--time-scale", speedup, "--seed", str(seed)]
        where = ["--target", target, "--model", MODEL, "--out", str(out)]
        quiet = ["--no-progress", "--no-html", "--request-timeout", f"{limit_s:g}"]
        process = children.start(
            f"replay of {system.name}",
            system.folder / "replay.log",
            *("replayer.replay", str(trace), *where, *pace, *quiet),
        )
        return _Client(system, process, out)

    def _wait(self, clients: Sequence[_Client]) -> None:
        """Wait until all have ended; notes how busy the machine was until each one's end."""
        began_s, before = time.monotonic(), machine_cpu_s()
        deadline_s = began_s + max(LEAST_LIMIT_S, RUN_LIMIT_S / self._site.speedup)
        left = list(clients)
        while left and time.monotonic() < deadline_s:
            time.sleep(0.1)
            for client in [one for one in left if one.process.child.poll() is not None]:
                cpus_s = (time.monotonic() - began_s) * len(os.sched_getaffinity(0))
                client.busy_ratio = (machine_cpu_s() - before) / cpus_s
                left.remove(client)

    def _measured(
        self, cell: Cell, work: Work, system: System, client: _Client | None, fault: str
    ) -> Run:
        rows = []
        if client is not None:
            if client.busy_ratio is None:
                fault = f"did not end within {RUN_LIMIT_S:g} s of engine time"
            try:
                rows = read_rows(client.out / "requests.jsonl")
            except RunError:
                fault = fault or f"no result, see {system.folder / 'replay.log'}"
        speedup = self._site.speedup
        answered = answers(rows, speedup)
        sent = len(work.requests)
        ends_s = [row["end_s"] for row in rows if row.get("end_s") is not None]
        return Run(
            shape=cell.shape.name,
            load=cell.load,
            seed=cell.seed,
            system=system.name,
            mode=system.mode,
            sent=sent,
            lost=sent - len(answered),
            answered=answered,
            makespan_s=max(ends_s, default=0.0) * speedup,
            busy_ratio=client.busy_ratio if client is not None else None,
            fault=fault,
        )


def machine_cpu_s() -> float:
    """CPU seconds that the whole machine has spent so far, without idle time and waiting for IO."""
    first = Path("/proc/stat").read_text().partition("\n")[0].split()
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, first[1:9])
    del idle, iowait
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
