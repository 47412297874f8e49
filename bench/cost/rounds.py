"""A run: all peers up at once, short windows over them in random order, round after round.

Idle peers cost nothing; what the neighbours do to the machine meets all peers alike.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.cost.result import Result
from bench.cost.sessions import SCENARIO as SESSIONS
from bench.cost.sessions import fill_session_table
from bench.measuring import build, upstream
from bench.measuring.build import BenchError
from bench.measuring.peers import MissingError, Peer, Running, Site, version_of
from bench.measuring.processes import Cpus, children
from bench.measuring.scenarios import SCENARIOS
from bench.measuring.window import Bench, Window

BETWEEN_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be measured."""

    peers: dict[str, Peer]
    scenarios: Sequence[str]
    rounds: int = 5
    sessions: int = 100_000
    limit_s: float = 1800.0
    """No new window after this time."""
    retries: int = 1
    """A window that a neighbour disturbed is measured again at most so often."""
    work: Path

    @property
    def venvs(self) -> Path:
        """The environments of peers from PyPI."""
        return self.work.absolute() / "venvs"


def run(plan: Plan, result: Result, say: Callable[[str], None]) -> None:
    """Measure into `result`; BenchError when the run as a whole means nothing."""
    work = plan.work.absolute()
    cpus = Cpus.of_this_machine()
    build.build(work / "bin")
    with children() as started:
        engine = upstream.start(started, work / "bin" / "upstream", cpus.load, work / "upstream")
        bench = Bench(work / "bin", work / "bodies", cpus, engine)
        site = Site(work, plan.venvs, cpus, started, engine)
        live = _start(plan, site, result, say)
        _rounds(plan, bench, live, result, say)
        if SESSIONS in plan.scenarios and "ours" in plan.peers:
            try:
                result.session_table = fill_session_table(bench, site, plan.sessions)
            except BenchError as error:
                result.faults.append(f"sessions: {error}")


def _start(plan: Plan, site: Site, result: Result, say: Callable[[str], None]) -> list[Running]:
    live = []
    for name, peer in plan.peers.items():
        try:
            live.append(site.start(name, peer))
        except MissingError as error:
            result.left_out[name] = str(error)
            say(f"{name} left out: {error}")
        except BenchError as error:
            result.left_out[name] = str(error)
            result.faults.append(str(error))
        else:
            result.versions[name] = version_of(peer) or ""
    return live


def _rounds(
    plan: Plan, bench: Bench, live: list[Running], result: Result, say: Callable[[str], None]
) -> None:
    end_s = time.monotonic() + plan.limit_s
    for turn in range(1, plan.rounds + 1):
        for name in plan.scenarios:
            if name not in SCENARIOS:
                continue
            order = [running for running in live if SCENARIOS[name].admits(running.name)]
            random.shuffle(order)
            for running in order:
                if time.monotonic() > end_s:
                    say(f"stopped in round {turn}: the time is over")
                    return
                window = _calm_window(plan, bench, running, name, turn)
                result.add(window)
                say(line(window))
                time.sleep(BETWEEN_S)


def _calm_window(plan: Plan, bench: Bench, running: Running, name: str, turn: int) -> Window:
    """The first window without a neighbour in it, or the last of those tried."""
    for _ in range(plan.retries):
        window = bench.measure(running, name, SCENARIOS[name], turn)
        if window.faults or not window.is_noisy:
            return window
    return bench.measure(running, name, SCENARIOS[name], turn)


def line(window: Window) -> str:
    """One window in one line."""
    cpu_us = (window.cpu_per_unit_s or 0.0) * 1e6
    text = (
        f"[{window.round}] {window.scenario:12} {window.peer:20} CPU {cpu_us:8.2f} µs"
        f" per {SCENARIOS[window.scenario].unit:7} foreign {window.foreign_ratio:4.0%}"
    )
    text += "  starved: no figure" if window.is_starved else ""
    return text + "".join(f"  FAULT {fault}" for fault in window.faults)
