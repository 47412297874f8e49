"""Requests under way: counted, waited for, and ended together."""

from __future__ import annotations

import asyncio

import pytest

from proxy.net.timeouts import Limit
from proxy.state.in_flight import InFlight


async def test_it_is_idle_until_the_first_comes_and_after_the_last_has_gone() -> None:
    in_flight, first, second = InFlight(), Limit(60.0), Limit(60.0)
    assert in_flight.idle.is_set()
    in_flight.enter(first)
    in_flight.enter(second)
    assert (in_flight.count, in_flight.budget.active) == (2, 2)
    in_flight.leave(first)
    in_flight.leave(first)
    assert (in_flight.count, in_flight.budget.active) == (1, 1)
    assert not in_flight.idle.is_set()
    in_flight.leave(second)
    assert in_flight.idle.is_set()


async def test_a_cut_ends_each_of_them_at_once() -> None:
    in_flight = InFlight()

    async def serve() -> None:
        with Limit(3600.0) as scope:
            in_flight.enter(scope)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                in_flight.leave(scope)

    tasks = [asyncio.create_task(serve()) for _ in range(3)]
    await asyncio.sleep(0)
    assert in_flight.count == 3
    in_flight.cut()
    for task in tasks:
        with pytest.raises(TimeoutError):
            await task
    assert in_flight.is_cutting
    assert in_flight.count == 0
