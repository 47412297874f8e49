"""The simulator says what real engines say: classes, hits, where each prompt token came from."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from replayer.simulator.host import SimFleet
from tests.real_vllm.engines.fleet import (
    BLOCK_TOKENS,
    KV_BYTES_PER_TOKEN,
    MODEL,
    Engine,
    Site,
    running,
)
from tests.real_vllm.rig import ALWAYS, COMPLETIONS, COMPUTED, LOCAL, MOVED, Pair, ask, ids
from tests.support.harness import ServedProxy

REQUESTS, SESSIONS = 200, 16
SOURCES = (LOCAL, COMPUTED, MOVED)
TIGHT_BYTES = 4 << 20
STEADY: dict[str, Any] = ALWAYS | {"hedge": False, "scrape_interval": 60.0}
"""Nothing that depends on how long things take."""


def trace(longest: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Sessions in turns of any size, as token ids: both sides count the same tokens.

    A session that would get longer than `longest` is begun anew.
    """
    pick = random.Random(longest)
    prompts: dict[int, list[int]] = {}
    for number in range(REQUESTS):
        session = pick.randrange(SESSIONS)
        told = prompts.get(session, [])
        more = pick.choice((20, 60, 150, 450, 900)) + pick.randrange(40)
        if len(told) + more > longest:
            told = []
        prompts[session] = told = told + ids(more, f"{longest}-{number}")
        body = ask(COMPLETIONS, told, stream=number % 3 > 0, max_tokens=pick.randrange(2, 12))
        yield f"s{session}", body


async def run(proxy: ServedProxy, longest: int) -> list[tuple[Any, ...]]:
    """One request after the other: what was decided, what was believed and what was found."""
    for session, body in trace(longest):
        answer = await proxy.post(body, COMPLETIONS, headers={"X-Session-ID": session})
        assert answer.status == 200, answer.body
    keys = ("route_class", "prefill_instance", "decode_instance", "hit_tokens", "cached_tokens")
    records = await proxy.records(REQUESTS)
    await proxy.at_rest()
    return [tuple(r[k] for k in (*keys, "prompt_tokens", "osl_tokens")) for r in records]


@asynccontextmanager
async def simulated(
    folder: Path, kv_bytes: int, most: int
) -> AsyncIterator[tuple[ServedProxy, SimFleet]]:
    """Two simulated engines of the same make."""
    sizes: dict[str, Any] = {"block_size": BLOCK_TOKENS, "max_model_len": most, "max_num_seqs": 16}
    blocks = kv_bytes // KV_BYTES_PER_TOKEN // BLOCK_TOKENS
    sizes |= {"num_gpu_blocks": blocks, "max_num_batched_tokens": 2048}
    async with SimFleet(2, model=MODEL, speed=100.0, tick=0.0, **sizes) as fleet:
        names = zip("ab", fleet.engines, strict=True)
        given = [f"{n}={e.url};bootstrap={e.bootstrap_url}" for n, e in names]
        async with ServedProxy(folder / "sim.jsonl", given, **STEADY) as proxy:
            await proxy.up()
            yield proxy, fleet


async def test_the_same_trace_has_the_same_course(tmp_path: Path, mooncake: Pair) -> None:
    await _same(tmp_path, mooncake, 64 << 20, 32_768, 6000)


@pytest.fixture(scope="module")
def tight_engines(site: Site) -> Iterator[tuple[Engine, Engine]]:
    flags = ("--kv-cache-memory-bytes", str(TIGHT_BYTES), "--max-model-len", "4096")
    engines = Engine(site, "a", "mooncake", flags), Engine(site, "b", "mooncake", flags)
    with running(engines):
        yield engines


async def test_also_where_blocks_are_evicted(
    tmp_path: Path, tight_engines: tuple[Engine, Engine]
) -> None:
    async with aiohttp.ClientSession() as http:
        await _same(tmp_path, Pair(http, tight_engines), TIGHT_BYTES, 4096, 3500)


async def _same(folder: Path, pair: Pair, kv_bytes: int, most: int, longest: int) -> None:
    before = [await _counted(pair, e) for e in pair.engines]
    async with pair.proxy(folder, **STEADY) as proxy:
        await proxy.up()
        real = await run(proxy, longest)
    after = [await _counted(pair, e) for e in pair.engines]
    async with simulated(folder, kv_bytes, most) as (proxy, fleet):
        simulation = await run(proxy, longest)
        stats = [e.stats() for e in fleet.engines]
    differ = [(i, r, s) for i, (r, s) in enumerate(zip(real, simulation, strict=True)) if r != s]
    assert not differ, differ[:5]
    assert len({r[0] for r in real}) == 3
    keys = ("prompt_local_hit_tokens", "prompt_computed_tokens", "prompt_external_tokens")
    for was, now, told in zip(before, after, stats, strict=True):
        assert [n - w for n, w in zip(now, was, strict=True)] == [told[k] for k in keys]


async def _counted(pair: Pair, engine: Engine) -> list[int]:
    return [await pair.prompt_tokens(engine, source) for source in SOURCES]
