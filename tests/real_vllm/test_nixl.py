"""The same hand-over where D fetches: NIXL, unmodified, over TCP and shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.real_vllm.engines.calm import calm
from tests.real_vllm.engines.fleet import Engine, Site, running
from tests.real_vllm.rig import (
    ALWAYS,
    CHAT,
    COMPLETIONS,
    COMPUTED,
    FETCH,
    MOVED,
    Pair,
    ask,
    ids,
    token_ids,
    words,
)

PROMPTS = 12
NIXL: dict[str, Any] = ALWAYS | {"kv_connector": "nixl", "hedge": False}


@pytest.fixture(scope="module")
def nixl_engines(site: Site) -> Iterator[tuple[Engine, Engine]]:
    engines = Engine(site, "a", "nixl"), Engine(site, "b", "nixl")
    with running(engines):
        for engine in engines:
            calm(engine.pid)
        yield engines


@pytest.fixture
async def nixl(nixl_engines: tuple[Engine, Engine]) -> AsyncIterator[Pair]:
    async with aiohttp.ClientSession() as http:
        pair = Pair(http, nixl_engines)
        await pair.at_rest()
        yield pair


def request(number: int) -> tuple[str, dict[str, Any]]:
    stream = number % 2 == 0
    if number % 3 == 0:
        return CHAT, ask(CHAT, words(600 + 150 * number, f"n{number}"), stream=stream)
    return COMPLETIONS, ask(COMPLETIONS, ids(700 + 300 * number, f"n{number}"), stream=stream)


async def _meet(folder: Path, nixl: Pair) -> None:
    """The first transfer of a pair carries its handshake, seconds on a busy machine."""
    async with nixl.proxy(folder, **NIXL, request_log=None) as proxy:
        await proxy.up()
        for number in range(4):
            await proxy.post(ask(COMPLETIONS, ids(600, f"m{number}"), stream=False), COMPLETIONS)
        await proxy.at_rest()
    await nixl.at_rest()


async def test_offloaded_answers_are_those_of_one_engine(tmp_path: Path, nixl: Pair) -> None:
    await _meet(tmp_path, nixl)
    before = [await nixl.prompt_tokens(e, MOVED) for e in nixl.engines]
    got = {}
    async with nixl.proxy(tmp_path, **NIXL) as proxy:
        await proxy.up()
        for number in range(PROMPTS):
            path, body = request(number)
            answer = await proxy.post(body, path, headers={"X-Request-Id": f"n{number}"})
            assert answer.status == 200, answer.body
            got[f"n{number}"] = token_ids(answer.body)
        records = {r["request_id"]: r for r in await proxy.records(PROMPTS)}
        assert proxy.metric("offload_kv_misses_total") == 0
        await proxy.at_rest()
    course = {(r["outcome"], r["route_class"], r["fallback"]) for r in records.values()}
    assert course == {("ok", "HEAVY_P2P", None)}
    pairs = {(r["prefill_instance"], r["decode_instance"]) for r in records.values()}
    assert pairs == {("a", "b"), ("b", "a")}
    for engine, was in zip(nixl.engines, before, strict=True):
        moved = await nixl.prompt_tokens(engine, MOVED) - was
        here = [r for r in records.values() if r["decode_instance"] == engine.name]
        assert moved == sum(r["prompt_tokens"] for r in here)
    for number in range(PROMPTS):
        path, body = request(number)
        where = nixl.named(records[f"n{number}"]["prefill_instance"])
        assert got[f"n{number}"] == await nixl.fresh(where, path, body), number
    await nixl.at_rest()


async def test_a_session_that_moves_takes_its_kv_along(tmp_path: Path, nixl: Pair) -> None:
    """Its second turn is placed elsewhere: the old home computes what is new, all of it moves."""
    first = ids(4000, "home")
    second = first + ids(200, "more")
    headers = {"X-Session-ID": "moving"}
    async with nixl.proxy(tmp_path, **NIXL | {"placement": "round-robin"}) as proxy:
        await proxy.up()
        # One token is never offloaded: there is nothing to decode.
        alone = ask(COMPLETIONS, first, stream=False, max_tokens=1)
        await proxy.post(alone, COMPLETIONS, headers=headers)
        await nixl.at_rest()
        home_name = (await proxy.records(1))[0]["decode_instance"]
        home = nixl.named(home_name)
        other = next(e for e in nixl.engines if e is not home)
        computed = await nixl.prompt_tokens(home, COMPUTED)
        moved = await nixl.prompt_tokens(other, MOVED)
        answer = await proxy.post(
            ask(COMPLETIONS, second, stream=True), COMPLETIONS, headers=headers
        )
        records = await proxy.records(2)
        await proxy.at_rest()
    turn = records[1]
    assert (turn["prefill_instance"], turn["decode_instance"]) == (home.name, other.name)
    assert (turn["route_class"], turn["fallback"]) == ("HEAVY_P2P", None)
    assert await nixl.prompt_tokens(home, COMPUTED) - computed < 300
    assert await nixl.prompt_tokens(other, MOVED) - moved > 0
    assert token_ids(answer.body) == await nixl.fresh(
        home, COMPLETIONS, ask(COMPLETIONS, second, stream=False)
    )
    await nixl.at_rest()


async def test_p_killed_between_the_legs(tmp_path: Path, nixl: Pair) -> None:
    """Its answer names blocks that nobody has any more; D computes the prompt itself."""
    body = ask(COMPLETIONS, ids(3000, "late"), stream=True)
    async with nixl.tapped(tmp_path, hold=FETCH, **NIXL) as (proxy, taps):
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(proxy.post(body, COMPLETIONS))
            d = await taps.holding()
            (victim,) = (e for e in nixl.engines if e.name != d)
            victim.kill()
            taps.go()
            answer = await asked
        assert answer.status == 200, answer.body
        (record,) = await proxy.records(1)
        await proxy.at_rest()
    assert record["outcome"] == "ok"
    survivor = nixl.named(d)
    assert token_ids(answer.body) == await nixl.fresh(survivor, COMPLETIONS, body)
    await nixl.at_rest()
    victim.start()
    victim.wait()
    calm(victim.pid)
