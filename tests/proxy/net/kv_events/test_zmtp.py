"""ZMTP: any pieces of the bytes, what no ZMTP is, and a connection to a peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.net.kv_events import zmtp
from proxy.net.kv_events.zmtp import GREETING, Channel, Decoder, ZmtpError, command, message, ready
from proxy.net.timeouts import TICK_S

LIBZMQ = bytes.fromhex("ff00000000000000017f0301") + b"NULL".ljust(20, b"\0") + bytes(32)
"""The greeting of libzmq 4.3, which speaks 3.1."""
LIBZMQ_READY = bytes.fromhex("0419055245414459") + b"\x0bSocket-Type\0\0\0\x03PUB"
"""Its READY, of a PUB socket."""
parts = st.lists(
    st.one_of(st.binary(max_size=4), st.binary(min_size=250, max_size=260)), min_size=1
)


def fed(decoder: Decoder, raw: bytes) -> list[list[bytes]]:
    """All messages of these bytes, in as many turns as they take."""
    come = decoder.feed(raw)
    while decoder.is_behind:
        come += decoder.feed()
    return come


@given(st.lists(parts.filter(lambda p: len(p) <= zmtp.MOST_PARTS), max_size=5), st.data())
def test_messages_come_out_whole_whatever_the_pieces(sent: list[list[bytes]], data) -> None:
    raw = LIBZMQ + LIBZMQ_READY + b"".join(message(m) for m in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    decoder = Decoder("PUB")
    come = []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        come += fed(decoder, raw[start:end])
    assert come == sent
    assert decoder.is_ready


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_an_error(raw: bytes) -> None:
    for before in (b"", LIBZMQ, LIBZMQ + LIBZMQ_READY):
        decoder = Decoder("PUB")
        with suppress(ZmtpError):
            assert isinstance(decoder.feed(before + raw), list)


def test_our_own_greeting_is_understood() -> None:
    decoder = Decoder("SUB")
    assert len(GREETING) == zmtp.GREETING_BYTES
    decoder.feed(GREETING + ready("SUB"))
    assert decoder.is_ready


def test_a_ping_is_answered_with_what_it_has() -> None:
    decoder = Decoder("PUB")
    decoder.feed(LIBZMQ + LIBZMQ_READY + command(b"PING", b"\0\x0acontext"))
    assert bytes(decoder.replies) == command(b"PONG", b"context")


def test_a_ping_is_answered_with_no_more_than_it_may_have() -> None:
    decoder = Decoder("PUB")
    decoder.feed(LIBZMQ + LIBZMQ_READY + command(b"PING", b"\0\x0a" + b"x" * 4000))
    assert bytes(decoder.replies) == command(b"PONG", b"x" * 16)


@pytest.mark.parametrize(
    ("frame", "per_message"),
    [(message([b""]), 1), (message([b"", b""]), 2), (command(b"x", b""), 0)],
)
def test_so_many_frames_are_decoded_at_once(frame: bytes, per_message: int) -> None:
    """Frames of a few bytes take as long as long ones."""
    decoder = Decoder("PUB")
    decoder.feed(LIBZMQ + LIBZMQ_READY)
    sent = 1000
    come = decoder.feed(frame * sent)
    turns, frames = 1, decoder.frames
    while decoder.is_behind:
        assert decoder.frames <= zmtp.FRAMES
        come += decoder.feed()
        turns, frames = turns + 1, frames + decoder.frames
    assert frames == sent * max(1, per_message)
    assert turns == frames // zmtp.FRAMES + 1
    assert len(come) == (sent if per_message else 0)
    assert decoder.held_bytes == 0


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "the peer does not speak ZMTP"),
        (b"\xff" + bytes(8) + b"HTTP", "the peer does not speak ZMTP"),
        (LIBZMQ[:10] + b"\x01" + LIBZMQ[11:], "the peer's ZMTP is older than version 3"),
        (LIBZMQ[:12] + b"CURVE".ljust(20, b"\0") + bytes(32), "authentication (CURVE)"),
        (LIBZMQ + ready("ROUTER"), "its socket is ROUTER, not PUB"),
        (LIBZMQ + command(b"ERROR", b"\x0bno room now"), "refuses the connection: no room now"),
        (LIBZMQ + message([b"early"]), "a message before READY"),
        (LIBZMQ + b"\x09\x01x", "unknown flags"),
        (LIBZMQ + LIBZMQ_READY + b"\x02" + b"\xff" * 8, "over 1 MiB"),
        (LIBZMQ + LIBZMQ_READY + b"\x01\x00" * 17, "16 parts"),
        (LIBZMQ + b"\x04\x0b\x05READY\x03abc\xff", "READY is cut"),
        (LIBZMQ + LIBZMQ_READY + b"\x04\x00", "a command without a name"),
        (LIBZMQ + LIBZMQ_READY + b"\x04\x01\x00", "a command without a name"),
        (LIBZMQ + LIBZMQ_READY + b"\x04\x03\x04PI", "a command without a name"),
        (LIBZMQ + command(b"PING", b"\0\0"), "its first command alone is READY"),
        (LIBZMQ + LIBZMQ_READY * 2, "its first command alone is READY"),
        (LIBZMQ + LIBZMQ_READY + b"\x06" + (4097).to_bytes(8, "big"), "a command of over 4 KiB"),
    ],
)
def test_what_is_no_peer_is_said(raw: bytes, why: str) -> None:
    with pytest.raises(ZmtpError) as caught:
        Decoder("PUB").feed(raw)
    assert why in str(caught.value)


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def peer(serve: Serve) -> AsyncIterator[int]:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_a_subscription_reaches_the_peer_and_messages_come_back() -> None:
    async def publish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(LIBZMQ + LIBZMQ_READY)
        greeted = await reader.readexactly(len(GREETING) + len(ready("SUB")))
        assert greeted == GREETING + ready("SUB")
        assert await reader.readexactly(5) == b"\x00\x03\x01kv"
        writer.write(message([b"kv", b"1"]) + message([b"kv", b"2"]))
        await writer.drain()

    async with peer(publish) as port:
        channel = await Channel.open("127.0.0.1", port, "SUB", "PUB")
        await channel.send(b"\x01kv")
        come: list[list[bytes]] = []
        while len(come) < 2:
            come += await channel.messages()
        with pytest.raises(ZmtpError, match="has closed the connection"):
            await channel.messages()
        channel.close()
    assert come == [[b"kv", b"1"], [b"kv", b"2"]]


async def test_a_peer_that_is_none_is_left_at_once() -> None:
    left = asyncio.Event()

    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with suppress(ConnectionError):
            await reader.read(-1)
        left.set()

    async with peer(http) as port:
        with pytest.raises(ZmtpError, match="does not speak ZMTP"):
            await Channel.open("127.0.0.1", port, "SUB", "PUB")
        await left.wait()


async def test_a_peer_pays_for_each_frame_and_is_not_read_meanwhile() -> None:
    """Commands too, of which nobody hears; no payment is for more than one turn."""
    sent = 1000

    async def publish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(LIBZMQ + LIBZMQ_READY + command(b"x", b"") * sent + message([b"kv"]))
        await reader.read(-1)

    paid: list[float] = []

    async def pay(cost_s: float) -> None:
        assert not channel._writer.transport.is_reading()  # type: ignore[attr-defined]
        paid.append(cost_s)

    async with peer(publish) as port:
        channel = await Channel.open("127.0.0.1", port, "SUB", "PUB")
        channel.pay = pay
        assert await channel.messages() == [[b"kv"]]
        channel.close()
    assert len(paid) >= sent // zmtp.FRAMES
    assert sum(paid) >= sent * zmtp.FRAME_S
    turn_s = zmtp.FRAMES * zmtp.FRAME_S
    assert max(paid) <= 2 * turn_s + zmtp.READ_S + zmtp.BYTE_S * zmtp.READ_BYTES


async def test_each_piece_of_a_frame_is_paid_for() -> None:
    """One byte at a time: each takes a turn of the loop, and completes nothing."""
    raw = message([b"x" * 100])
    read = asyncio.Event()

    async def publish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(LIBZMQ + LIBZMQ_READY)
        for at in range(len(raw)):
            writer.write(raw[at : at + 1])
            await read.wait()
            read.clear()
        await reader.read(-1)

    paid: list[float] = []

    async def pay(cost_s: float) -> None:
        paid.append(cost_s)
        read.set()

    async with peer(publish) as port:
        channel = await Channel.open("127.0.0.1", port, "SUB", "PUB")
        channel.pay = pay
        assert await channel.messages() == [[b"x" * 100]]
        channel.close()
    assert sum(paid) >= (len(raw) - 1) * zmtp.READ_S


async def test_paying_is_no_part_of_the_time_for_a_message() -> None:
    async def publish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begin = message([b"1"]) + command(b"x", b"") * 2 * zmtp.FRAMES
        writer.write(LIBZMQ + LIBZMQ_READY + begin + message([b"2"]))
        await reader.read(-1)

    async def pay(cost_s: float) -> None:
        assert cost_s > 0
        await asyncio.sleep(4 * TICK_S)

    async with peer(publish) as port:
        channel = await Channel.open("127.0.0.1", port, "SUB", "PUB")
        assert await channel.messages() == [[b"1"]]
        channel.pay = pay
        assert await channel.messages(2 * TICK_S) == [[b"2"]]
        with pytest.raises(TimeoutError):
            await channel.messages(TICK_S)
        channel.close()
