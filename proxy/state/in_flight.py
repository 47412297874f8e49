"""The requests in flight, and how they end when the proxy drains, hands over or stops."""

from __future__ import annotations

import asyncio

from proxy.core.fleet.retries import Budget
from proxy.net.timeouts import Limit


class InFlight:
    """Requests that have begun and are not over, as their total time limits."""

    __slots__ = ("budget", "idle", "is_cutting", "is_draining", "is_leaving", "scopes")

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
