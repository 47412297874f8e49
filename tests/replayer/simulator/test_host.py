"""The lives of simulated engines: restart, stop, kill."""

import aiohttp
import pytest

from replayer.simulator.host import SimFleet
from tests.support.sim_http import CHAT, TEXT, decode_leg, post, prefill_leg


async def test_a_restarted_engine_has_a_new_id_and_an_empty_cache(http, fleet):
    p, d = fleet.engines
    await post(http, p, CHAT, **prefill_leg())
    stale, url = decode_leg(p), p.url
    await p.restart()
    assert p.url == url
    assert p.engine_id != stale["kv_transfer_params"]["remote_engine_id"]
    async with http.get(p.bootstrap_url + "/query") as answer:
        ranks = await answer.json()
    assert ranks["0"]["engine_id"] == p.engine_id
    _status, body = await post(http, d, CHAT, **stale)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert p.stats()["finished"] == 0


async def test_a_sender_killed_after_first_contact_makes_the_receiver_wait(http):
    async with SimFleet(2, speed=50.0, abort_timeout=50.0) as fleet:
        p, d = fleet.engines
        await post(http, p, CHAT, **prefill_leg("x0"))
        await post(http, d, CHAT, **decode_leg(p, "x0"))
        body = decode_leg(p, "x2")
        body["messages"] = [{"role": "user", "content": "other " * 100}]
        await p.kill()
        _status, answer = await post(http, d, CHAT, **body)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        last = fleet.records[-1]
        waited_s = (last["t_first_token"] - last["t_arrived"]) * fleet.options.speed
        assert waited_s > 50.0 + 60.0


async def test_a_killed_engine_cuts_its_streams(http, engine):
    body = {"prompt": "a", "max_tokens": 100_000, "stream": True}
    async with http.post(engine.url + TEXT, json=body) as answer:
        await answer.content.readany()
        await engine.kill()
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
    with pytest.raises(aiohttp.ClientConnectorError):
        await http.get(engine.url + "/health")


async def test_a_stopped_engine_ends_its_streams_with_abort(http, engine):
    body = {"prompt": "a", "max_tokens": 100_000, "stream": True}
    async with http.post(engine.url + TEXT, json=body) as answer:
        await answer.content.readany()
        await engine.stop()
        raw = await answer.read()
    assert b'"finish_reason":"abort"' in raw
    assert raw.endswith(b"data: [DONE]\n\n")
