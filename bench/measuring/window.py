"""One window: a load through one peer, what it cost, and whether everything arrived."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from bench.measuring import bodies
from bench.measuring.build import BenchError
from bench.measuring.looplag import LagCounts, read_lag
from bench.measuring.peers import Running
from bench.measuring.processes import Cpus, pinned, pss_bytes
from bench.measuring.scenarios import Load, Scenario
from bench.measuring.upstream import Counts, Upstream

NOISY_RATIO = 0.15
"""A window in which everybody else used more than this share of one CPU says little."""
LATE_PARTS = 4
"""A median lag of more than one part in so many of the pace is late."""
WRONG_PROCESS = 3
"""Exit status of the client: the port is not (only) that of the processes to be measured."""


class WrongProcessError(BenchError):
    """What listens on the port is not what was started; nothing is sent to it."""


@dataclass(frozen=True, slots=True)
class Window:
    """What one peer did in one window. `faults`: why its figures do not count; empty if they do."""

    peer: str
    scenario: str
    round: int
    requests: int
    events: int
    window_s: float
    cpu_s: float
    cpu_per_unit_s: float | None
    foreign_ratio: float
    ttft_p50_s: float | None
    lag_p50_s: float | None
    lag_p99_s: float | None
    pss_bytes: int | None = None
    loop_lag: LagCounts = field(default_factory=dict)
    is_starved: bool = False
    """Neighbours kept a paced peer from its CPU: it worked on batches, not on events."""
    side_requests: int = 0
    """Requests that the peer sent on its own account, from the first request to the last."""
    faults: tuple[str, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether its figures say what they are meant to say."""
        return not self.faults and not self.is_starved

    @property
    def is_noisy(self) -> bool:
        """Whether somebody else was at work."""
        return self.foreign_ratio > NOISY_RATIO


@dataclass(frozen=True, slots=True)
class Bench:
    """The two ends of every measurement."""

    bin: Path
    bodies: Path
    cpus: Cpus
    upstream: Upstream

    def measure(self, running: Running, name: str, scenario: Scenario, turn: int) -> Window:
        """Run one scenario against one peer; WrongProcessError before anything is sent."""
        if not running.child.is_alive:
            raise BenchError(f"{running.name} has ended:\n{running.child.tail()}")
        before = self.upstream.counts()
        lag_before = read_lag(running)
        self.upstream.pace(scenario.pace_us)
        try:
            with self._clients(running, scenario) as clients:
                pss = _pss_at_the_end(running, scenario) if scenario.measures_pss else None
                told = [result_of(running, client) for client in clients]
        finally:
            self.upstream.pace(0)
        sent = self.upstream.counts().since(before)
        main = told[-1]
        return Window(
            peer=running.name,
            scenario=name,
            round=turn,
            requests=main["requests"],
            events=main["events"],
            window_s=main["window_s"],
            cpu_s=main["cpu_s"],
            cpu_per_unit_s=_cpu_per_unit_s(main, scenario),
            foreign_ratio=main["foreign_s"] / main["window_s"],
            ttft_p50_s=_seconds(main["ttft"], "p50_us"),
            lag_p50_s=_seconds(main["lag"], "p50_us"),
            lag_p99_s=_seconds(main["lag"], "p99_us"),
            pss_bytes=pss,
            loop_lag=read_lag(running, since=lag_before),
            is_starved=starves(main, scenario),
            side_requests=sent.side_requests,
            faults=tuple(faults([one["totals"] for one in told], sent)),
        )

    @contextmanager
    def _clients(
        self, running: Running, scenario: Scenario
    ) -> Iterator[list[subprocess.Popen[bytes]]]:
        """The client that is reported comes last: what is beside it is not foreign to it."""
        clients: list[subprocess.Popen[bytes]] = []
        try:
            if scenario.beside is not None:
                clients.append(self.client(running, scenario.beside))
            beside = [client.pid for client in clients]
            clients.append(self.client(running, scenario.load, beside=beside))
            yield clients
        finally:
            for client in clients:
                client.kill()
                client.communicate()

    def client(
        self, running: Running, load: Load, *more: str, beside: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a client; its bodies are written if need be."""
        bodies.write(self.bodies, [load.body])
        upstream = () if running.peer.command is None else self.upstream.child.pids
        others = ",".join(map(str, (*upstream, *beside)))
        command = [
            *(str(self.bin / "loadgen"), "-P", str(running.port)),
            *("-p", ",".join(map(str, running.pids)), "-q", others),
            *("-c", str(load.connections), "-w", str(load.warm_s), "-d", str(load.window_s)),
            *(
                "-g",
                str(load.stagger_ms),
                "-i",
                str(load.interval_ms * 1000),
                "-D",
                str(load.drain_s),
            ),
            *(() if load.events is None else ("-e", str(load.events))),
            *(word for header in running.peer.headers for word in ("-H", header)),
            *more,
        ]
        files = [str(path) for path in bodies.paths(self.bodies, load.body)]
        with pinned(self.cpus.load):
            return subprocess.Popen(
                [*command, *files], stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
            )


def result_of(
    running: Running, client: subprocess.Popen[bytes], timeout_s: float = 600.0
) -> dict[str, Any]:
    """What a client says at its end, for which it has so long."""
    out, err = client.communicate(timeout=timeout_s)
    message = err.decode(errors="replace").strip()
    if client.returncode == WRONG_PROCESS:
        pids = ", ".join(map(str, running.pids))
        raise WrongProcessError(
            f"wrong process: {message} ({running.name} was started as {pids}); not measured"
        )
    if client.returncode:
        raise BenchError(f"the client failed in front of {running.name}: {message}")
    told: dict[str, Any] = orjson.loads(out)
    return told


def faults(clients: Sequence[dict[str, Any]], sent: Counts) -> Iterator[str]:
    """Compare what the clients asked for and got with what the upstream says it sent."""
    total = {
        key: sum(client[key] for client in clients)
        for key in ("started", "answered", "events", "bad_status", "errors", "miscounted")
    }
    first_error = next((c["first_error"] for c in clients if c["first_error"]), "")
    pairs = (
        ("requests lost", "sent by the client", total["started"], "answered", total["answered"]),
        ("requests differ", "sent", total["started"], "seen by the upstream", sent.requests),
        ("events lost", "sent by the upstream", sent.events, "received", total["events"]),
    )
    for what, one, expected, other, got in pairs:
        if expected != got:
            yield f"{what}: {expected} {one}, {got} {other}"
    stamps = sum(client["stamp_sum"] for client in clients) % 2**64
    if sent.events == total["events"] and stamps != sent.stamp_sum:
        yield "events differ: as many as were sent, but not the same ones"
    for key in ("bad_status", "errors", "miscounted"):
        if total[key]:
            yield f"{key}: {total[key]} ({first_error})"
    if sent.aborted_streams:
        yield f"streams aborted: {sent.aborted_streams}"


def _pss_at_the_end(running: Running, scenario: Scenario) -> int:
    """Memory while every stream still runs, when nothing is timed any more."""
    time.sleep(scenario.load.busy_s + 0.02)
    return pss_bytes(running.pids)


def _cpu_per_unit_s(told: dict[str, Any], scenario: Scenario) -> float | None:
    units = told["events"] if scenario.unit == "event" else told["requests"]
    return told["cpu_s"] / units if units else None


def starves(told: dict[str, Any], scenario: Scenario) -> bool:
    """Late by a good part of the pace, on a CPU that was not its own.

    Where nobody else was at work the lateness is the peer's, and counts.
    """
    is_noisy = bool(told["foreign_s"] > NOISY_RATIO * told["window_s"])
    is_late = bool(told["lag"]["p50_us"] * LATE_PARTS > scenario.pace_us > 0)
    return is_noisy and is_late


def _seconds(histogram: dict[str, float], key: str) -> float | None:
    return histogram[key] / 1e6 if histogram["n"] else None
