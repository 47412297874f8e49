"""What engines say of their caches reaches the index, and so do requests that are under way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.core import is_compiled
from proxy.request.exchange import DEFECT
from tests.support.admin import call
from tests.support.harness import (
    DONE,
    STREAM_HEAD,
    RawEngine,
    Script,
    ServedProxy,
    chat,
    chunk,
    event,
    plain,
    says,
    stalls,
    until,
    words,
)

USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":2000,"completion_tokens":8,'
    b'"prompt_tokens_details":{"cached_tokens":%d}}}\n\n'
)


def told(cached: int) -> Script:
    return says(STREAM_HEAD + chunk(event("fine")) + chunk(USAGE % cached) + DONE)


async def test_an_eviction_that_an_engine_reports(tmp_path: Path) -> None:
    """One prompt that is lost may be read in another way; a second one shows an eviction."""
    async with RawEngine(told(0), told(0), told(1990), told(0), told(0)) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], health_interval=60) as proxy:
            name, prefixes = proxy.settings.instances[0].name, proxy.router.known.prefixes
            cache = proxy.router.known.fleet.states[name].cache
            sizes = []
            for seed in "abbab":
                assert prefixes.capacity(cache) is None
                await proxy.post(chat(words(1000, seed)))
                await proxy.at_rest()
                sizes.append(cache.blocks)
            assert sizes[1] == sizes[2] == sizes[3] > sizes[4] == sizes[0]
            assert prefixes.capacity(cache) == sizes[0]
            assert proxy.router.known.reuse.is_at_rest
            records = await proxy.records(5)
            assert [r["cached_tokens"] for r in records] == [0, 0, 1990, 0, 0]


async def test_a_whole_answer_tells_too(tmp_path: Path) -> None:
    body = b'{"choices":[{}],"usage":{"prompt_tokens":2000,"prompt_tokens_details":%s}}'
    answers = [says(plain(body % b'{"cached_tokens":0}'))] * 4
    async with RawEngine(*answers) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], health_interval=60) as proxy:
            name, prefixes = proxy.settings.instances[0].name, proxy.router.known.prefixes
            cache = proxy.router.known.fleet.states[name].cache
            for seed in "abab":
                await proxy.post(chat(words(1000, seed), stream=False))
            await proxy.at_rest()
            assert prefixes.capacity(cache) == cache.blocks


async def test_a_refused_prompt_counts_as_cached_nowhere(tmp_path: Path) -> None:
    """The client mends a field and sends it again: the engine must not seem to have lost it."""
    body = b'{"error":{"message":"this model has no tools"}}'
    answer = plain(body, "400 Bad Request")

    async def in_two_reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        for part in (answer[: -len(body)], answer[-len(body) :]):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.05)

    for refusal in (says(answer), in_two_reads):
        async with RawEngine(told(0), refusal, told(0)) as engine:
            log = tmp_path / "log"
            async with ServedProxy(log, [engine.address], health_interval=60) as proxy:
                cache = proxy.router.known.fleet.states[proxy.settings.instances[0].name].cache
                await proxy.post(chat(words(1000, "a")))
                await proxy.at_rest()
                known = cache.blocks
                refused = await proxy.post(chat(words(1000, "b"), stream=False))
                assert (refused.status, refused.body) == (400, body)
                await proxy.at_rest()
                assert cache.blocks == known
                await proxy.post(chat(words(1000, "b")))
                await proxy.at_rest()
                assert cache.blocks == 2 * known, "nothing was taken for evicted"


@pytest.mark.skipif(is_compiled(), reason="it replaces a name in what is compiled")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_defect_of_the_proxy_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Whatever raises, the record says so, the prompt is not cached, and all is given back."""

    def fails(*_: object) -> bool:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("proxy.request.exchange.is_whole", fails)
    async with RawEngine(told(0)) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], health_interval=60) as proxy:
            answer = await proxy.post(chat(words(1000), stream=stream))
            assert answer.status == 500
            await proxy.at_rest()
            (record,) = await proxy.records(1)
            assert (record["outcome"], record["error"]) == ("upstream_error", DEFECT)
            _, health = await call(proxy, "GET", "/health")
            assert "a defect of the proxy ended: 1;" in health["warnings"][0]["text"]


async def test_siblings_see_each_other_and_nothing_stays(tmp_path: Path) -> None:
    """One long prompt, three clients: one computes, the others wait for it there."""
    options: dict[str, Any] = {"offload_policy": "cost", "heavy_threshold": 60_000}
    async with RawEngine(stalls()) as a, RawEngine(stalls()) as b:
        instances = [a.address, b.address]
        async with ServedProxy(tmp_path / "log", instances, health_interval=60, **options) as proxy:
            body = chat(words(20_000))
            tasks = [asyncio.create_task(proxy.post(body))]
            await until(lambda: len(a.posts) + len(b.posts) == 1, "the first is placed")
            clock = proxy.server.state.clock
            real_s = clock.now_s
            clock.now_s = lambda: real_s() + 0.3  # of the 2 s that it takes: waiting is shorter
            tasks += [asyncio.create_task(proxy.post(body)) for _ in range(2)]
            await until(lambda: len(a.posts) + len(b.posts) == 3, "all placed")
            assert {len(a.posts), len(b.posts)} == {0, 3}
            assert not proxy.router.known.reuse.is_at_rest
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await proxy.at_rest()
            assert proxy.router.known.reuse.is_at_rest
            new = sorted(r["new_tokens"] for r in await proxy.records(3))
            assert new[0] == new[1] < 300 < new[2]
