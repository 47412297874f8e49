"""Engines that share a store: P's leg fills it, D finds the prompt there by itself."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.real_vllm.engines.fleet import BLOCK_TOKENS, Engine, Site, running
from tests.real_vllm.rig import ALWAYS, COMPLETIONS, MOVED, Pair, ask, ids, token_ids

PROMPTS = 6
LONGEST = 8192
"""vLLM's ExampleConnector ends the engine on a prompt longer than one step's budget."""
IMPLICIT: dict[str, Any] = ALWAYS | {"kv_connector": "implicit", "hedge": False}


@pytest.fixture(scope="module")
def engines(site: Site) -> Iterator[list[Engine]]:
    """Two that share, and one that has nobody: the store knows no cache salt."""
    shutil.rmtree(site.shared_kv, ignore_errors=True)  # what an earlier run has left
    flags = ("--max-num-batched-tokens", str(LONGEST))
    two = [Engine(site, name, "shared", flags) for name in "ab"]
    three = [*two, Engine(site, "alone", "none", flags)]
    with running(three):
        yield three


@pytest.fixture
async def shared(engines: list[Engine]) -> AsyncIterator[Pair]:
    async with aiohttp.ClientSession() as http:
        yield Pair(http, engines[:2])


async def test_what_p_has_computed_is_found_by_d(
    tmp_path: Path, shared: Pair, engines: list[Engine]
) -> None:
    before = [await shared.prompt_tokens(e, MOVED) for e in shared.engines]
    bodies = [
        ask(COMPLETIONS, ids(600 + 700 * i, f"shared-{i}"), stream=i % 2 == 0)
        for i in range(PROMPTS)
    ]
    async with shared.proxy(tmp_path, **IMPLICIT) as proxy:
        await proxy.up()
        answers = [await proxy.post(body, COMPLETIONS) for body in bodies]
        records = await proxy.records(PROMPTS)
        await proxy.at_rest()
    assert [a.status for a in answers] == [200] * PROMPTS
    assert {(r["route_class"], r["fallback"]) for r in records} == {("HEAVY_P2P", None)}
    pairs = {(r["prefill_instance"], r["decode_instance"]) for r in records}
    assert pairs == {("a", "b"), ("b", "a")}
    for engine, was in zip(shared.engines, before, strict=True):
        here = [r for r in records if r["decode_instance"] == engine.name]
        moved = await shared.prompt_tokens(engine, MOVED) - was
        assert moved == sum(r["cached_tokens"] for r in here) > 0
        assert all(r["prompt_tokens"] - r["cached_tokens"] <= BLOCK_TOKENS for r in here)
    for body, answer in zip(bodies, answers, strict=True):
        assert token_ids(answer.body) == await shared.fresh(engines[2], COMPLETIONS, body)
    await shared.at_rest()
