"""The HTTP face: what a client of vLLM relies on, over real sockets."""

import asyncio
from typing import Any

import pytest

from replayer.simulator.host import SimFleet
from tests.support.harness import until
from tests.support.sim_http import CHAT, MESSAGES, TEXT, is_idle, post


async def test_the_next_turn_hits_the_answer_of_the_last(http, engine):
    _status, first = await post(http, engine, CHAT, messages=MESSAGES, max_tokens=100)
    answer = first["choices"][0]["message"]
    turn = [*MESSAGES, answer, {"role": "user", "content": "go on"}]
    _status, second = await post(http, engine, CHAT, messages=turn, max_tokens=1)
    # 95 prompt and 99 generated tokens have KV: twelve blocks of 16.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 192


async def test_request_ids_are_echoed(http, engine):
    headers = {"X-Request-Id": "abc"}
    for path, body, expected in (
        (CHAT, {"messages": MESSAGES, "max_tokens": 1}, "chatcmpl-abc"),
        (TEXT, {"prompt": "a", "max_tokens": 1}, "cmpl-abc"),
    ):
        async with http.post(engine.url + path, json=body, headers=headers) as answer:
            assert answer.headers["X-Request-Id"] == "abc"
            assert (await answer.json())["id"] == expected


async def test_small_endpoints(http, engine):
    async with http.get(engine.url + "/v1/models") as answer:
        (card,) = (await answer.json())["data"]
    assert (card["id"], card["max_model_len"]) == ("sim-8b", 131_072)
    async with http.get(engine.url + "/health") as answer:
        assert (answer.status, await answer.read()) == (200, b"")
    async with http.get(engine.url + "/version") as answer:
        assert "version" in await answer.json()
    _status, counted = await post(http, engine, "/tokenize", messages=MESSAGES)
    assert counted["count"] == len(counted["tokens"]) == 95
    _status, text = await post(http, engine, "/detokenize", tokens=[0, 1])
    assert len(text["prompt"].split()) == 2


async def test_a_full_queue_answers_503_without_retry_after(http):
    options: dict[str, Any] = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
    async with SimFleet(1, **options) as fleet, asyncio.TaskGroup() as tasks:
        (engine,) = fleet.engines
        body = {"prompt": "a", "max_tokens": 10_000}
        first = tasks.create_task(post(http, engine, TEXT, **body))
        await until(lambda: engine.stats()["running"] == 1)
        second = tasks.create_task(post(http, engine, TEXT, **body))
        await until(lambda: engine.stats()["waiting"] == 1)
        async with http.post(engine.url + TEXT, json=body) as answer:
            assert answer.status == 503
            assert "Retry-After" not in answer.headers
            error = (await answer.json())["error"]
        assert error["type"] == "Service Unavailable"
        assert error["message"].startswith("The engine is currently busy")
        assert engine.stats()["rejected"] == 1
        first.cancel()
        second.cancel()
        await until(lambda: is_idle(engine))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(http, engine, stream):
    body = {"prompt": "a b c", "max_tokens": 100_000, "stream": stream}
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(http.post(engine.url + TEXT, json=body))
        await until(lambda: engine.stats()["running"] == 1)
        if stream:
            (await call).close()
        else:
            call.cancel()
        await until(lambda: is_idle(engine))
    assert engine.stats()["aborted"] == 1


async def test_headers_of_a_stream_come_before_the_first_token(http):
    async with SimFleet(1, a0=1_000.0) as fleet:
        body = {"prompt": "a", "max_tokens": 1, "stream": True}
        async with http.post(fleet.engines[0].url + TEXT, json=body) as answer:
            assert answer.status == 200
            assert fleet.engines[0].stats()["generated_tokens"] == 0
