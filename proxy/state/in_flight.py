"""The requests in flight, and their end when the proxy drains, hands over or stops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Protocol

from proxy.core.fleet.retries import Budget
from proxy.core.routing.route import Route
from proxy.core.types import RequestFacts
from proxy.net.timeouts import Limit
from proxy.protocol.streams.trail import TrailMemory
from proxy.state.move_turns import MoveTurns


class MovableStream(Protocol):
    """A stream that may migrate."""

    @property
    def instance(self) -> str:
        """The name of the instance that it runs on."""

    def leave(self) -> None:
        """Migrate the stream if it can."""


class Served(Protocol):
    """A request in flight, as far as others may look at it or end it."""

    request_id: str
    route: Route | None
    facts: RequestFacts
    """The facts of its placement; set with its route."""

    @property
    def priority(self) -> int:
        """0 is the highest."""

    @property
    def output_events(self) -> int:
        """Events of its stream that have passed."""

    @property
    def most_output_tokens(self) -> int | None:
        """The most output that it allows; None: no limit is known."""

    @property
    def why_fixed(self) -> str | None:
        """The reason known now that it cannot migrate; None if it can."""

    def leave_hot(self) -> None:
        """Migrate the stream if it can: its instance is too hot."""

    def end_hot(self) -> None:
        """End it: its instance is too hot."""


class InFlight:
    """Requests that have begun and are not over, by their total time limits."""

    __slots__ = (
        "budget",
        "defects",
        "first_defect_s",
        "idle",
        "is_cutting",
        "is_draining",
        "is_leaving",
        "movable",
        "scopes",
        "trails",
        "turns",
    )

    def __init__(self) -> None:
        self.scopes: dict[Limit, Served | None] = {}
        self.budget = Budget()
        """Retry budget, a share of the requests in flight."""
        self.defects, self.first_defect_s = 0, 0.0
        """Requests that a defect of the proxy has ended, and when the first one did."""
        self.idle = asyncio.Event()
        self.idle.set()
        self.is_draining = False
        self.is_leaving = False
        """Kept connections are closed after their next answer: the proxy drains or was replaced."""
        self.is_cutting = False
        self.movable: set[MovableStream] = set()
        """Running streams that may migrate."""
        self.trails, self.turns = TrailMemory(), MoveTurns()

    def note_defect(self, now_s: float) -> None:
        """A defect of the proxy has ended a request."""
        if not self.defects:
            self.first_defect_s = now_s
        self.defects += 1

    def leave_instance(self, name: str) -> int:
        """Migrate all streams on an instance that can; returns the number asked."""
        asked = [stream for stream in self.movable if stream.instance == name]
        for stream in asked:
            stream.leave()
        return len(asked)

    @property
    def count(self) -> int:
        """Number of requests in flight."""
        return len(self.scopes)

    def enter(self, scope: Limit, served: Served | None = None) -> None:
        """A request begins; `scope` is its total timeout."""
        if not self.scopes:
            self.idle.clear()
        self.scopes[scope] = served
        self.budget.active = len(self.scopes)

    def leave(self, scope: Limit) -> None:
        """Remove a request that is over."""
        self.scopes.pop(scope, None)
        self.budget.active = len(self.scopes)
        if not self.scopes:
            self.idle.set()

    def on(self, name: str) -> Iterator[Served]:
        """The requests that an instance computes or decodes."""
        for served in self.scopes.values():
            route = None if served is None else served.route
            if served is None or route is None or route.decode.name != name:
                continue
            if route.lease.is_open:
                yield served

    def cut(self) -> None:
        """End every request now, by its total time limit; each client gets an error."""
        self.is_cutting = True
        now_s = asyncio.get_running_loop().time()
        for scope in list(self.scopes):
            scope.reschedule(now_s)
