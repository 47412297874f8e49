"""Answers in one piece, whose first byte comes with the last: their own limit ends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import (
    ANSWER,
    RawEngine,
    Script,
    ServedProxy,
    chat,
    plain,
    spend,
    stalls,
    until,
)

TTFT_S = 0.2
FORM = "multipart/form-data; boundary=b"
UPLOAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nab\r\n--b--\r\n'
ASKED: dict[str, tuple[str, Any]] = {
    "chat": ("/v1/chat/completions", chat("x", stream=False)),
    "two choices": ("/v1/chat/completions", chat("x", stream=False, n=2)),
    "text": ("/v1/completions", {"model": "sim-8b", "prompt": "x", "stream": False}),
    "messages": ("/v1/messages", {"model": "sim-8b", "max_tokens": 9, "messages": []}),
    "responses": ("/v1/responses", {"model": "sim-8b", "input": "x"}),
    "embeddings": ("/v1/embeddings", {"model": "sim-8b", "input": ["x"]}),
    "upload": ("/v1/audio/transcriptions", UPLOAD),
}


def later(data: bytes, after_s: float) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await spend(after_s)  # the input: how long the engine computes
        writer.write(data)
        await writer.drain()

    return script


@asynccontextmanager
async def two(
    tmp_path: Path, script: Script, **options: Any
) -> AsyncIterator[tuple[ServedProxy, list[RawEngine]]]:
    engines = [RawEngine(script) for _ in range(2)]
    options = {"kv_connector": "none", "health_interval": 60, "ttft_timeout": TTFT_S} | options
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        served = ServedProxy(tmp_path / "log", [e.address for e in engines], **options)
        yield await stack.enter_async_context(served), engines


async def ask(proxy: ServedProxy, what: str) -> Any:
    path, body = ASKED[what]
    return await proxy.post(body, path, headers={"Content-Type": FORM} if what == "upload" else {})


@pytest.mark.parametrize("what", ASKED)
async def test_one_that_takes_longer_than_a_first_byte_may_is_served(
    tmp_path: Path, what: str
) -> None:
    whole = b'{"choices":[{}],"content":[{}],"output":[{}]}'
    async with two(tmp_path, later(plain(whole), 3 * TTFT_S)) as (proxy, engines):
        answer = await ask(proxy, what)
        assert (answer.status, answer.body) == (200, whole)
        assert sum(len(engine.posts) for engine in engines) == 1
        (record,) = await proxy.records(1)
        assert (record["outcome"], record["retries"], record["limit"]) == ("ok", 0, None)
        await proxy.at_rest()


async def test_a_stream_keeps_the_limit_on_its_first_byte(tmp_path: Path) -> None:
    async with two(tmp_path, later(ANSWER, 5.0)) as (proxy, _):
        answer = await proxy.post(chat("x"))
        assert (answer.status, answer.json["error"]["code"]) == (504, "ttft_timeout")
        assert answer.json["error"]["message"] == (
            "upstream: no first event in 0.2 s (--ttft-timeout)"
        ), "the whole limit, and not what the first attempt has left of it"
        (record,) = await proxy.records(1)
        assert (record["limit"], record["limit_s"]) == ("ttft", TTFT_S)


@pytest.mark.parametrize("what", ASKED)
async def test_at_its_own_limit_it_ends_and_is_not_computed_again(
    tmp_path: Path, what: str
) -> None:
    async with two(tmp_path, stalls(), answer_timeout=0.3) as (proxy, engines):
        answer = await ask(proxy, what)
        assert answer.status == 504
        assert b"no answer in 0.3 s (--answer-timeout)" in answer.body
        assert sum(len(engine.posts) for engine in engines) == 1
        (record,) = await proxy.records(1)
        assert (record["limit"], record["limit_s"], record["retries"]) == ("answer", 0.3, 0)
        assert record["outcome"] == "upstream_timeout"
        await proxy.at_rest()


async def test_without_a_limit_of_its_own_that_on_the_whole_request_holds(tmp_path: Path) -> None:
    async with two(tmp_path, stalls(), total_timeout=0.5) as (proxy, engines):
        answer = await ask(proxy, "chat")
        assert (answer.status, answer.json["error"]["code"]) == (504, "total_timeout")
        assert sum(len(engine.posts) for engine in engines) == 1
        (record,) = await proxy.records(1)
        assert (record["limit"], record["limit_s"]) == ("total", 0.5)


async def test_an_engine_that_answers_others_is_not_blamed_for_a_long_answer(
    tmp_path: Path,
) -> None:
    async def first_stalls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        raise ConnectionError

    async def then_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(b"{}"))

    options = {"kv_connector": "none", "health_interval": 60, "answer_timeout": 1.0}
    async with RawEngine(first_stalls, then_answers) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], **options) as proxy:
            async with asyncio.TaskGroup() as group:
                long = group.create_task(ask(proxy, "chat"))
                await until(lambda: engine.posts, "the first one is being computed")
                short = group.create_task(ask(proxy, "chat"))
            assert (long.result().status, short.result().status) == (504, 200)
            (member,) = proxy.router.known.fleet.members()
            assert not member.health.has_failed_lately


async def test_one_that_has_begun_may_not_fall_silent(tmp_path: Path) -> None:
    """A part of the body is there, so the engine has computed: the rest is a matter of moments."""
    begun = plain(ANSWER)[:-3]
    async with two(tmp_path, stalls(begun), idle_timeout=0.2) as (proxy, _):
        answer = await proxy.post(chat("x", stream=False))
        assert (answer.status, answer.json["error"]["code"]) == (504, "idle_timeout")
        (record,) = await proxy.records(1)
        assert (record["limit"], record["limit_s"]) == ("idle", 0.2)
        await proxy.at_rest()
