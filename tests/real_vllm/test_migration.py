"""Streams whose real engine is killed, told to end, or drained: the client gets all of each.

Twenty streams of different lengths so far, chats and completions, lose their engine at once. What
their clients got is token for token what the other engine says when it computes all of it itself.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.real_vllm.engines.fleet import Engine
from tests.real_vllm.rig import CHAT, COMPLETIONS, SLOW, Pair, ask, events, token_ids, usage, words
from tests.support.admin import call
from tests.support.harness import Answer, ServedProxy

TOKENS = 600
APART_S = 0.1
"""Mean time between two streams' beginnings, so that they are cut at different tokens."""
BEGIN_S = 120.0


def body_of(number: int, how: str) -> tuple[str, dict[str, Any]]:
    path = CHAT if number % 2 else COMPLETIONS
    return path, ask(path, words(150, f"{how} {number}"), stream=True, max_tokens=TOKENS)


async def drain(proxy: ServedProxy, engine: Engine) -> None:
    path = f"/instances/{engine.name}?drain=true&mode=migrate"
    assert (await call(proxy, "DELETE", path))[0] in (200, 202)


async def kill(proxy: ServedProxy, engine: Engine) -> None:
    del proxy
    engine.kill()


async def terminate(proxy: ServedProxy, engine: Engine) -> None:
    del proxy
    os.kill(engine.pid, signal.SIGTERM)


WAYS = {"killed": (kill, 7), "told to end": (terminate, 7), "drained": (drain, 6)}


@pytest.mark.parametrize("how", WAYS)
async def test_streams_go_on_token_for_token(
    tmp_path: Path, mooncake: Pair, how: str, figure: Callable[[str], None]
) -> None:
    lose, count = WAYS[how]
    old, new = mooncake.engines
    asked = [body_of(number, how) for number in range(count)]
    pick = random.Random(how)
    first = [f"{old.name}={old.url}"]
    options = SLOW | {"kv_connector": "none", "migration_limit": 2}
    async with ServedProxy(tmp_path / "log.jsonl", first, **options) as proxy:
        await proxy.up()
        streams: list[asyncio.Task[Answer]] = []
        for path, body in asked:
            streams.append(asyncio.create_task(proxy.post(body, path)))
            await asyncio.sleep(pick.uniform(0.0, 2 * APART_S))
        added = await call(proxy, "POST", "/instances", {"instance": f"{new.name}={new.url}"})
        assert added[0] == 201
        async with asyncio.timeout(BEGIN_S):
            while not (
                proxy.router.known.fleet.is_up(new.name)
                and proxy.router.known.ledger.load(old.name).decode_requests == count
            ):
                await asyncio.sleep(0.01)
        await lose(proxy, old)
        answers = await asyncio.gather(*streams)
        records = await proxy.records(count)
        await proxy.at_rest()
        assert proxy.server.state.in_flight.trails.taken_bytes == 0
    if how == "told to end":
        old.stop()
    rows = [row for record in records for row in record["migrations"] or ()]
    assert {record["outcome"] for record in records} == {"ok"}
    assert [row["ended"] for row in rows] == ["moved"] * count
    assert {row["to_instance"] for row in rows} == {new.name}
    for (path, body), answer in zip(asked, answers, strict=True):
        assert answer.status == 200
        got, alone = token_ids(answer.body), await mooncake.fresh(new, path, body)
        begun = events(answer.body)[0]
        prompt = begun.get("prompt_token_ids") or begun["choices"][0]["prompt_token_ids"]
        await mooncake.check_same(new, prompt, got, alone)
        assert usage(answer.body)["completion_tokens"] == TOKENS
        assert len({event["id"] for event in events(answer.body)}) == 1
    cut_at = sorted(row["tokens_kept"] for row in rows)
    assert len(set(cut_at)) > 1
    figure(f"streams whose engine was {how}: {count} of {count} token for token, cut at {cut_at}")
    await mooncake.at_rest()
