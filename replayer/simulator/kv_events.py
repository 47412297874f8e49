"""The KV events of a simulated engine, as vLLM publishes them: ZeroMQ over TCP, and a replay.

Subscribers get each batch as `[topic, number, payload]`; the payload is MessagePack, an event an
object with a type, as in vLLM from 0.26 on. At the replay port a number is answered with the
batches from there on, as far as they are kept, and an end. Only what these two sockets need of ZMTP
3.0 (ZeroMQ RFC 23) is here.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import msgspec

from replayer.engine.kvcache import CacheChange
from replayer.engine.types import SimRequest

log = logging.getLogger(__name__)
KEPT_BATCHES = 10_000
"""vLLM's default of buffer_steps."""
_MOST_WAITING = 32 << 20
"""A subscriber that takes less than this loses batches, as at ZeroMQ's high-water mark, bytes."""
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4
_END = (1 << 64) - 1
_SHORT = 255
_MOST_FRAME = 1 << 20
Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Publisher:
    """One engine's publisher and replay socket; its batches are numbered from 0.

    `tasks`: where each connection is served.
    """

    def __init__(self, tasks: asyncio.TaskGroup, block_size: int, topic: str = "") -> None:
        self._tasks = tasks
        self._block_size = block_size
        self.topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._next = 0
        self._subscribers: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self._servers: list[asyncio.Server] = []

    async def listen(self, host: str, port: int, replay_port: int) -> tuple[int, int]:
        """Listen at both ports (0: the kernel chooses) and return them; OSError if one is taken."""
        return (
            await self._serve(host, port, b"PUB", self._feed),
            await self._serve(host, replay_port, b"ROUTER", self._answer),
        )

    async def _serve(
        self, host: str, port: int, kind: bytes, serve: Callable[[Streams], Awaitable[None]]
    ) -> int:
        async def one(streams: Streams) -> None:
            writer = streams[1]
            self._open.add(writer)
            try:
                await _greet(streams, kind)
                await serve(streams)
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                log.debug("KV events: a connection has ended: %s", error)
            finally:
                self._open.discard(writer)
                self._subscribers.discard(writer)
                writer.close()

        def begun(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._tasks.create_task(one((reader, writer)))

        server = await asyncio.start_server(begun, host, port)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _feed(self, streams: Streams) -> None:
        """Serve a subscriber: what it sends are subscriptions, for any topic here."""
        while await _message(streams[0]):
            self._subscribers.add(streams[1])

    async def _answer(self, streams: Streams) -> None:
        """Answer questions for the batches from a number on."""
        reader, writer = streams
        while parts := await _message(reader):
            first = int.from_bytes(parts[-1], "big")
            for number, payload in list(self._kept):
                if number >= first:
                    writer.write(_frames([b"", self.topic, number.to_bytes(8, "big"), payload]))
                    await writer.drain()
            writer.write(_frames([b"", b"", _END.to_bytes(8, "big"), b""]))
            await writer.drain()

    def publish(self, changes: Sequence[CacheChange], t: float) -> None:
        """Publish what has changed in the cache, as one batch made at `t`, unix seconds."""
        events = [event for change in changes for event in _events(change, self._block_size)]
        if events:
            self._send(events, t)

    def _send(self, events: list[dict[str, Any]], t: float) -> None:
        number, payload = self._next, msgspec.msgpack.encode([t, events, 0])
        self._next += 1
        self._kept.append((number, payload))
        batch = _frames([self.topic, number.to_bytes(8, "big"), payload])
        for writer in self._subscribers:
            if writer.transport.get_write_buffer_size() < _MOST_WAITING:
                writer.write(batch)

    def drop_subscribers(self) -> None:
        """Cut every connection, as a network may."""
        for writer in list(self._open):
            writer.transport.abort()

    def close(self) -> None:
        """Stop listening and cut every connection."""
        for server in self._servers:
            server.close()
        self.drop_subscribers()


def _events(change: CacheChange, block_size: int) -> Iterator[dict[str, Any]]:
    """vLLM's events of a change: one per run of new blocks, or per evicted block."""
    if not isinstance(change.owner, SimRequest):
        for value in change.values:
            yield {"type": "BlockRemoved", "block_hashes": [value], "medium": "GPU", "group_idx": 0}
        return
    at = change.start
    for is_new, values in groupby(change.values, change.new.__contains__):
        run = list(values)
        if is_new:
            yield _stored(change.owner, at, run, block_size)
        at += len(run)


def _stored(owner: SimRequest, first: int, run: list[int], block_size: int) -> dict[str, Any]:
    ids = owner.job.token_ids
    return {
        "type": "BlockStored",
        "block_hashes": run,
        "parent_block_hash": owner.hashes[first - 1] if first else None,
        "token_ids": ids(first * block_size, (first + len(run)) * block_size) if ids else [],
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


async def _greet(streams: Streams, kind: bytes) -> None:
    """Exchange greetings and READY; any peer is taken."""
    reader, writer = streams
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    writer.write(_GREETING + bytes((_COMMAND, len(ready))) + ready)
    await reader.readexactly(len(_GREETING))


async def _message(reader: asyncio.StreamReader) -> list[bytes]:
    """The next message; commands are passed over. ValueError for a frame that is too long."""
    parts: list[bytes] = []
    while True:
        flags, size = await reader.readexactly(2)
        if flags & _LONG:
            size = int.from_bytes(bytes((size,)) + await reader.readexactly(7), "big")
        if size > _MOST_FRAME:
            raise ValueError("a frame is too long")
        body = await reader.readexactly(size)
        if not flags & _COMMAND:
            parts.append(body)
            if not flags & _MORE:
                return parts


def _frames(parts: list[bytes]) -> bytes:
    """A message as bytes."""
    made = []
    for at, part in enumerate(parts):
        flags = _MORE if at < len(parts) - 1 else 0
        if len(part) > _SHORT:
            made += [bytes((flags | _LONG,)), len(part).to_bytes(8, "big"), part]
        else:
            made += [bytes((flags, len(part))), part]
    return b"".join(made)
