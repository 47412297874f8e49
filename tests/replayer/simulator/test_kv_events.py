"""What an engine publishes is what its cache does; who asks gets what was missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.net.kv_events.zmtp import Channel
from replayer.engine.engine import Engine
from replayer.engine.kvcache import CacheChange
from replayer.simulator.kv_events import Publisher, _events
from tests.support.harness import until
from tests.support.jobs import SMALL, finish, make_job


def told(changes: Sequence[CacheChange]) -> list[dict[str, Any]]:
    return [event for change in changes for event in _events(change, SMALL.block_size)]


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 100), st.integers(1, 60)),
        min_size=1,
        max_size=12,
    )
)
def test_the_events_are_the_cache(jobs: list[tuple[int, int, int]]) -> None:
    """Whoever applies them has the pool's cached blocks, each behind its parent."""
    engine = Engine(SMALL)
    engine.pool.journal = []
    held: set[int] = set()
    for number, (chain, prompt, output) in enumerate(jobs):
        engine.submit(make_job(f"j{number}", prompt, output, chain=chain), engine._clock_s)
        if number % 2:
            finish(engine, engine._clock_s)
        for event in told(engine.pool.journal):
            names = event["block_hashes"]
            if event["type"] == "BlockRemoved":
                held -= set(names)
                continue
            assert held.isdisjoint(names)
            chained = [event["parent_block_hash"], *names]
            for parent, name in zip(chained, names, strict=False):
                assert parent is None if name % 10_000 == 0 else parent == name - 1
            held |= set(names)
        engine.pool.journal = []
        assert held == set(engine.pool._refs)


@asynccontextmanager
async def publishing() -> AsyncIterator[tuple[Publisher, int, int]]:
    async with asyncio.TaskGroup() as tasks:
        publisher = Publisher(tasks, 4, "kv")
        port, replay_port = await publisher.listen("127.0.0.1", 0, 0)
        try:
            yield publisher, port, replay_port
        finally:
            publisher.close()


async def heard(channel: Channel, count: int) -> list[list[bytes]]:
    come: list[list[bytes]] = []
    while len(come) < count:
        come += await channel.messages()
    return come


async def test_a_subscriber_gets_what_follows_and_a_replay_what_was_before() -> None:
    change = CacheChange([7, 8])
    async with publishing() as (publisher, port, replay_port):
        publisher.publish([change], 1.5)
        publisher.publish([], 2.0)  # nothing has changed: no batch
        channel = await Channel.open("127.0.0.1", port, "SUB", "PUB")
        await channel.send(b"\x01")
        await until(lambda: publisher._subscribers, "it is subscribed")
        publisher.publish([change], 2.5)
        ((topic, number, payload),) = await heard(channel, 1)
        assert (topic, int.from_bytes(number, "big")) == (b"kv", 1)
        t, events, rank = msgspec.msgpack.decode(payload)
        assert (t, rank) == (2.5, 0)
        assert [e["block_hashes"] for e in events] == [[7], [8]]
        asked = await Channel.open("127.0.0.1", replay_port, "DEALER", "ROUTER")
        for first, expected in ((0, [0, 1, 2**64 - 1]), (1, [1, 2**64 - 1]), (2, [2**64 - 1])):
            await asked.send(b"", first.to_bytes(8, "big"))
            come = await heard(asked, len(expected))
            assert [int.from_bytes(m[-2], "big") for m in come] == expected
        channel.close()
        asked.close()
