"""The simulated engine with NIXL's manners: who tells what, how long, and what goes wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

from replayer.simulator.host import SimEngine, SimFleet
from tests.support.harness import until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "one two three " * 30}]
LEASE_S = 30.0
LONG_S = 12_000.0
"""Engine seconds too, a minute here: what ends within a test did not end for its time."""
ASK = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture
async def fleet() -> AsyncIterator[SimFleet]:
    async with nixl(LONG_S) as found:
        yield found


def nixl(lease_s: float) -> SimFleet:
    return SimFleet(2, speed=200.0, tick=0.0, kv_connector="nixl", kv_lease=lease_s)


async def post(engine: SimEngine, tokens: int, params: Any) -> tuple[int, dict[str, Any]]:
    body = {"messages": MESSAGES, "max_tokens": tokens, "kv_transfer_params": params}
    async with aiohttp.ClientSession() as http:
        async with http.post(engine.url + CHAT, data=orjson.dumps(body)) as answer:
            return answer.status, orjson.loads(await answer.read())


async def told_by(engine: SimEngine) -> dict[str, Any]:
    _, answer = await post(engine, 1, ASK)
    params = answer["kv_transfer_params"]
    assert isinstance(params, dict)
    return params


async def test_p_tells_where_its_blocks_are_and_d_reads_them(fleet: SimFleet) -> None:
    p, d = fleet.engines
    params = await told_by(p)
    assert (params["remote_engine_id"], params["remote_port"]) == (p.engine_id, p.bootstrap_port)
    assert params["remote_num_tokens"] == 95
    assert len(params["remote_block_ids"][0]) == 6
    assert p.stats()["pinned"] == 1
    status, answer = await post(d, 5, params)
    assert status == 200
    assert d.stats()["prompt_external_tokens"] == 95
    # D repeats what P had found in its own cache, which was cold.
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    await until(lambda: p.stats()["pinned"] == p.stats()["kv_usage"] == 0)


async def test_nobody_comes_within_the_lease() -> None:
    """Then D still reads where the blocks were: no error, and no telling what it got."""
    async with nixl(LEASE_S) as fleet:
        p, d = fleet.engines
        params = await told_by(p)
        await until(lambda: p.stats()["expired"] == 1)
        assert p.stats()["kv_usage"] == 0
        status, _ = await post(d, 5, params)
        assert (status, p.stats()["stale_reads"]) == (200, 1)


async def test_p_is_gone(fleet: SimFleet) -> None:
    p, d = fleet.engines
    params = await told_by(p)
    await p.kill()
    status, answer = await post(d, 5, params)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
    stats = d.stats()
    assert (stats["prompt_computed_tokens"], stats["failed_receives"]) == (95, 1)


async def test_p_has_restarted(fleet: SimFleet) -> None:
    p, d = fleet.engines
    params = await told_by(p)
    await p.restart()
    status, _ = await post(d, 5, params)
    assert (status, d.stats()["failed_receives"]) == (200, 1)


async def test_a_rejected_leg_lets_p_go(fleet: SimFleet) -> None:
    p, d = fleet.engines
    params = await told_by(p)
    status, _ = await post(d, 0, params)
    assert status == 400
    await until(lambda: p.stats()["pinned"] == 0)


async def test_a_fetch_from_nowhere_ends_the_engine(fleet: SimFleet) -> None:
    """As seen: `do_remote_prefill` alone is an assertion in the scheduler."""
    _, d = fleet.engines
    try:
        status, _ = await post(d, 5, {"do_remote_prefill": True})
        assert status == 500
    except aiohttp.ClientError:
        pass
    await until(lambda: not d.running)
