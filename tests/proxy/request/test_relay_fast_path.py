"""A stream whose events come one by one: they are passed on without the relay, and counted."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from proxy.request.relay import Relay
from tests.scenarios.test_disconnect import send
from tests.support.harness import (
    STREAM_HEAD,
    RawEngine,
    ServedProxy,
    apart,
    chat,
    chunk,
    event,
    until,
)

EVENTS = 60
END = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % EVENTS


def relays_of(proxy: ServedProxy) -> list[Any]:
    pool = proxy.server.state.instances.by_name[proxy.settings.instances[0].name]._pool
    sinks = [c._reply.sink for c in pool._open if c._reply is not None]
    return [relay for sink in sinks if isinstance(relay := getattr(sink, "__self__", None), Relay)]


async def test_most_events_pass_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    take = Relay._piece

    def watched(self: Relay, wire: bytes) -> None:
        seen.append(wire)
        take(self, wire)

    monkeypatch.setattr(Relay, "_piece", watched)
    late: list[int] = []
    at_head: list[int] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        await until(lambda: any(c._reply.has_begun for c in asked(proxy)), "the head is read")
        at_head.append(tell(proxy))
        told = []
        for number in range(EVENTS):
            await apart(writer, [chunk(event(f"w{number}"))], 0.001)
            if len(asked(proxy)) == 1:  # no probe beside it
                told.append(tell(proxy))
        # After a pause, as of a busy machine, the kernel acknowledges some at once by itself.
        late.append(min(told))
        writer.write(chunk(END) + b"0\r\n\r\n")

    def asked(proxy: ServedProxy) -> list[Any]:
        pool = proxy.server.state.instances.by_name[proxy.settings.instances[0].name]._pool
        return [c for c in pool._open if c._reply]

    def tell(proxy: ServedProxy) -> int:
        (sock,) = [c._transport.get_extra_info("socket") for c in asked(proxy)]
        return int(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK))

    async with RawEngine(script) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            answer = await proxy.post(chat("x"))
            said = b"".join(event(f"w{i}") for i in range(EVENTS))
            assert answer.body == said + END
            await proxy.at_rest()
            (record,) = await proxy.records(1)
            assert (record["outcome"], record["osl_tokens"]) == ("ok", EVENTS)
            assert len(seen) < EVENTS / 2, "the first, the last, and one in sixteen"
            await proxy.post(chat("x"))
            assert late == [0, 0], "acknowledged every other time"
            assert at_head == [1, 1], "on a kept connection too, the head is not kept waiting"


async def test_a_reader_that_stalls_between_single_events(tmp_path: Path) -> None:
    body = event("x" * 3500)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while True:
            writer.write(chunk(body))
            await writer.drain()
            await asyncio.sleep(0)

    async with RawEngine(script) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            writer = await send(proxy, chat("x"))
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: len(relays_of(proxy)) == 1, "the stream has begun")
            (relay,) = relays_of(proxy)
            sock = relay.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            await until(lambda: relay.is_paused, "its instance waits for it")
            assert relay.transport.get_write_buffer_size() < 256 << 10
            writer.transport.abort()
            await proxy.at_rest()
            await until(lambda: proxy.connections() == 0, "no upstream connection in use")
