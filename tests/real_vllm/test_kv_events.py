"""Predicted hits by the KV events of real engines, block by block."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import orjson
import pytest

from bench.measuring.processes import free_ports
from proxy.core.kvcache.published import PublishedBlocks
from proxy.fleet import kv_events
from tests.real_vllm.conversations import Conversation
from tests.real_vllm.engines.fleet import (
    BLOCK_TOKENS,
    KV_BYTES_PER_TOKEN,
    MODEL,
    Engine,
    Site,
    running,
)
from tests.real_vllm.rig import SLOW
from tests.real_vllm.tap import Tap
from tests.support.harness import ServedProxy, until
from tests.support.rollouts import Rollout, blocks_off

REQUESTS, SESSIONS = 300, 12
SMALL_KV_BYTES = 2 << 20
MOST_TOKENS, MOST_MESSAGES = 3000, 14
"""A session that is longer begins anew: the context of these engines ends at 4096."""
RESTART_AT, DROPS_AT = 200, (60, 140, 260)
MOST_OFF = 0.01
PUBLISHER = {"enable_kv_cache_events": True, "publisher": "zmq"}


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    port, replay_port = free_ports(2)
    return port, replay_port


@pytest.fixture(scope="module")
def publishing(site: Site, ports: tuple[int, int]) -> Iterator[Engine]:
    """An engine whose KV holds 8192 tokens."""
    at = {"endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}"}
    flags = ("--kv-cache-memory-bytes", str(SMALL_KV_BYTES), "--max-model-len", "4096")
    told = orjson.dumps(PUBLISHER | at | {"topic": "kv@tiny"}).decode()
    engine = Engine(site, "events", "none", (*flags, "--kv-events-config", told))
    with running([engine]):
        yield engine


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("LOOK_S", "PAUSE_S", "MOST_PAUSE_S", "ASK_S"):
        monkeypatch.setattr(kv_events, pause, 0.1)


async def followed(proxy: ServedProxy) -> PublishedBlocks:
    """The engine's published blocks, once its events come."""
    name = proxy.settings.instances[0].name
    published = proxy.router.known.published
    ranks: Callable[[], dict[int, PublishedBlocks]] = lambda: published.ranks(name)  # noqa: E731
    await until(lambda: 0 in ranks() and ranks()[0].is_live, "its events come", 120.0)
    return ranks()[0]


def rollout(name: str) -> Rollout:
    body = {"model": MODEL}
    return Rollout(name, 400, (20, 200), 32, low=300, high=4000, body=body)


async def test_every_block_is_known_through_evictions_drops_and_a_restart(
    tmp_path: Path,
    publishing: Engine,
    ports: tuple[int, int],
    figure: Callable[[str], None],
) -> None:
    """300 requests of conversations that do not fit together: 99 % of them are not a block off."""
    engine, pick = publishing, random.Random(11)
    talks = [rollout(f"k{i}") for i in range(SESSIONS)]
    async with Tap(ports[0]) as tap:
        at = f"tcp://{{host}}:{tap.port};replay={ports[1]}"
        given = [f"{engine.name}={engine.url}"]
        options = SLOW | {"kv_connector": "none", "kv_events": at}
        async with ServedProxy(tmp_path / "log.jsonl", given, **options) as proxy:
            await proxy.up()
            is_up = partial(proxy.router.known.fleet.is_up, engine.name)
            blocks = await followed(proxy)
            for number in range(REQUESTS):
                if number in DROPS_AT:
                    tap.cut()
                if number == RESTART_AT:
                    engine.kill()
                    engine.start()
                    await asyncio.to_thread(engine.wait)
                    await until(is_up, "it is back", 60.0)
                await followed(proxy)
                place = pick.randrange(3 if pick.random() < 0.6 else SESSIONS)
                if len(talks[place].ids) > MOST_TOKENS:
                    talks[place] = rollout(f"k{place}-{number}")
                await talks[place].turn(proxy)
            records = await proxy.records(REQUESTS)
            await proxy.at_rest()
            most_blocks = SMALL_KV_BYTES // KV_BYTES_PER_TOKEN // BLOCK_TOKENS
            assert (blocks.is_whole, blocks.restarts) == (True, 1)
            assert (blocks.lost_gaps, blocks.malformed) == (0, 0)
            assert 0 < len(blocks) <= most_blocks
    off = [blocks_off(record, BLOCK_TOKENS) for record in records]
    wrong = sum(map(bool, off))
    cached = sum(r["cached_tokens"] for r in records) / sum(r["prompt_tokens"] for r in records)
    figure(
        f"KV events, 2 MB of KV, {len(DROPS_AT)} drops, a restart: {wrong} of {REQUESTS} "
        f"predictions off (by {max(off)} blocks at most), {cached:.0%} cached, "
        f"{blocks.removed_blocks} evictions"
    )
    assert wrong <= MOST_OFF * REQUESTS
    assert 0 < cached < 1


async def test_an_engine_says_where_its_events_are(tmp_path: Path, publishing: Engine) -> None:
    """What it has cached before the proxy came is known by its replay."""
    given, talk = [f"{publishing.name}={publishing.url}"], rollout("auto")
    records = []
    for at in range(2):
        log = tmp_path / f"log-{at}.jsonl"
        async with ServedProxy(log, given, **SLOW | {"kv_connector": "none"}) as proxy:
            await proxy.up()
            blocks = await followed(proxy)
            assert blocks.is_whole
            await talk.turn(proxy)
            records += await proxy.records(1)
    assert [blocks_off(record, BLOCK_TOKENS) for record in records] == [0, 0]
    assert records[1]["cached_tokens"] > 0


async def test_conversations_in_text_by_their_earlier_turns(
    tmp_path: Path, publishing: Engine, figure: Callable[[str], None]
) -> None:
    """300 requests of conversations that do not fit together; the first turn of each is not told.

    What a random model says is not always cut into the same tokens when it comes back; so its
    engine is asked what it is cut into.
    """
    given, pick = [f"{publishing.name}={publishing.url}"], random.Random(12)
    talks = [Conversation(f"c{i}", 200, (20, 60)) for i in range(SESSIONS)]
    firsts = []
    log = tmp_path / "log.jsonl"
    async with ServedProxy(log, given, **SLOW | {"kv_connector": "none"}) as proxy:
        await proxy.up()
        await followed(proxy)
        for number in range(REQUESTS):
            place = pick.randrange(3 if pick.random() < 0.6 else SESSIONS)
            if len(talks[place].messages) > MOST_MESSAGES:
                talks[place] = Conversation(f"c{place}-{number}", 200, (20, 60))
            firsts.append(not talks[place].messages)
            await talks[place].turn(proxy)
        records = await proxy.records(REQUESTS)
        await proxy.at_rest()
    told = [r for r, is_first in zip(records, firsts, strict=True) if not is_first]
    off = [abs(r["hit_tokens"] - r["cached_tokens"]) / BLOCK_TOKENS for r in told]
    wrong = sum(map(bool, off))
    share = sum(r["cached_tokens"] for r in told) / sum(r["prompt_tokens"] for r in told)
    figure(
        f"KV events, text: {wrong} of {len(told)} predictions off (by {max(off):g} blocks at most, "
        f"{sum(off) / len(off):.3f} on average), {share:.0%} cached"
    )
    assert wrong <= MOST_OFF * len(told)
