"""What goes on after its request has gone: legs that must not be cut yet, and releases of KV.

A leg that another instance depends on runs in a group of its own, and the request only waits for
it. A request that ends first says so; its leg then has `GRACE_S` to reach a point where cutting it
pins no KV. All of it ends with the group, which ends with the proxy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from proxy.core.types import FailureKind
from proxy.net.timeouts import Alarm
from proxy.protocol.errors import DEFECTS, UpstreamFailure

GRACE_S = 0.8
"""An idle engine takes a leg in within 50 ms; no connection outlives its client by a second."""
_log = logging.getLogger(__name__)
MOST = 1024
"""Legs under way; beyond it one is run by its request, and cut with it."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DetachedLeg(Generic[T]):
    """`on_left`: the request has gone while it runs; false ends it at once.

    `unwanted` gets what nobody waits for any more, None where there is no result.
    """

    run: Callable[[], Coroutine[Any, Any, T]]
    on_left: Callable[[], bool]
    unwanted: Callable[[T | None], None]


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


class _Kept(Generic[T]):
    """One leg under way."""

    def __init__(self, leg: DetachedLeg[T]) -> None:
        self.leg = leg
        self.results: list[T] = []
        self.failure: UpstreamFailure | None = None
        self.defect: Exception | None = None
        self.alarm: Alarm | None = None
        self.is_left = self._is_settled = False

    async def go(self) -> None:
        try:
            self.results.append(await self.leg.run())
        except UpstreamFailure as failure:
            self.failure = failure.again()
        except DEFECTS as error:  # a defect is its request's, not the group's
            self.defect = error

    def settle(self) -> None:
        """Over, and nobody waits for it."""
        if self.alarm is not None:
            self.alarm.stop()
        if self.is_left and not self._is_settled:
            self._is_settled = True
            self.leg.unwanted(self.results.pop() if self.results else None)
            if self.defect is not None:
                _log.error("a leg failed that its request had left", exc_info=self.defect)


class DetachedTasks:
    """The group of all that outlives a request."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self.live = 0

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Begin something that nobody waits for; None, and nothing done, when there is no room."""
        if self._group is None or self.live >= MOST:
            work.close()
            return None
        task = self._group.create_task(work)
        self.live += 1
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        del task
        self.live -= 1

    async def keep(self, leg: DetachedLeg[T]) -> T:
        """The leg's result; raises UpstreamFailure. Cancelled, it goes on as `DetachedLeg` says."""
        kept = _Kept(leg)
        task = self.spawn(kept.go())
        if task is None:
            return await leg.run()
        task.add_done_callback(lambda _: kept.settle())
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            kept.is_left = True
            if task.done():
                kept.settle()
            elif leg.on_left():
                kept.alarm = Alarm(GRACE_S, lambda: _cancel(task))
            else:
                task.cancel()
            raise
        if kept.defect is not None:
            raise kept.defect
        if kept.failure is not None:
            raise kept.failure.again()
        if not kept.results:
            raise UpstreamFailure(FailureKind.WENT_DOWN, "the proxy is stopping")
        return kept.results.pop()
