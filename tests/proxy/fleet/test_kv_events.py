"""What following KV events costs: each publisher pays for all that is done for it, in turns."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path

import pytest

from proxy.core.kvcache.published import Cleared, PublishedBlocks, Stored
from proxy.fleet import kv_events
from proxy.net.kv_events import zmtp
from proxy.net.kv_events.batches import Batch
from proxy.net.kv_events.sources import Source
from tests.support.harness import RawEngine, ServedProxy, until

EMPTY = b"\x93\x00\x90\x00"
"""A batch of no events."""
SENT = 2000


def numbered(number: int, payload: bytes = EMPTY) -> bytes:
    return zmtp.message([number.to_bytes(8, "big"), payload])


FLOODS = {
    "no events": [numbered(n) for n in range(SENT)],
    "malformed": [numbered(n, b"") for n in range(SENT)],
    "one number": [numbered(0)] * SENT,
    "gaps": [numbered(2 * n) for n in range(SENT)],
    "many parts": [zmtp.message([b""] * 14 + [bytes(8), EMPTY])] * SENT,
}


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """All costs that are noted; nothing has to rest for them."""
    noted: list[float] = []
    spend = kv_events._OfInstance.spend

    def note(of_instance: kv_events._OfInstance, cost_s: float) -> None:
        noted.append(cost_s)
        spend(of_instance, cost_s)

    monkeypatch.setattr(kv_events._OfInstance, "spend", note)
    monkeypatch.setattr(kv_events, "BURST_S", 1e9)
    return noted


@pytest.mark.long
@pytest.mark.parametrize("what", FLOODS)
async def test_small_messages_are_paid_for_and_leave_others_their_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spent: list[float], what: str
) -> None:
    loop = asyncio.get_running_loop()
    per_turn: Counter[int] = Counter()
    turn = itertools.count()
    now = [next(turn)]
    batch = kv_events._batch

    def count(message: list[bytes]) -> tuple[int, bytes]:
        per_turn[now[0]] += 1
        return batch(message)

    def tick() -> None:
        now[0] = next(turn)
        loop.call_soon(tick)

    async def publish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(zmtp.GREETING + zmtp.ready("PUB") + b"".join(FLOODS[what]))
        await reader.read(-1)
        writer.close()

    monkeypatch.setattr(kv_events, "_batch", count)
    server = await asyncio.start_server(publish, "127.0.0.1", 0)
    events = f"tcp://{{host}}:{server.sockets[0].getsockname()[1]}"
    async with server, RawEngine() as engine:
        log = tmp_path / "log.jsonl"
        async with ServedProxy(log, [engine.address], kv_events=events) as proxy:
            tick()
            name = proxy.settings.instances[0].name

            def blocks() -> PublishedBlocks | None:
                found: PublishedBlocks | None = proxy.router.known.published.ranks(name).get(0)
                return found

            await until(lambda: (b := blocks()) is not None and b.batches == SENT, "all came")
    # Two turns' worth: one begins before the tick, another one behind it.
    assert max(per_turn.values()) <= 64
    assert sum(spent) >= SENT * (2 * zmtp.FRAME_S + kv_events.MESSAGE_S)
    if what == "malformed":
        assert sum(spent) >= SENT * kv_events.MALFORMED_S


async def test_each_connection_is_paid_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spent: list[float]
) -> None:
    for pause in ("LOOK_S", "PAUSE_S", "MOST_PAUSE_S"):
        monkeypatch.setattr(kv_events, pause, 0.01)
    opened = [0]

    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened[0] += 1
        writer.close()

    server = await asyncio.start_server(leave, "127.0.0.1", 0)
    events = f"tcp://{{host}}:{server.sockets[0].getsockname()[1]}"
    async with server, RawEngine() as engine:
        log = tmp_path / "log.jsonl"
        async with ServedProxy(log, [engine.address], kv_events=events):
            await until(lambda: opened[0] >= 5, "it connects again and again")
    assert sum(spent) >= 5 * kv_events.OPEN_S


async def nothing_to_ask() -> dict[int, Source]:
    return {}


async def test_an_instance_rests_for_all_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a clock that only rests move, its share at most is spent, whoever spends it."""
    now_s = [100.0]

    async def sleep(delay_s: float) -> None:
        now_s[0] += delay_s

    of_instance = kv_events._OfInstance(nothing_to_ask, lambda: now_s[0], kv_events._Turn())
    monkeypatch.setattr(asyncio, "sleep", sleep)
    one_s, payments = 0.0003, 20_000

    async def rank() -> None:
        for _ in range(payments // 4):
            await of_instance.pay(one_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(rank())
    elapsed_s = now_s[0] - 100.0
    most_s = kv_events.SHARE * elapsed_s + kv_events.BURST_S + 4 * one_s
    assert one_s * payments <= most_s + 1e-6
    assert one_s * payments >= kv_events.SHARE * elapsed_s, "no longer than it has to"


async def test_dropped_blocks_are_paid_for(spent: list[float]) -> None:
    """A message of a few bytes may empty a set of a million."""
    blocks = PublishedBlocks()
    feed = kv_events._Feed(
        blocks, kv_events._OfInstance(nothing_to_ask, lambda: 0.0, kv_events._Turn())
    )

    async def clear() -> None:
        await kv_events._apply(feed, Batch(0.0, [Cleared()]))

    async def begin() -> None:
        feed.begin(7)

    async def lose() -> None:
        feed.lose()

    for drop in (clear, begin, lose):
        blocks.apply(Stored(list(range(1000)), None, 16))
        spent.clear()
        await drop()
        assert not len(blocks)
        assert sum(spent) >= 1000 * kv_events.DROP_S
