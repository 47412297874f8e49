"""Legs that outlive their requests: a defect in one is its request's, and ends nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from proxy.core.routing.actions import IllegalStepError
from proxy.state.detached import DetachedLeg, DetachedTasks


@asynccontextmanager
async def running() -> AsyncIterator[DetachedTasks]:
    detached = DetachedTasks()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(detached.run())
        await asyncio.sleep(0)
        yield detached
        assert not task.done()
        task.cancel()


def leg(
    go_on: asyncio.Event, seen: list[str | None], error: type[Exception] = TypeError
) -> DetachedLeg[str]:
    async def run() -> str:
        await go_on.wait()
        raise error("unhashable")

    return DetachedLeg(run, lambda: True, seen.append)


@pytest.mark.parametrize("error", [TypeError, RuntimeError, IllegalStepError])
async def test_a_defect_is_its_requests(error: type[Exception]) -> None:
    go_on = asyncio.Event()
    go_on.set()
    async with running() as detached:
        with pytest.raises(error, match="unhashable"):
            await detached.keep(leg(go_on, [], error))
        assert detached.live == 0


async def test_that_of_one_that_was_left_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    go_on, seen = asyncio.Event(), list[str | None]()
    async with running() as detached:
        request = asyncio.create_task(detached.keep(leg(go_on, seen)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        request.cancel()
        await asyncio.wait({request})
        go_on.set()
        async with asyncio.timeout(10):
            while detached.live:
                await asyncio.sleep(0)
        assert seen == [None]
        assert [r.exc_info is not None for r in caplog.records] == [True]


async def test_what_requests_wait_for_takes_no_place_of_what_nobody_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large body is parsed, and KV released, however many prefill legs wait."""
    monkeypatch.setattr("proxy.state.detached.MOST", 2)
    go_on, seen = asyncio.Event(), list[str | None]()
    ran: list[str] = []

    async def work(name: str) -> None:
        await go_on.wait()
        ran.append(name)

    async with running() as detached:
        requests = [asyncio.create_task(detached.keep(leg(go_on, seen))) for _ in range(5)]
        await asyncio.sleep(0)
        assert detached.spawn(work("release")) is not None
        requests[0].cancel()
        await asyncio.wait({requests[0]})
        assert detached.spawn(work("too many")) is None, "one release, and one leg that was left"
        assert detached.spawn(work("large bodies"), is_waited_for=True) is not None
        requests[1].cancel()
        await asyncio.wait({requests[1]})
        async with asyncio.timeout(10):
            while not seen:
                await asyncio.sleep(0)
        assert not go_on.is_set(), "the second is cut with its client"
        go_on.set()
        await asyncio.wait(set(requests))
        async with asyncio.timeout(10):
            while detached.live:
                await asyncio.sleep(0)
        assert sorted(ran) == ["large bodies", "release"]
        assert seen == [None, None]
        assert detached.spawn(work("again")) is not None
