"""Requests under way: how many, when there are none, and that a cut ends each of them."""

from __future__ import annotations

import asyncio

import pytest

from proxy.net.timeouts import Limit
from proxy.state.in_flight import InFlight
from tests.support.virtual_time import run


def test_it_is_idle_once_the_last_has_left() -> None:
    async def test() -> None:
        requests = InFlight()
        one, other = Limit(60.0), Limit(60.0)
        assert requests.idle.is_set()
        requests.enter(one)
        requests.enter(other)
        assert (requests.count, requests.budget.active) == (2, 2)
        requests.leave(one)
        assert not requests.idle.is_set()
        requests.leave(one)
        assert requests.count == 1, "to leave twice is to leave once"
        requests.leave(other)
        assert requests.idle.is_set()
        assert requests.budget.active == 0

    run(test())


def test_a_cut_ends_every_request_at_once() -> None:
    async def test() -> None:
        requests = InFlight()
        loop = asyncio.get_running_loop()

        async def request() -> float:
            scope = Limit(600.0)
            requests.enter(scope)
            try:
                with scope:
                    await asyncio.sleep(300.0)
            except TimeoutError:
                return loop.time()
            finally:
                requests.leave(scope)
            return -1.0

        tasks = [asyncio.create_task(request()) for _ in range(3)]
        await asyncio.sleep(5.0)
        requests.cut()
        assert requests.is_cutting
        assert await asyncio.gather(*tasks) == pytest.approx([5.0] * 3)
        assert requests.idle.is_set()

    run(test())
