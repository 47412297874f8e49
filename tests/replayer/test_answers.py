"""A body is read up to a bound, however much there is of it."""

from __future__ import annotations

import aiohttp
import pytest

from replayer.answers import body_of
from replayer.replay.client import READ_BUFFER_BYTES, open_session
from tests.support.told_engine import ToldEngine, endless

MOST = 1 << 16


@pytest.mark.parametrize("session", [aiohttp.ClientSession, open_session])
async def test_no_more_than_the_bound_and_a_buffer_is_read(session) -> None:
    engine = ToldEngine("m")
    engine.routes["/endless"] = endless(b"x" * 1000)
    async with engine, session() as http:
        async with http.get(f"{engine.url}/endless") as answer:
            found = await body_of(answer, MOST)
        async with http.get(f"{engine.url}/v1/models") as answer:
            whole = await body_of(answer, MOST)
    assert MOST < len(found) < MOST + 4 * READ_BUFFER_BYTES
    assert whole.startswith(b'{"object"')
    assert whole.endswith(b"}")
