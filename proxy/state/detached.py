"""Tasks that outlive their request: legs that must not be cut yet, KV releases.

A leg on which another instance depends runs in a task of its own, and its request waits for the
task. If the request ends first, the leg has `GRACE_S` to reach a point where cutting it pins no KV.
All tasks end with the proxy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from copy import copy
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from proxy.core.routing.actions import IllegalStepError
from proxy.core.types import FailureKind
from proxy.net.timeouts import Alarm
from proxy.protocol.errors import DEFECTS, UpstreamFailure

GRACE_S = 0.8
"""Longest time that a leg goes on without its client. An idle engine accepts a leg within 50 ms,
and a connection must not outlive its client by a second."""
_log = logging.getLogger(__name__)
MOST = 1024
"""Most tasks that nobody waits for; a further leg is cut with its request."""
T = TypeVar("T")


async def in_group(work: Callable[[asyncio.TaskGroup], Coroutine[Any, Any, T]]) -> T:
    """The result of work that starts tasks in a group, once all of them have ended.

    It stands here, interpreted, for compiled callers: they cannot wait for a group that breaks.
    """
    async with asyncio.TaskGroup() as group:
        return await work(group)


@dataclass(frozen=True, slots=True)
class DetachedLeg(Generic[T]):
    """A leg that may outlive its request.

    `on_left` is called when the request ends while the leg runs; return False to cancel the leg.
    `unwanted` then receives the leg's result, or None.
    """

    run: Callable[[], Coroutine[Any, Any, T]]
    on_left: Callable[[], bool]
    unwanted: Callable[[T | None], None]


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


class _Kept(Generic[T]):
    """One running leg."""

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
        except (
            *DEFECTS,
            RuntimeError,
            IllegalStepError,
        ) as error:  # not raised here: it would end the group
            self.defect = error

    def settle(self) -> None:
        """The leg's task is done; give the result to `unwanted` if its request has ended."""
        if self.alarm is not None:
            self.alarm.stop()
        if self.is_left and not self._is_settled:
            self._is_settled = True
            self.leg.unwanted(self.results.pop() if self.results else None)
            if self.defect is not None:
                _log.error("a leg failed after its request had ended", exc_info=self.defect)


class DetachedTasks:
    """The task group of all tasks that outlive a request."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self.live = self._alone = 0
        """All tasks, and those that nobody waits for."""

    async def run(self) -> None:
        """Hold the group open until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None

    def spawn(
        self, work: Coroutine[Any, Any, None], *, is_waited_for: bool = False
    ) -> asyncio.Task[None] | None:
        """Start a task; None, and `work` closed, where the proxy stops, or at the limit.

        What requests wait for is bounded by their number: none is refused for it, and it takes no
        place of a task that nobody waits for.
        """
        is_full = self._alone >= MOST and not is_waited_for
        if self._group is None or is_full:
            work.close()
            return None
        task = self._group.create_task(work)
        self.live += 1
        task.add_done_callback(self._ended)
        if not is_waited_for:
            self._leave(task)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        del task
        self.live -= 1

    def _leave(self, task: asyncio.Task[None]) -> None:
        """Nobody waits for it from now on."""
        self._alone += 1
        task.add_done_callback(self._ended_alone)

    def _ended_alone(self, task: asyncio.Task[None]) -> None:
        del task
        self._alone -= 1

    async def keep(self, leg: DetachedLeg[T]) -> T:
        """The leg's result; raises UpstreamFailure. On cancellation see `DetachedLeg`."""
        kept = _Kept(leg)
        task = self.spawn(kept.go(), is_waited_for=True)
        if task is None:
            return await leg.run()
        task.add_done_callback(lambda _: kept.settle())
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            kept.is_left = True
            if task.done():
                kept.settle()
            elif self._alone < MOST and leg.on_left():
                self._leave(task)
                kept.alarm = Alarm(GRACE_S, lambda: _cancel(task))
            else:
                task.cancel()
            raise
        if kept.defect is not None:
            raise copy(kept.defect).with_traceback(kept.defect.__traceback__)
        if kept.failure is not None:
            raise kept.failure.again()
        if not kept.results:
            raise UpstreamFailure(FailureKind.WENT_DOWN, "the proxy is stopping")
        return kept.results.pop()
