"""Two attempts at one answer: the second begins when the first is late, the first to be ready wins.

Both run as tasks of one group, so that nothing outlives the request: whoever loses, or is left when
the request is cancelled, is cancelled and awaited before this returns. An answer that nobody takes
is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from proxy.core.connectors.base import Edits
from proxy.core.types import Fallback
from proxy.protocol.errors import UpstreamFailure

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Local(Generic[A]):
    """D's attempt, and who wants to know what.

    `start`: whether it may begin now; `alone`: P has failed meanwhile, D goes on; `failed`: D has,
    P goes on; `close` gives back an answer that is not wanted, `unclaimed` P's KV that nobody will
    fetch, because the race was cancelled.
    """

    start: Callable[[], bool]
    run: Callable[[], Coroutine[Any, Any, A]]
    alone: Callable[[Fallback], None]
    failed: Callable[[UpstreamFailure], None]
    close: Callable[[A], None]
    unclaimed: Callable[[Edits], None]


Peer = Callable[[], Coroutine[Any, Any, Edits | Fallback]]


async def race(peer: Peer, local: Local[A], late_s: float) -> Edits | Fallback | A:
    """P's result, or D's answer; raises UpstreamFailure when P failed first and D then.

    P has `late_s` for itself. When both are ready at once P wins: its KV would stay pinned.
    """
    attempts = _Attempts(peer, local)
    try:
        return await attempts.run(late_s)
    except asyncio.CancelledError:
        for edits in attempts.handed:
            local.unclaimed(edits)
        raise
    finally:
        for unused in attempts.answers:
            local.close(unused)


class _Attempts(Generic[A]):
    """Both attempts, and what has come of them so far."""

    def __init__(self, peer: Peer, local: Local[A]) -> None:
        self._peer, self._local = peer, local
        self.handed: list[Edits] = []
        self.answers: list[A] = []
        self._failures: list[UpstreamFailure] = []

    async def run(self, late_s: float) -> Edits | Fallback | A:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(self._from_peer())
            await asyncio.wait({first}, timeout=late_s)
            if first.done() or not self._local.start():
                return await first
            second = group.create_task(self._from_local())
            result = await self._decided(first, second)
        if result is not None:
            self._failures.clear()  # an error holds the frames that hold this
            return result
        if self._failures:
            raise self._failures.pop()
        return self.answers.pop()

    async def _from_peer(self) -> Edits | Fallback:
        result = await self._peer()
        if isinstance(result, Edits):
            self.handed.append(result)
        return result

    async def _from_local(self) -> None:
        try:
            self.answers.append(await self._local.run())
        except UpstreamFailure as failure:
            self._failures.append(failure)

    async def _decided(
        self, first: asyncio.Task[Edits | Fallback], second: asyncio.Task[None]
    ) -> Edits | Fallback | None:
        """P's result where that counts; None where D's does."""
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            if self._failures:
                self._local.failed(self._failures.pop())
                return await first
            first.cancel()
            return None
        result = first.result()
        if isinstance(result, Fallback):
            self._local.alone(result)
            await second
            return None
        second.cancel()
        return result
