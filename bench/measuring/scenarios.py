"""What is asked of every peer: one entry per scenario, and the loads these are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

VARIANTS = 8
"""Request bodies of one kind that share no prefix."""
PACE_US = 20_000
"""One event per stream in this time: 50 tokens per second, as in decoding."""


@dataclass(frozen=True, slots=True)
class Load:
    """One client's traffic: what each connection sends, and when it is looked at."""

    body: str
    connections: int
    events: int | None = None
    """Events that every answer must have; None: answers are not streams."""
    warm_s: float = 0.25
    window_s: float = 0.6
    stagger_ms: int = 0
    drain_s: float = 15.0
    """How long what runs at the window's end may take to its own."""
    interval_ms: int = 0
    """Least time between two requests of one connection."""

    @property
    def busy_s(self) -> float:
        """From the first request to the end of the window."""
        return self.warm_s + self.window_s


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load, what its CPU time is divided by, and what else is measured."""

    what: str
    load: Load
    unit: str = "request"
    pace_us: int = 0
    beside: Load | None = None
    """A second client at the same time; only the first one's figures are reported."""
    measures_pss: bool = False
    peers: Sequence[str] | None = None
    """Who takes part; None: everybody."""

    def admits(self, peer: str) -> bool:
        """Whether a peer takes part."""
        return self.peers is None or peer in self.peers


def _paced(connections: int) -> Load:
    """Every stream begins before the window and ends after it: 150 events take 3 s."""
    return Load("2k_stream150", connections, 150, warm_s=1.1, window_s=1.8, stagger_ms=1000)


SCENARIOS: dict[str, Scenario] = {
    "plain-c32": Scenario("2 kB, no stream, 32 connections", Load("2k_plain8", 32)),
    "ttft-c1": Scenario("2 kB, a stream of one event, 1 connection", Load("2k_stream1", 1, 1)),
    "paced-c512": Scenario(
        "512 streams of 50 events/s",
        _paced(512),
        unit="event",
        pace_us=PACE_US,
        measures_pss=True,
    ),
    "body400k-c8": Scenario("400 kB, one event, 8 connections", Load("400k_stream1", 8, 1)),
    "giant": Scenario(
        "500 streams of 50 events/s, ten 4 MB bodies/s beside them",
        _paced(500),
        unit="event",
        pace_us=PACE_US,
        beside=Load("4m_stream1", 2, 1, warm_s=1.1, window_s=1.8, interval_ms=200),
        peers=("direct", "haproxy", "ours"),
    ),
    "nested": Scenario(
        "500 streams of 50 events/s, four 12 MB bodies/s full of arrays beside them",
        _paced(500),
        unit="event",
        pace_us=PACE_US,
        beside=Load("12m_nested", 2, 1, warm_s=1.1, window_s=1.8, interval_ms=500),
        peers=("direct", "haproxy", "ours"),
    ),
}
