"""Hits by KV events: exact, through evictions, a dropped subscription, a restart and gaps."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.core.kvcache.published import Cleared, PublishedBlocks, Stored
from proxy.core.kvcache.published_index import Ended
from proxy.fleet import kv_events
from proxy.net.kv_events.batches import Batch
from proxy.net.kv_events.sources import Source
from proxy.request import exchange
from replayer.engine.kvcache import BlockPool
from replayer.simulator.host import SimEngine, SimFleet
from replayer.simulator.kv_events import _frames
from replayer.simulator.metrics import EngineMetrics
from tests.support.harness import (
    WAIT_S,
    RawEngine,
    ServedProxy,
    addresses,
    chat,
    plain,
    until,
    words,
)
from tests.support.rollouts import COMPLETIONS, Rollout, blocks_off

BLOCK = 16
SMALL = {"num_gpu_blocks": 301, "max_model_len": 4096}
"""KV for 4800 tokens, so that most of what is cached is evicted soon."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts, which stand for an engine's start, are none."""
    for pause in ("LOOK_S", "PAUSE_S", "MOST_PAUSE_S", "ASK_S"):
        monkeypatch.setattr(kv_events, pause, 0.01)


def blocks_of(proxy: ServedProxy, at: int = 0) -> PublishedBlocks | None:
    """The published blocks of an instance; None while its events are not followed."""
    name = proxy.settings.instances[at].name
    found: PublishedBlocks | None = proxy.router.known.published.ranks(name).get(0)
    return found


async def known(proxy: ServedProxy, engine: SimEngine, at: int = 0) -> PublishedBlocks:
    """The published blocks, once they are those that the engine has."""

    def is_known() -> bool:
        blocks = blocks_of(proxy, at)
        held = engine.driver.engine.pool._refs
        return (
            blocks is not None
            and blocks.is_live
            and len(blocks) == len(held)
            and all(name in blocks for name in held)
        )

    await until(is_known, "what is published is what is held")
    blocks = blocks_of(proxy, at)
    assert blocks is not None
    return blocks


@asynccontextmanager
async def followed(
    tmp_path: Path, *, engines: int = 1, sim: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[ServedProxy, SimFleet]]:
    """A proxy that follows the events of simulated engines."""
    given = {"speed": 50.0, "tick": 0.0, "kv_events_port": 0} | (sim or {})
    async with SimFleet(engines, **given) as fleet:
        async with ServedProxy(tmp_path / "log.jsonl", addresses(fleet), **options) as proxy:
            await proxy.up()
            if options.get("kv_events") != "off":
                for at, engine in enumerate(fleet.engines):
                    await known(proxy, engine, at)
            yield proxy, fleet


async def off_by(proxy: ServedProxy, count: int) -> list[int]:
    """How far each prediction was off, in blocks."""
    return [blocks_off(record, BLOCK) for record in await proxy.records(count)]


async def beside(engine: SimEngine, seed: int, tokens: int = 1600) -> None:
    """A request past the proxy."""
    pick = random.Random(seed)
    body = {"prompt": [pick.randrange(5000, 6000) for _ in range(tokens)], "max_tokens": 20}
    async with aiohttp.ClientSession() as http, http.post(engine.url + COMPLETIONS, json=body) as a:
        assert a.status == 200


async def test_every_prediction_is_exact_while_blocks_are_evicted(tmp_path: Path) -> None:
    """Sessions that do not fit together, with requests of others in between."""
    talks = [Rollout(f"r{i}") for i in range(5)]
    pick = random.Random(3)
    async with followed(tmp_path, sim=SMALL) as (proxy, fleet):
        (engine,) = fleet.engines
        blocks = await known(proxy, engine)
        for turn in range(40):
            talk = pick.choice(talks[:2] if pick.random() < 0.6 else talks)
            if len(talk.ids) < 3000:
                await talk.turn(proxy)
            if turn % 7 == 6:
                await beside(engine, turn, 640)
            await known(proxy, engine)
        asked = sum(talk.turns for talk in talks)
        assert set(await off_by(proxy, asked)) == {0}
        records = await proxy.records(asked)
        assert sum(r["cached_tokens"] for r in records) > 0
        assert engine.driver.engine.pool.evicted_blocks == blocks.removed_blocks > 100
        assert (blocks.gaps, blocks.restarts, blocks.malformed) == (0, 0, 0)


async def test_an_engine_that_tells_no_size_has_that_of_its_evictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other engines than vLLM, whose metrics have other names."""
    monkeypatch.setattr(EngineMetrics, "render", lambda _: b"other_metric 1\n")
    async with followed(tmp_path, sim=SMALL) as (proxy, fleet):
        (engine,) = fleet.engines
        for seed in range(4):
            await beside(engine, seed)
        blocks = await known(proxy, engine)
        name = proxy.settings.instances[0].name
        state = proxy.router.known.fleet.states[name]
        # Sizes are looked at now and then: the first look may have come amid the evictions.
        await until(lambda: state.assumed_kv_tokens == blocks.full_blocks * BLOCK, "its size")
        assert state.kv_tokens is None, "no threshold goes by what nobody reported"
        assert 200 < blocks.full_blocks <= SMALL["num_gpu_blocks"]


async def test_a_dropped_subscription_is_made_good(tmp_path: Path) -> None:
    """What happened meanwhile is asked for; nothing else is wrong."""
    talk = Rollout("a")
    async with followed(tmp_path) as (proxy, fleet):
        (engine,) = fleet.engines
        blocks = await known(proxy, engine)
        for seed in range(3):
            await talk.turn(proxy)
            await known(proxy, engine)
            engine.publisher.drop_subscribers()
            await beside(engine, seed)
            await known(proxy, engine)
        await talk.turn(proxy)
        assert await off_by(proxy, talk.turns) == [0] * talk.turns
        assert (blocks.is_whole, blocks.restarts, blocks.lost_gaps) == (True, 0, 0)


async def test_batches_that_are_lost_on_the_way_are_asked_for(tmp_path: Path) -> None:
    """As beyond a publisher's high-water mark; the next one shows that they are missing."""
    async with followed(tmp_path) as (proxy, fleet):
        (engine,) = fleet.engines
        subscribers = engine.publisher._subscribers
        await until(lambda: subscribers, "subscribed")
        blocks = await known(proxy, engine)
        for seed in (0, 2):
            deaf = set(subscribers)
            subscribers.clear()
            await beside(engine, seed)
            subscribers |= deaf
            await beside(engine, seed + 1)
            await known(proxy, engine)
        assert (blocks.gaps, blocks.lost_gaps, blocks.is_whole) == (2, 0, True)


async def test_a_batch_that_cannot_be_read_empties_the_set(tmp_path: Path) -> None:
    """Until the engine has restarted: what it holds is known again then."""
    async with followed(tmp_path) as (proxy, fleet):
        (engine,) = fleet.engines
        await beside(engine, 0)
        blocks = await known(proxy, engine)
        publisher = engine.publisher
        number, publisher._next = publisher._next, publisher._next + 1
        for writer in publisher._subscribers:
            writer.write(_frames([b"", number.to_bytes(8, "big"), b"no MessagePack"]))
        await until(lambda: blocks.malformed, "it has come")
        assert (len(blocks), blocks.is_whole) == (0, False)
        await engine.restart()
        await beside(engine, 1)
        await known(proxy, engine)
        assert (blocks.is_whole, blocks.malformed) == (True, 1)


async def test_a_restarted_engine_has_nothing(tmp_path: Path) -> None:
    talk = Rollout("a")
    async with followed(tmp_path) as (proxy, fleet):
        (engine,) = fleet.engines
        for _ in range(2):
            await talk.turn(proxy)
        blocks = await known(proxy, engine)
        await engine.restart()
        await beside(engine, 1)
        assert await known(proxy, engine) is blocks
        assert (blocks.restarts, blocks.is_whole) == (1, True)
        name = proxy.settings.instances[0].name
        await until(lambda: proxy.router.known.fleet.is_up(name), "it serves again")
        for _ in range(2):
            await talk.turn(proxy)
            await known(proxy, engine)
        assert await off_by(proxy, 4) == [0] * 4
        assert [r["cached_tokens"] > 0 for r in await proxy.records(4)] == [False, True] * 2


async def test_what_was_cached_before_the_proxy_came(tmp_path: Path) -> None:
    async with SimFleet(1, speed=50.0, tick=0.0, kv_events_port=0) as fleet:
        (engine,) = fleet.engines
        talk, again = Rollout("a"), Rollout("a")
        records = []
        for path, one in (("first", talk), ("second", again)):
            async with ServedProxy(tmp_path / path, addresses(fleet)) as proxy:
                await proxy.up()
                blocks = await known(proxy, engine)
                assert blocks.is_whole
                await one.turn(proxy)
                records += await proxy.records(1)
    assert [blocks_off(record, BLOCK) for record in records] == [0, 0]
    assert records[1]["cached_tokens"] == (records[1]["prompt_tokens"] - 1) // BLOCK * BLOCK


async def test_without_a_replay_a_gap_empties_the_set_until_it_is_whole_again(
    tmp_path: Path,
) -> None:
    """Hits are predicted as without events, and it is said."""
    async with SimFleet(1, speed=50.0, tick=0.0, kv_events_port=0) as fleet:
        (engine,) = fleet.engines
        at = f"tcp://{{host}}:{engine.kv_events_port}"
        log = tmp_path / "log"
        async with ServedProxy(log, addresses(fleet), kv_events=at) as proxy:
            await proxy.up()
            await until(lambda: (b := blocks_of(proxy)) is not None and b.is_live, "subscribed")
            await beside(engine, 0)
            blocks = await known(proxy, engine)
            assert blocks.is_whole
            talk = Rollout("a")
            await talk.turn(proxy)
            await known(proxy, engine)
            engine.publisher.drop_subscribers()
            await until(lambda: blocks.lost_gaps == 1 and blocks.is_live, "it is back")
            assert (len(blocks), blocks.is_whole) == (0, False)
            await talk.turn(proxy)
            second = (await proxy.records(2))[1]
            assert second["hit_tokens"] > 0, "as without events"


async def test_events_can_be_off_and_an_engine_may_have_none(tmp_path: Path) -> None:
    async with followed(tmp_path, kv_events="off") as (proxy, _):
        await Rollout("a").turn(proxy)
        assert blocks_of(proxy) is None
    async with followed(tmp_path, sim={"kv_events_port": None}, kv_events="off") as (proxy, _):
        await Rollout("a").turn(proxy)
        async with proxy.http.get("/health") as answer:
            (instance,) = (await answer.json())["instances"].values()
        assert instance["warnings"] == []


async def test_an_instance_that_leaves_is_not_followed_any_more(tmp_path: Path) -> None:
    async with followed(tmp_path, engines=2) as (proxy, fleet):
        name = proxy.settings.instances[1].name
        subscribers = fleet.engines[1].publisher._subscribers
        assert subscribers
        async with proxy.http.delete(f"/instances/{name}") as answer:
            assert answer.status == 200
        await until(lambda: not subscribers, "its subscription has ended")
        assert list(proxy.router.known.published.all()) == [proxy.settings.instances[0].name]


async def test_ranks_that_are_told_of_no_more_are_forgotten(tmp_path: Path) -> None:
    """An engine tells of 64 other ranks at each question, and of none at last."""
    first, asked, is_over = [0], [0], [False]

    async def sources(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked[0] += 1
        ranks = range(first[0], first[0] + 64)
        first[0] += 64
        told = {str(rank): {"endpoint": f"tcp://*:{port}"} for rank in ranks}
        writer.write(plain(orjson.dumps({} if is_over[0] else told)))

    async with RawEngine() as engine:
        engine.gets["/kv_event_sources"] = sources
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, ServedProxy(tmp_path / "log.jsonl", [engine.address]) as proxy:
            await proxy.up()
            name = proxy.settings.instances[0].name
            ranks = proxy.router.known.published.ranks
            await until(lambda: first[0] >= 6 * 64, "it was asked some times")
            assert len(ranks(name)) <= 64
            tasks = [t for t in asyncio.all_tasks() if "_follow_rank" in str(t.get_coro())]
            assert len(tasks) <= 64
            assert min(ranks(name), default=1 << 20) >= 64, "the first ones are forgotten"
            is_over[0] = True
            await until(lambda: not ranks(name), "none is told of")
            assert asked[0] < 100, "one question for all ranks"


async def test_what_does_not_come_is_said(tmp_path: Path) -> None:
    """An address where something else listens, and one that is no port for this instance."""
    async with SimFleet(1, speed=50.0, tick=0.0) as fleet:
        for at, why in (
            ("{port}", "the peer does not speak ZMTP"),
            ("{port+65535}", "not within 1 to"),
        ):
            given = addresses(fleet)
            async with ServedProxy(tmp_path / "l", given, kv_events="tcp://{host}:" + at) as proxy:
                await proxy.up()
                told = proxy.server.state.instances.warnings
                name = proxy.settings.instances[0].name
                await until(lambda: "KV events" in told.get(name, {}), "a warning")  # noqa: B023
                assert why in told[name]["KV events"]


async def test_instances_and_metrics_show_the_events(tmp_path: Path) -> None:
    async with followed(tmp_path) as (proxy, fleet):
        await Rollout("a").turn(proxy)
        blocks = await known(proxy, fleet.engines[0])
        async with proxy.http.get("/instances") as answer:
            (instance,) = await answer.json()
        (told,) = instance["kv_events"]
        assert (told["rank"], told["is_live"], told["is_whole"]) == (0, True, True)
        assert told["is_believed"]
        assert (told["blocks"], told["block_tokens"]) == (blocks.copies, BLOCK)
        labels = {"upstream": proxy.settings.instances[0].name, "rank": "0"}
        proxy.server.state.collector.at(proxy.server.state.clock.now_s())
        assert proxy.metric("kv_events_live", **labels) == 1
        assert proxy.metric("kv_events_whole", **labels) == 1
        assert proxy.metric("kv_events_believed", upstream=labels["upstream"]) == 1
        assert proxy.metric("kv_event_blocks", **labels) == blocks.copies
        assert proxy.metric("kv_event_batches_total", **labels) == blocks.batches > 0
        assert 0 <= proxy.metric("kv_events_age_seconds", **labels) < 60
        assert abs(proxy.metric("kv_events_lag_seconds", **labels)) < 60


class Talk:
    """A conversation in text; each turn brings back all that was said."""

    def __init__(self, name: str, system: str = "") -> None:
        self.name, self.turns = name, 0
        self.messages = [{"role": "system", "content": system}] if system else []

    async def turn(self, proxy: ServedProxy, count: int = 150) -> None:
        said = words(count, f"{self.name}{self.turns}x")
        self.messages.append({"role": "user", "content": said})
        body = chat("", max_tokens=40) | {"messages": self.messages}
        answer = await proxy.post(body, headers={"X-Session-ID": self.name})
        self.turns += 1
        self.messages.append({"role": "assistant", "content": answer.text})


@pytest.mark.parametrize("wait_s", [WAIT_S, 1e-9], ids=["compared", "not compared"])
async def test_prompts_of_text_are_found_by_their_earlier_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    """From a session's second turn on, through evictions, requests of others, and a restart.

    Answers come back as they were said here, whether or not the engine says so in time.
    """
    monkeypatch.setattr(exchange, "TOKENIZE_S", wait_s)
    talks = [Talk(f"t{i}") for i in range(5)]
    pick = random.Random(5)
    async with followed(tmp_path, sim=SMALL) as (proxy, fleet):
        (engine,) = fleet.engines
        name = proxy.settings.instances[0].name
        first = []
        for turn in range(40):
            place = pick.randrange(2 if pick.random() < 0.6 else 5)
            if talks[place].turns > 5:
                talks[place] = Talk(f"t{place}-{turn}")
            first.append(not talks[place].turns)
            if turn == 25:
                await engine.restart()
                await until(lambda: proxy.router.known.fleet.is_up(name), "it serves again")
                await known(proxy, engine)
            await talks[place].turn(proxy)
            if turn % 7 == 6:
                await beside(engine, turn, 640)
            await known(proxy, engine)
        records = await proxy.records(40)
    later = [r for r, is_first in zip(records, first, strict=True) if not is_first]
    assert sum(bool(r["cached_tokens"]) for r in later) > 10
    assert [r["hit_tokens"] - r["cached_tokens"] for r in later] == [0] * len(later)


async def test_a_turn_whose_client_left_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    """Its usage never came, so nothing tells where it is in what is published."""
    talk = Talk("a")
    async with followed(tmp_path) as (proxy, fleet):
        (engine,) = fleet.engines
        await talk.turn(proxy)
        # As many bytes per token as the first turn had: they are learned from that one only.
        talk.messages.append({"role": "user", "content": words(800, "b0x")})
        body = chat("", max_tokens=5000, stream=True) | {"messages": talk.messages}
        name = {"X-Session-ID": talk.name}
        async with proxy.http.post("/v1/chat/completions", json=body, headers=name) as answer:
            await answer.content.readany()
        await until(lambda: not engine.driver.engine.running, "it was left")
        await known(proxy, engine)
        await talk.turn(proxy, 20)
        first, left, last = await proxy.records(3)
    assert left["outcome"] == "client_gone"
    assert last["cached_tokens"] > 2 * first["prompt_tokens"]
    assert abs(last["hit_tokens"] - last["cached_tokens"]) < 0.1 * last["cached_tokens"]


async def test_a_message_that_grows_counts_as_far_as_it_was_there(tmp_path: Path) -> None:
    """As notes that each request brings back in one message; events know where messages end."""
    system = {"role": "system", "content": words(100, "system")}
    notes = ""
    async with followed(tmp_path) as (proxy, fleet):
        for at in range(5):
            notes += words(300, f"note{at}") + " "
            said = [system, {"role": "user", "content": notes}]
            await proxy.post(chat("", max_tokens=10) | {"messages": said})
            await known(proxy, fleet.engines[0])
        *_, last = await proxy.records(5)
    assert last["cached_tokens"] > 0.7 * last["prompt_tokens"]
    assert abs(last["hit_tokens"] - last["cached_tokens"]) < 0.1 * last["cached_tokens"]


async def test_events_of_another_engine_are_not_believed_for_long(tmp_path: Path) -> None:
    """Two engines on one host, and the port of the first one's events for both."""
    async with SimFleet(2, speed=50.0, tick=0.0, kv_events_port=0) as fleet:
        first = fleet.engines[0]
        at = f"tcp://{{host}}:{first.kv_events_port};replay={first.replay_port}"
        async with ServedProxy(tmp_path / "log.jsonl", addresses(fleet), kv_events=at) as proxy:
            await proxy.up()
            own, others = (one.name for one in proxy.settings.instances)
            published = proxy.router.known.published

            def is_said() -> bool:
                told = proxy.server.state.instances.warnings.get(others, {})
                return any("fewer cached" in text for text in told.values())

            asked = 0
            while published.is_believed(others):
                await beside(first, asked, 640)
                for index in (0, 1):
                    await known(proxy, first, index)
                pick = random.Random(asked)
                prompt = [pick.randrange(5000, 6000) for _ in range(640)]
                answer = await proxy.post({"prompt": prompt, "max_tokens": 2}, COMPLETIONS)
                assert answer.status == 200
                asked += 1
                assert asked < 20, "half of them find nothing"
            assert published.is_believed(own)
            await until(is_said, "it is said")
            await beside(first, 99, 640)
            await known(proxy, first)
            pick = random.Random(99)
            prompt = [pick.randrange(5000, 6000) for _ in range(640)]
            await proxy.post({"prompt": prompt, "max_tokens": 2}, COMPLETIONS)
            (*_, last) = await proxy.records(asked + 1)
            assert last["decode_instance"] == own
            assert last["hit_tokens"] == last["cached_tokens"] > 600


async def test_an_engine_cannot_draw_requests_by_what_it_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four tells of blocks that all prompts begin with, and finds nothing of any."""
    pick = random.Random(1)
    shared = [pick.randrange(5000, 6000) for _ in range(2048)]
    async with followed(tmp_path, engines=4) as (proxy, fleet):
        liar = fleet.engines[-1]
        pool, match = liar.driver.engine.pool, BlockPool.match
        monkeypatch.setattr(
            BlockPool, "match", lambda own, *given: 0 if own is pool else match(own, *given)
        )
        lie: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": list(range(1, 1 + 2048 // BLOCK)),
        }
        lie |= {"parent_block_hash": None, "token_ids": shared, "block_size": BLOCK}
        liar.publisher._send([lie], 0.0)
        blocks = blocks_of(proxy, 3)
        assert blocks is not None
        await until(lambda: len(blocks) >= 2048 // BLOCK, "the lie has come")

        async def client(seed: int) -> None:
            own = random.Random(seed)
            for _ in range(12):
                prompt = shared + [own.randrange(5000, 6000) for _ in range(64)]
                answer = await proxy.post({"prompt": prompt, "max_tokens": 2}, COMPLETIONS)
                assert answer.status == 200

        await asyncio.gather(*(client(seed) for seed in range(4)))
        records = await proxy.records(48)
        name = proxy.settings.instances[3].name
        at_liar = [record for record in records if record["decode_instance"] == name]
        assert len(at_liar) < 24, "a fair share is 12"
        assert at_liar, "it had its chance"
        assert not proxy.router.known.published.is_believed(name)
        others = [one.name for one in proxy.settings.instances[:3]]
        assert all(proxy.router.known.published.is_believed(other) for other in others)


async def test_costly_events_take_turns_with_other_tasks_and_with_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the CPU time that they take; no instance is behind for ever."""
    spent = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: next(spent) * kv_events.TURN_S / 3)
    order: list[str] = []

    async def unasked() -> dict[int, Source]:
        return {}

    async def takes(name: str) -> None:
        blocks = PublishedBlocks()
        blocks.renew(is_whole=True)
        feed = kv_events._Feed(blocks, kv_events._OfInstance(unasked, lambda: 0.0, turn))
        for number in range(20):
            await kv_events._apply(feed, Batch(0.0, [Stored([number], None, 16), Cleared()]))
            order.append(name)

    async def others() -> None:
        while True:
            order.append("other")
            await asyncio.sleep(0)

    turn = kv_events._Turn()
    beside = asyncio.create_task(others())
    await asyncio.gather(takes("a"), takes("b"), takes("c"))
    beside.cancel()
    assert order.count("other") >= 20
    for name in "abc":
        at = [index for index, who in enumerate(order) if who == name]
        assert at[9] < 2 * len(order) / 3, "each is half done before the last third"


async def test_an_answer_is_no_longer_than_its_client_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine may count more, and would have blocks of others taken for its own."""
    told: list[Ended] = []
    async with followed(tmp_path) as (proxy, _):
        monkeypatch.setattr(proxy.router.known.published, "ended", told.append)
        monkeypatch.setattr(exchange, "most_output_tokens", lambda _: 3)
        for is_stream in (False, True):
            body = chat(words(40), stream=is_stream, max_tokens=20)
            assert (await proxy.post(body)).status == 200
        await proxy.records(2)
    assert [ended.output_tokens for ended in told] == [3, 3]
