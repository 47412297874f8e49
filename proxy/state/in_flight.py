"""The requests in flight, and how they end when the proxy drains, hands over or stops."""

from __future__ import annotations

import asyncio
from typing import Protocol

from proxy.core.fleet.retries import Budget
from proxy.net.timeouts import Limit
from proxy.protocol.streams.trail import TrailMemory


class MovableStream(Protocol):
    """A stream that may go on elsewhere."""

    @property
    def instance(self) -> str:
        """The name of the instance that it runs on."""

    def leave(self) -> None:
        """Have it go on elsewhere, if it can."""


class InFlight:
    """Requests that have begun and are not over, as their total time limits."""

    __slots__ = (
        "budget",
        "idle",
        "is_cutting",
        "is_draining",
        "is_leaving",
        "movable",
        "scopes",
        "trails",
    )

    def __init__(self) -> None:
        self.scopes: set[Limit] = set()
        self.budget = Budget()
        """Retry budget, a share of the requests in flight."""
        self.idle = asyncio.Event()
        self.idle.set()
        self.is_draining = False
        self.is_leaving = False
        """Kept connections are closed after their next answer: the proxy drains or was replaced."""
        self.is_cutting = False
        self.movable: set[MovableStream] = set()
        """Streams that run and may go on elsewhere."""
        self.trails = TrailMemory()

    def leave_instance(self, name: str) -> int:
        """Have all streams on an instance go on elsewhere that can; returns how many were asked."""
        asked = [stream for stream in self.movable if stream.instance == name]
        for stream in asked:
            stream.leave()
        return len(asked)

    @property
    def count(self) -> int:
        """Number of requests in flight."""
        return len(self.scopes)

    def enter(self, scope: Limit) -> None:
        """A request begins; `scope` is its total timeout."""
        if not self.scopes:
            self.idle.clear()
        self.scopes.add(scope)
        self.budget.active = len(self.scopes)

    def leave(self, scope: Limit) -> None:
        """A request is over."""
        self.scopes.discard(scope)
        self.budget.active = len(self.scopes)
        if not self.scopes:
            self.idle.set()

    def cut(self) -> None:
        """End every request now, by its total time limit; each client gets an error."""
        self.is_cutting = True
        now_s = asyncio.get_running_loop().time()
        for scope in list(self.scopes):
            scope.reschedule(now_s)
