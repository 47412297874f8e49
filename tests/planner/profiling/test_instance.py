"""One instance over HTTP: what it tells of itself, and what it answers that is no answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from planner.profiling import instance as module
from planner.profiling.instance import BenchmarkError, EngineState, Instance, Model, Target
from replayer.answers import MOST_BYTES
from replayer.arguments import InputError
from replayer.replay.client import open_session
from tests.support.harness import DONE, STREAM_HEAD, RawEngine, chunk, plain, resets, says, stalls

METRICS = b"""vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 1.0
vllm:num_requests_waiting{engine="0"} 4.0
vllm:generation_tokens_total{engine="0"} 1e+03
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="1"} 1.0
"""
CARDS = {"data": [{"id": "big", "max_model_len": 4096}, {"id": "lora", "max_model_len": None}]}


@asynccontextmanager
async def seen(
    *scripts: Any, metrics: Any = METRICS, cards: Any = CARDS, **target: Any
) -> AsyncIterator[Instance]:
    """A scripted engine, as the benchmark sees it."""
    async with RawEngine(*scripts) as engine, open_session() as session:
        engine.gets["/metrics"] = plain(metrics) if isinstance(metrics, bytes) else metrics
        body = cards if isinstance(cards, bytes) else orjson.dumps(cards)
        engine.gets["/v1/models"] = plain(body)
        of = Target(engine.address, **target)
        yield Instance(session, of, asyncio.get_running_loop().time, 1)


async def test_what_it_tells() -> None:
    async with seen() as instance:
        assert await instance.serves() == Model("big", 4096)
        assert await instance.state() == EngineState(3, 4, 1000, 3200)
    async with seen(metrics=METRICS.replace(b"block_size", b"other")) as instance:
        assert (await instance.state()).kv_tokens == 0


@pytest.mark.parametrize(
    ("cards", "model", "told"),
    [
        (CARDS, "other", "has no 'other'"),
        (CARDS, "lora", "names no model with a length"),
        ({"data": []}, None, "names no model with a length"),
        ({"data": [{"id": "a"}]}, None, "has no 'max_model_len'"),
        ({}, None, "has no 'data'"),
        ([], None, "names no model with a length"),
        (b"{", None, "names no model with a length"),
        ({"data": [{"id": "a", "max_model_len": 1e308}]}, None, "names no model with a length"),
        ({"data": [{"id": "a", "max_model_len": -1}]}, None, "names no model with a length"),
        ({"data": [{"id": "a", "max_model_len": 1 << 60}]}, None, "names no model with a length"),
        (
            b'{"data":[{"max_model_len":1,"id":' + b"[" * 1000 + b"]" * 1000 + b"}]}",
            None,
            "names no model with a length",
        ),
    ],
)
async def test_no_model(cards: Any, model: str | None, told: str) -> None:
    async with seen(cards=cards, model=model) as instance:
        with pytest.raises(InputError, match=f"the answer to GET /v1/models {told}"):
            await instance.serves()


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        (b"", "has no vllm:generation_tokens_total, vllm:num_requests_running, vllm:num_req"),
        (METRICS.replace(b"num_requests_waiting", b"x"), "has no vllm:num_requests_waiting"),
        (METRICS.replace(b"2.0", b"NaN"), "is no text of metrics"),
        (METRICS.replace(b"2.0", b"+Inf"), "is no text of metrics"),
        (METRICS.replace(b"1e+03", b"1e308"), "is no text of metrics"),
        (METRICS.replace(b"2.0", b"-2.0"), "is no text of metrics"),
        (METRICS + b"vllm:num_requests_running{{{{\n", "is no text of metrics"),
        (METRICS + b"#" * MOST_BYTES, "is 200, of "),
        (says(plain(b"no", "503 Service Unavailable")), "is 503, of 2 bytes"),
        (resets(), "fails: "),
    ],
)
async def test_no_metrics(metrics: Any, told: str) -> None:
    async with seen(metrics=metrics) as instance:
        with pytest.raises(InputError, match="the answer to GET /metrics ") as raised:
            await instance.state()
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_what_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_TIMEOUT_S", 0.05)
    async with seen(metrics=stalls()) as instance:
        with pytest.raises(InputError, match=r"does not come within 0\.05 s"):
            await instance.state()
    monkeypatch.setattr(module, "IDLE_TIMEOUT_S", 0.05)
    async with seen() as instance:
        with pytest.raises(BenchmarkError, match=r"not idle within 0\.05 s"):
            await instance.idle()


async def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    async with open_session() as session:
        instance = Instance(session, Target(url), asyncio.get_running_loop().time, 1)
        with pytest.raises(InputError, match="cannot connect to 127"):
            await instance.serves()


def stream(prompt_tokens: int, *, tokens: int = 1) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
    events = [
        {"choices": [{"text": "a", "finish_reason": "length"}]},
        {"choices": [], "usage": usage},
    ]
    body = b"".join(chunk(b"data: " + orjson.dumps(one) + b"\n\n") for one in events)
    return STREAM_HEAD + body + DONE


async def test_an_answer_is_timed() -> None:
    async with seen(says(stream(700))) as instance:
        await instance.serves()
        found = await instance.answer(3, 700, 1)
    assert found.first_byte_s is not None
    assert found.sent_s <= found.first_byte_s <= found.end_s
    assert found.stream.completion_tokens == 1


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (says(stream(699)), "its usage says 699 and 1 tokens"),
        (says(stream(700, tokens=0)), "its usage says 700 and 0 tokens"),
        (says(plain(b'{"error":{"message":"too long"}}', "400 Bad Request")), "too long"),
        (resets(STREAM_HEAD), "the answer broke off before its end"),
        (stalls(STREAM_HEAD), "no end after 0.2 s"),
    ],
)
async def test_no_answer(script: Any, told: str) -> None:
    async with seen(script, timeout_s=0.2) as instance:
        await instance.serves()
        with pytest.raises(BenchmarkError, match="a prompt of 700 tokens: ") as raised:
            await instance.answer(3, 700, 1)
    assert told in str(raised.value)


async def test_the_key_goes_with_each_request() -> None:
    async with RawEngine(says(stream(700))) as engine, open_session() as session:
        engine.gets["/v1/models"] = plain(orjson.dumps(CARDS))
        of = Target(engine.address, api_key="k")
        instance = Instance(session, of, asyncio.get_running_loop().time, 1)
        await instance.serves()
        await instance.answer(3, 700, 1)
        assert all(b"Authorization: Bearer k\r\n" in head for head in engine.heads)
        (body,) = map(orjson.loads, engine.posts)
    assert len(body["prompt"]) == 700
    assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("big", 1, True)


async def test_streams_that_end_too_early() -> None:
    """Those beside the measured one run as long as it does."""
    async with seen(says(stream(700)), metrics=METRICS) as instance:
        await instance.serves()
        with pytest.raises(BenchmarkError, match="ended before the measured one did"):
            await instance.beside(700, 3, 5)
