"""Simulated engines and an HTTP session, for tests of their HTTP face."""

import aiohttp
import pytest

from replayer.simulator.host import SimFleet


@pytest.fixture
async def fleet():
    """What is pinned stays so for 20 s, far longer than any test needs to fetch it."""
    async with SimFleet(2, speed=50.0, abort_timeout=1000.0) as fleet:
        yield fleet


@pytest.fixture
async def engine(fleet):
    return fleet.engines[0]


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session
