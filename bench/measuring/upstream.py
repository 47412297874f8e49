"""The fake engine behind every peer, and what it says it sent."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from pathlib import Path

import orjson

from bench.measuring.build import BenchError
from bench.measuring.processes import HOST, Child, Children, get

PORTS = 8
"""Instances that every peer sees."""
READY_S = 5.0


@dataclass(frozen=True, slots=True)
class Counts:
    """What was sent, from the engine's start or in one window. Stamps add up modulo 2**64."""

    requests: int
    events: int
    stamp_sum: int
    aborted_streams: int
    side_requests: int = 0
    """Prompts that a peer had tokenised; some do that before they place a request."""

    def since(self, before: Counts) -> Counts:
        """What was added meanwhile."""
        return Counts(
            self.requests - before.requests,
            self.events - before.events,
            (self.stamp_sum - before.stamp_sum) % 2**64,
            self.aborted_streams - before.aborted_streams,
            self.side_requests - before.side_requests,
        )


@dataclass(frozen=True, slots=True)
class Upstream:
    """The running engine."""

    child: Child
    ports: list[int]

    @property
    def urls(self) -> list[str]:
        """Its instances."""
        return [f"http://{HOST}:{port}" for port in self.ports]

    def pace(self, microseconds: int) -> None:
        """From now on one event per this time and stream; 0: back to back."""
        get(self.ports[0], f"/_ctl/pace_us/{microseconds}")

    def counts(self) -> Counts:
        """Everything it sent so far."""
        told = orjson.loads(get(self.ports[0], "/_ctl/counts")[1])
        return Counts(**{field.name: told[field.name] for field in fields(Counts)})


def start(children: Children, program: Path, cpu: int, work: Path, ports: int = PORTS) -> Upstream:
    """Start it on ports that the kernel chooses."""
    work.mkdir(parents=True, exist_ok=True)
    child = children.start([str(program), str(ports)], cpu, work)
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s and child.is_alive:
        said = child.log
        if said.endswith("\n"):
            return Upstream(child, [int(port) for port in said.split()])
        time.sleep(0.02)
    raise BenchError(f"the upstream did not start: {child.log}")
