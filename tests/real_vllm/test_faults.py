"""What breaks between two real engines: the client gets all of its answer, and nothing stays held.

An engine's leg is held on its way to it, so that the fault falls into the phase that is meant.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from tests.real_vllm.rig import (
    ALWAYS,
    CHAT,
    COMPLETIONS,
    FETCH,
    KEEP,
    Pair,
    Taps,
    ask,
    events,
    ids,
    token_ids,
    words,
)
from tests.support.harness import Answer, ServedProxy

STEADY: dict[str, Any] = ALWAYS | {"hedge": False, "slow_start": 0.0}
EOS = 2
PROMPT_TOKENS = 4000


@pytest.mark.parametrize("met", [False, True])
async def test_p_killed_between_the_legs(tmp_path: Path, mooncake: Pair, met: bool) -> None:
    """A D that has met P waits for it, for minutes if let; it is made to compute the prompt.

    One that has not asks P's bootstrap server first, finds nobody, and computes at once.
    """
    if met:
        async with mooncake.proxy(tmp_path, **STEADY) as proxy:
            await proxy.up()
            await _offloads(proxy, "met")
        (tmp_path / "log.jsonl").unlink()
    body = ask(COMPLETIONS, ids(PROMPT_TOKENS, f"p dies, {met}"), stream=True)
    answer, d, record = await _with_one_killed(tmp_path, mooncake, body, kill_d=False)
    assert (record["outcome"], record["decode_instance"]) == ("ok", d)
    if met:
        assert (record["route_class"], record["fallback"]) == ("HEAVY_COLO", "p_gone")
    survivor = mooncake.named(d)
    assert token_ids(answer.body) == await mooncake.fresh(survivor, COMPLETIONS, body)
    await mooncake.at_rest()


async def test_d_killed_before_the_first_token(tmp_path: Path, mooncake: Pair) -> None:
    """P has the prompt: it answers alone, and does not keep what nobody will fetch."""
    body = ask(CHAT, words(PROMPT_TOKENS // 2, "d dies"), stream=True)
    answer, d, record = await _with_one_killed(tmp_path, mooncake, body, kill_d=True)
    assert record["outcome"] == "ok"
    (survivor,) = (e for e in mooncake.engines if e.name != d)
    assert record["decode_instance"] == survivor.name
    assert token_ids(answer.body) == await mooncake.fresh(survivor, CHAT, body)
    await mooncake.at_rest()


async def _with_one_killed(
    folder: Path, pair: Pair, body: dict[str, Any], *, kill_d: bool
) -> tuple[Answer, str, dict[str, Any]]:
    """Kill D, or P, when P has answered and D is about to be asked."""
    path = CHAT if "messages" in body else COMPLETIONS
    async with pair.tapped(folder, FETCH, **STEADY) as (proxy, taps):
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(proxy.post(body, path))
            d = await taps.holding()
            victim = next(e for e in pair.engines if (e.name == d) == kill_d)
            victim.kill()
            taps.go()
            answer = await asked
        assert answer.status == 200, answer.body
        (record,) = await proxy.records(1)
        await proxy.at_rest()
    return answer, d, record


async def test_a_restarted_p_is_used_under_its_new_id(tmp_path: Path, mooncake: Pair) -> None:
    engine, other = mooncake.engines
    async with mooncake.proxy(tmp_path, **STEADY) as proxy:
        await proxy.up()
        await _offloads(proxy, "before")
        engine.kill()
        engine.start()
        await asyncio.to_thread(engine.wait)
        async with asyncio.timeout(60):
            while not proxy.router.known.fleet.is_up(engine.name):
                await asyncio.sleep(0.1)
        await _offloads(proxy, "after")
        records = await proxy.records(8)
        await proxy.at_rest()
    assert {r["outcome"] for r in records} == {"ok"}
    moved = records[4:]
    assert {(r["route_class"], r["fallback"]) for r in moved} == {("HEAVY_P2P", None)}
    both = {(engine.name, other.name), (other.name, engine.name)}
    assert {(r["prefill_instance"], r["decode_instance"]) for r in moved} == both
    assert all(r["cached_tokens"] == r["prompt_tokens"] for r in moved)
    await mooncake.at_rest()


async def _offloads(proxy: ServedProxy, name: str) -> None:
    for number in range(4):
        body = ask(COMPLETIONS, ids(1000, f"{name}-{number}"), stream=number % 2 == 0)
        answer = await proxy.post(body, COMPLETIONS)
        assert answer.status == 200, answer.body


@pytest.mark.parametrize("how", ["a stop token", "the end of text"])
async def test_an_answer_that_ends_at_once(tmp_path: Path, mooncake: Pair, how: str) -> None:
    """P's leg must not end so: its KV would be gone, and D would wait for it."""
    body = ask(COMPLETIONS, ids(1500, how), stream=True)
    first, *_ = await mooncake.fresh(mooncake.engines[0], COMPLETIONS, body)
    if how == "a stop token":
        body |= {"stop_token_ids": [first]}
    else:
        body |= {"logit_bias": {str(EOS): 100}, "ignore_eos": False}
    async with mooncake.proxy(tmp_path, **STEADY) as proxy:
        await proxy.up()
        answer = await proxy.post(body, COMPLETIONS)
        (record,) = await proxy.records(1)
        await proxy.at_rest()
    ends = [c["finish_reason"] for e in events(answer.body) for c in e["choices"]]
    assert ends[-1] == "stop"
    assert (record["route_class"], record["fallback"]) == ("HEAVY_P2P", None)
    assert record["cached_tokens"] == record["prompt_tokens"]
    await mooncake.at_rest()


@pytest.mark.parametrize("phase", ["before P", "with P", "between", "with D", "decode"])
async def test_the_client_leaves(tmp_path: Path, mooncake: Pair, phase: str) -> None:
    """Nothing of it runs on, nothing of it stays pinned, and the next request is served."""
    body = ask(COMPLETIONS, ids(20_000, phase), stream=True, max_tokens=2000)
    hold = KEEP if phase in ("before P", "with P") else FETCH
    async with mooncake.tapped(tmp_path, hold, **STEADY) as (proxy, taps):
        await _leave(proxy, taps, body, phase)
        (record,) = await proxy.records(1)
        assert record["outcome"] == "client_gone"
        taps.go()
        await proxy.at_rest()
        await mooncake.at_rest()
        again = ask(COMPLETIONS, ids(1000, f"after {phase}"), stream=False)
        answer = await proxy.post(again, COMPLETIONS)
        assert answer.status == 200, answer.body
        await proxy.at_rest()
    assert all(engine.is_alive for engine in mooncake.engines)
    await mooncake.at_rest()


async def _leave(proxy: ServedProxy, taps: Taps, body: dict[str, Any], phase: str) -> None:
    """Ask, and close the connection in this phase."""
    headers = {"Content-Type": "application/json"}
    begun = asyncio.Event()

    async def client() -> None:
        async with aiohttp.ClientSession(proxy.server.url) as http:
            async with http.post(COMPLETIONS, data=orjson.dumps(body), headers=headers) as got:
                await got.content.readany()
                begun.set()
                await asyncio.Event().wait()

    asking = asyncio.ensure_future(client())
    await taps.holding()
    if phase in ("with P", "with D", "decode"):
        taps.go()
    if phase == "decode":
        await begun.wait()
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
