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

from proxy.core.connectors import Edits
from proxy.core.types import Fallback
from proxy.errors import UpstreamFailure

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Local(Generic[A]):
    """D's attempt, and who wants to know what.

    `start`: whether it may begin now; `alone`: P has failed meanwhile, D goes on; `failed`: D has,
    P goes on; `close` gives back an answer that is not wanted.
    """

    start: Callable[[], bool]
    run: Callable[[], Coroutine[Any, Any, A]]
    alone: Callable[[Fallback], None]
    failed: Callable[[UpstreamFailure], None]
    close: Callable[[A], None]


async def race(
    peer: Callable[[], Coroutine[Any, Any, Edits | Fallback]], local: Local[A], late_s: float
) -> Edits | Fallback | A:
    """P's result, or D's answer; raises UpstreamFailure when P failed first and D then.

    P has `late_s` for itself. When both are ready at once P wins: its KV would stay pinned.
    """
    answers: list[A] = []
    failures: list[UpstreamFailure] = []

    async def attempt() -> None:
        try:
            answers.append(await local.run())
        except UpstreamFailure as failure:
            failures.append(failure)

    try:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(peer())
            await asyncio.wait({first}, timeout=late_s)
            if first.done() or not local.start():
                return await first
            second = group.create_task(attempt())
            result = await _decided(first, second, local, failures)
        if result is not None:
            return result
        if failures:
            raise failures.pop()
        return answers.pop()
    finally:
        for unused in answers:
            local.close(unused)


async def _decided(
    first: asyncio.Task[Edits | Fallback],
    second: asyncio.Task[None],
    local: Local[A],
    failures: list[UpstreamFailure],
) -> Edits | Fallback | None:
    """P's result where that counts; None where D's does."""
    await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    if not first.done():
        if failures:
            local.failed(failures.pop())
            return await first
        first.cancel()
        return None
    result = first.result()
    if isinstance(result, Fallback):
        local.alone(result)
        await second
        return None
    second.cancel()
    return result
