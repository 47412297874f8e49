"""The requests under way, and how they end when the proxy drains, leaves or stops."""

from __future__ import annotations

import asyncio

from proxy.core.fleet.retries import Budget
from proxy.net.timeouts import Limit


class InFlight:
    """Requests that have begun and are not over, by their total time limit."""

    __slots__ = ("budget", "idle", "is_cutting", "is_draining", "is_leaving", "scopes")

    def __init__(self) -> None:
        self.scopes: set[Limit] = set()
        self.budget = Budget()
        """Of repetitions, a part of the requests under way."""
        self.idle = asyncio.Event()
        self.idle.set()
        self.is_draining = False
        self.is_leaving = False
        """Kept connections end with their next answer, as where another process has taken over."""
        self.is_cutting = False

    @property
    def count(self) -> int:
        """How many there are."""
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
        """End every request now: each says so to its client."""
        self.is_cutting = True
        now_s = asyncio.get_running_loop().time()
        for scope in list(self.scopes):
            scope.reschedule(now_s)
