"""KV that moves between real engines gives the answer that one engine alone would give."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from tests.real_vllm.rig import ALWAYS, CHAT, COMPLETIONS, MOVED, Pair, ask, ids, token_ids, words
from tests.support.harness import ServedProxy

PROMPTS = 50
AT_ONCE = 2


def request(number: int) -> tuple[str, dict[str, Any]]:
    """Chat and completions, text and ids, streamed or not, 600 to 6000 tokens."""
    pick = random.Random(number)
    stream, tokens = number % 2 == 0, pick.randrange(600, 6000)
    match number // 2 % 3:
        case 0:
            return CHAT, ask(CHAT, words(tokens // 2, number), stream=stream)
        case 1:
            return COMPLETIONS, ask(COMPLETIONS, words(tokens // 2, number), stream=stream)
        case _:
            return COMPLETIONS, ask(COMPLETIONS, ids(tokens, number), stream=stream)


async def test_offloaded_answers_are_those_of_one_engine(tmp_path: Path, mooncake: Pair) -> None:
    """50 of them, in both directions; engines and proxy count the same tokens as moved."""
    before = [await mooncake.prompt_tokens(e, MOVED) for e in mooncake.engines]
    async with mooncake.proxy(tmp_path, **ALWAYS, hedge=False) as proxy:
        await proxy.up()
        got = await _all(proxy)
        records = {r["request_id"]: r for r in await proxy.records(PROMPTS)}
        await proxy.at_rest()
    course = {(r["outcome"], r["route_class"], r["fallback"]) for r in records.values()}
    assert course == {("ok", "HEAVY_P2P", None)}
    pairs = {(r["prefill_instance"], r["decode_instance"]) for r in records.values()}
    assert pairs == {("a", "b"), ("b", "a")}
    for engine, was in zip(mooncake.engines, before, strict=True):
        here = [r for r in records.values() if r["decode_instance"] == engine.name]
        moved = await mooncake.prompt_tokens(engine, MOVED) - was
        assert moved == sum(r["cached_tokens"] for r in here) > 0
        assert all(r["cached_tokens"] == r["prompt_tokens"] for r in here)
    for number in range(PROMPTS):
        path, body = request(number)
        where = mooncake.named(records[f"r{number}"]["prefill_instance"])
        assert got[number] == await mooncake.fresh(where, path, body), number
    await mooncake.at_rest()


async def _all(proxy: ServedProxy) -> list[list[int]]:
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> list[int]:
        path, body = request(number)
        async with limit:
            answer = await proxy.post(body, path, headers={"X-Request-Id": f"r{number}"})
        assert answer.status == 200, answer.body
        return token_ids(answer.body)

    return await asyncio.gather(*map(one, range(PROMPTS)))
