"""What the proxy believes an engine has cached, against what the engine says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.real_vllm.conversations import Conversation, error_ratio, mean
from tests.real_vllm.engines.fleet import KV_BYTES_PER_TOKEN, Engine, Site, running
from tests.real_vllm.rig import COMPLETIONS, Pair, ask, ids
from tests.support.harness import ServedProxy

SESSIONS, TURNS, AT_ONCE = 30, 10, 3
WARM_UP = 30
"""Requests in which bytes per token are learned."""
MOST = 0.05
MOST_MESSAGES = 40
QUANTUM_TOKENS = 350
"""A block of the index, 1 KiB of text, is up to 300 tokens here; an engine's is 32."""
SMALL_KV_BYTES = 2 << 20
SMALL_KV_TOKENS = SMALL_KV_BYTES // KV_BYTES_PER_TOKEN


async def test_predicted_hits_over_a_multi_turn_replay(
    tmp_path: Path, mooncake: Pair, figure: Callable[[str], None]
) -> None:
    """300 requests of 30 conversations: the mean absolute error is below 5 % of the prompt."""
    pick = random.Random(5)
    talks = [Conversation(f"t{i}", pick.randint(1000, 4000)) for i in range(SESSIONS)]
    async with mooncake.proxy(tmp_path) as proxy:
        await proxy.up()
        await _replay(proxy, talks)
        records = await proxy.records(SESSIONS * TURNS)
        await proxy.at_rest()
    assert {r["outcome"] for r in records} == {"ok"}
    told = [r for r in records[WARM_UP:] if r["route_class"] != "HEAVY_P2P"]
    assert len(told) > SESSIONS * TURNS / 2
    error = mean([error_ratio(r) for r in told])
    figure(f"predicted hit tokens: off by {error:.2%} of the prompt on average ({len(told)})")
    assert error < MOST


async def _replay(proxy: ServedProxy, talks: list[Conversation]) -> None:
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(talk: Conversation) -> None:
        for _ in range(TURNS):
            async with limit:
                await talk.turn(proxy)

    async with asyncio.TaskGroup() as group:
        for talk in talks:
            group.create_task(one(talk))


@pytest.fixture(scope="module")
def small_engine(site: Site) -> Iterator[Engine]:
    flags = ("--kv-cache-memory-bytes", str(SMALL_KV_BYTES), "--max-model-len", "4096")
    engine = Engine(site, "small", "none", flags)
    with running([engine]):
        yield engine


@pytest.fixture
async def small(small_engine: Engine) -> AsyncIterator[Pair]:
    async with aiohttp.ClientSession() as http:
        yield Pair(http, [small_engine])


async def test_eviction_is_noticed_and_made_good(
    tmp_path: Path, small: Pair, figure: Callable[[str], None]
) -> None:
    """Somebody else fills the cache of 8192 tokens: two predictions are wrong, the next are not.

    The session used last comes first: what it lost, all that were used before it have lost too.
    """
    (engine,) = small.engines
    talks = [Conversation(f"e{i}", 400, (20, 40), 8) for i in range(4)]
    async with small.proxy(tmp_path, kv_connector="none") as proxy:
        await proxy.up()
        await _rounds(proxy, talks, 3)
        for seed in range(4):
            prompt = ids(SMALL_KV_TOKENS // 4, f"other-{seed}")
            await small.post(engine, COMPLETIONS, ask(COMPLETIONS, prompt, stream=False))
        await _rounds(proxy, talks[::-1], 2)
        records = await proxy.records(5 * len(talks))
        await proxy.at_rest()
    # One report is evidence about one prompt; the second one, of another session, is about all.
    calm, first, noticed, after = records[8:12], records[12:14], records[14:16], records[16:]
    shown = [mean([error_ratio(r) for r in part]) for part in (calm, first, noticed, after)]
    figure(f"hits before, at, beside and after a foreign eviction: off by {_ratios(shown)}")
    assert all(r["cached_tokens"] == 0 < r["hit_tokens"] for r in first)
    assert [(r["hit_tokens"], r["cached_tokens"]) for r in noticed] == [(0, 0)] * len(noticed)
    for record in (*calm, *after):
        assert abs(record["hit_tokens"] - record["cached_tokens"]) < QUANTUM_TOKENS, record
        assert record["cached_tokens"] > 0


def _ratios(values: list[float]) -> str:
    return ", ".join(f"{v:.1%}" for v in values)


async def test_more_conversations_than_the_cache_holds(
    tmp_path: Path, small: Pair, figure: Callable[[str], None]
) -> None:
    """The engine's order of eviction is followed, whoever's turn it is."""
    talks = [Conversation(f"p{i}", 400, (20, 60), 8) for i in range(12)]
    pick = random.Random(7)
    async with small.proxy(tmp_path, kv_connector="none") as proxy:
        await proxy.up()
        for _ in range(100):
            talk = pick.choice(talks[:3] if pick.random() < 0.6 else talks)
            if len(talk.messages) < MOST_MESSAGES:
                await talk.turn(proxy)
        asked = sum(len(talk.messages) // 2 for talk in talks)
        records: list[dict[str, Any]] = await proxy.records(asked)
        await proxy.at_rest()
    told = records[20:]
    error = mean([error_ratio(r) for r in told])
    cached = sum(r["cached_tokens"] for r in told) / sum(r["prompt_tokens"] for r in told)
    figure(f"under eviction pressure ({cached:.0%} cached): off by {error:.2%} ({len(told)})")
    assert 0 < cached < 1


async def _rounds(proxy: ServedProxy, talks: list[Conversation], count: int) -> None:
    for talk in talks * count:
        await talk.turn(proxy)
