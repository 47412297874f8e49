"""TLS in turns: what one turn takes, what is left for the next, and how a connection ends."""

from __future__ import annotations

import asyncio
import ssl
import threading
from typing import Any, cast

import pytest

from proxy.net import secured
from proxy.net.secured import (
    MOST_CERTIFICATES,
    READ_BYTES,
    SLICE_BYTES,
    TURN_HANDSHAKES,
    TURN_RECORDS,
    Secured,
    Shaking,
)
from tests.support.certificates import Certificates
from tests.support.harness import until


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("ca"))


class Wire:
    """A plain transport that keeps what is written."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.sent, self.address = b"", address
        self.is_reading, self.is_closed, self.is_aborted = True, False, False

    def get_extra_info(self, name: str) -> tuple[str, int]:
        assert name == "peername"
        return self.address, 1

    def write(self, data: bytes) -> None:
        self.sent += data

    def take(self) -> bytes:
        sent, self.sent = self.sent, b""
        return sent

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True


class Behind(asyncio.Protocol):
    """The protocol behind TLS: keeps each piece."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.ends: list[Any] = []
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)

    def eof_received(self) -> None:
        self.ends.append("eof")

    def connection_lost(self, exc: Exception | None) -> None:
        self.ends.append(exc)


class Pair:
    """A connection under test as a server, and a client in memory."""

    def __init__(
        self,
        certs: Certificates,
        shaking: Shaking | None = None,
        address: str = "127.0.0.1",
        server: ssl.SSLContext | None = None,
        client: ssl.SSLContext | None = None,
    ) -> None:
        self.wire, self.behind = Wire(address), Behind()
        self.shaken: list[OSError | None] = []
        self.under_test = Secured(
            server or certs.server("x"),
            lambda: self.behind,
            lambda _, error: self.shaken.append(error),
            shaking or Shaking(),
        )
        self._to, self._from = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = (client or certs.client()).wrap_bio(self._to, self._from, server_hostname="x")
        self.under_test.connection_made(cast(asyncio.Transport, self.wire))

    def hello(self) -> None:
        """The client begins."""
        with pytest.raises(ssl.SSLWantReadError):
            self.client.do_handshake()
        self.pass_on(self._from.read())

    def go_on(self) -> None:
        """The client hears the answer, and has its last word."""
        self._to.write(self.wire.take())
        self.client.do_handshake()
        self.pass_on(self._from.read())

    async def shake(self) -> Pair:
        self.hello()
        await turns(1)
        self.go_on()
        await turns(1)
        self._to.write(self.wire.take())
        assert self.shaken == [None]
        return self

    def records(self, *contents: bytes) -> bytes:
        for content in contents:
            self.client.write(content)
        return self._from.read()

    def pass_on(self, data: bytes) -> None:
        """One read of the event loop."""
        self.under_test.get_buffer(-1)[: len(data)] = data
        self.under_test.buffer_updated(len(data))

    def answer(self) -> bytes:
        self._to.write(self.wire.take())
        return self.client.read(1 << 20)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_turn_takes_some_records_and_the_next_ones_the_rest(certs: Certificates) -> None:
    pair = await Pair(certs).shake()
    content = [b"%d," % n for n in range(1000)]
    pair.pass_on(pair.records(*content))
    assert len(pair.behind.pieces) == 1
    assert pair.behind.pieces[0].count(b",") == TURN_RECORDS
    assert not pair.wire.is_reading, "nothing is read while something waits"
    await turns(1)
    assert b"".join(pair.behind.pieces).count(b",") == 2 * TURN_RECORDS
    await turns(1000 // TURN_RECORDS)
    assert b"".join(pair.behind.pieces) == b"".join(content)
    assert pair.wire.is_reading


async def test_any_segmentation_passes_the_same_on(certs: Certificates) -> None:
    pair = await Pair(certs).shake()
    content = [bytes([n % 251]) * (n * 37 % 3000 + 1) for n in range(60)]
    wire = pair.records(*content)
    for at in range(0, len(wire), 777):
        pair.pass_on(wire[at : at + 777])
    await turns(2)
    assert b"".join(pair.behind.pieces) == b"".join(content)


async def test_a_full_read_gives_others_a_turn(certs: Certificates) -> None:
    pair = await Pair(certs).shake()
    wire = pair.records(bytes(10 * READ_BYTES))
    pair.pass_on(wire[:READ_BYTES])
    assert not pair.wire.is_reading
    await turns(1)
    assert pair.wire.is_reading


async def test_nothing_is_passed_on_while_reading_is_paused(certs: Certificates) -> None:
    pair = await Pair(certs).shake()
    pair.pass_on(pair.records(*[b"x"] * (2 * TURN_RECORDS)))
    pair.under_test.pause_reading()
    await turns(5)
    assert len(pair.behind.pieces) == 1
    pair.under_test.resume_reading()
    await turns(3)
    assert b"".join(pair.behind.pieces) == b"x" * (2 * TURN_RECORDS)
    assert pair.wire.is_reading


async def test_what_is_written_arrives(certs: Certificates) -> None:
    pair = await Pair(certs).shake()
    sent = b"short" + bytes(100_000) + b"ab"
    pair.under_test.write(b"short")
    pair.under_test.write(b"")
    pair.under_test.write(bytes(100_000))
    pair.under_test.writelines([b"a", b"b"])
    received = b""
    while len(received) < len(sent):
        received += pair.answer()
    assert received == sent


async def test_a_goodbye_is_answered(certs: Certificates) -> None:
    pair = await Pair(certs).shake()
    pair.client.write(b"last")
    with pytest.raises(ssl.SSLWantReadError):
        pair.client.unwrap()
    pair.pass_on(pair.records())
    assert pair.behind.pieces == [b"last"]
    assert pair.behind.ends == ["eof"]
    assert pair.wire.is_closed
    assert not pair.wire.is_aborted
    pair._to.write(pair.wire.take())
    pair.client.unwrap()


async def test_closing_says_goodbye_and_aborting_does_not(certs: Certificates) -> None:
    for end, is_said in ((Secured.close, True), (Secured.abort, False)):
        pair = await Pair(certs).shake()
        end(pair.under_test)
        assert pair.wire.is_closed
        assert bool(pair.wire.sent) == is_said
        assert pair.under_test.is_closing()
        pair.under_test.write(b"late")
        pair.under_test.connection_lost(None)
        assert pair.behind.ends == [None]


async def test_a_forged_record_ends_it_with_the_error(certs: Certificates) -> None:
    pair = await Pair(certs).shake()
    wire = bytearray(pair.records(b"forged"))
    wire[-1] ^= 1
    pair.pass_on(bytes(wire))
    assert pair.wire.is_aborted
    assert pair.behind.pieces == []
    pair.under_test.connection_lost(None)
    assert isinstance(pair.behind.ends[0], ssl.SSLError)


async def test_a_handshake_that_breaks_is_told_once(certs: Certificates) -> None:
    pair = Pair(certs)
    pair.pass_on(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await turns(1)
    pair.under_test.connection_lost(None)
    assert len(pair.shaken) == 1
    assert isinstance(pair.shaken[0], ssl.SSLError)
    lost = Pair(certs)
    lost.under_test.connection_lost(None)
    assert isinstance(lost.shaken[0], ConnectionResetError)


@pytest.mark.parametrize("shows", [False, True])
async def test_a_long_handshake_is_not_read(
    certs: Certificates, monkeypatch: pytest.MonkeyPatch, shows: bool
) -> None:
    monkeypatch.setattr(secured, "HANDSHAKE_BYTES" if shows else "HELLO_BYTES", 100)
    pair = Pair(certs, server=certs.server("x", wants=certs.ca) if shows else None)
    pair.hello()
    await turns(1)
    assert "too long" in str(pair.shaken[0])
    assert pair.wire.is_closed


async def test_a_hello_of_ssl_2_leads_nowhere(certs: Certificates) -> None:
    """Its head has two bytes, so what followed would not be counted. It cannot name a curve."""
    ciphers = bytes.fromhex("00c02b00c02f00c02c00c03000cca900cca8")
    parts = b"\x01\x03\x03", bytes([0, len(ciphers), 0, 0, 0, 32]), ciphers, bytes(32)
    hello = b"".join(parts)
    pair = Pair(certs)
    pair.pass_on(bytes([0x80, len(hello)]) + hello)
    await turns(1)
    assert "no shared cipher" in str(pair.shaken[0])
    assert pair.wire.is_closed


async def test_after_an_expensive_handshake_others_have_a_turn(
    certs: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secured, "TURN_HANDSHAKES_S", 0.0)
    shaking = Shaking()
    pairs = [Pair(certs, shaking) for _ in range(TURN_HANDSHAKES)]
    for pair in pairs:
        pair.hello()
    await turns(1)
    assert sum(bool(pair.wire.sent) for pair in pairs) == 1
    await turns(TURN_HANDSHAKES)
    assert all(pair.wire.sent for pair in pairs)


async def test_of_many_hellos_a_few_are_answered_in_a_turn(
    certs: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secured, "TURN_HANDSHAKES_S", 60.0)
    shaking = Shaking()
    pairs = [Pair(certs, shaking) for _ in range(3 * TURN_HANDSHAKES)]
    for pair in pairs:
        pair.hello()
        assert not pair.wire.is_reading, "nothing more until its turn"
    pairs[0].under_test.abort()
    answered = []
    for _ in range(4):
        answered.append(sum(bool(pair.wire.sent) for pair in pairs))
        await turns(1)
    assert answered == [0, *(n * TURN_HANDSHAKES - 1 for n in (1, 2, 3))]
    assert all(pair.wire.is_reading for pair in pairs[1:])


class Held(ssl.SSLObject):
    """TLS for which it takes long to work out in a thread what the other side has sent."""

    may_go_on = threading.Event()
    began = 0

    def do_handshake(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            Held.began += 1
            assert Held.may_go_on.wait(30.0)
        super().do_handshake()


async def test_where_certificates_may_come_the_loop_goes_on(certs: Certificates) -> None:
    """One of each address is in a thread at a time: nobody has all of them."""
    server, shaking = certs.server("x", wants=certs.ca), Shaking()
    server.sslobject_class = Held
    shown = certs.client(certs.leaf("client", "someone"))
    addresses = "10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.1"
    try:
        pairs = [Pair(certs, shaking, address, server, shown) for address in addresses]
        for pair in pairs:
            pair.hello()
        await until(lambda: Held.began == 2, "one of each address")
        await turns(3)
        assert Held.began == 2
        gone, left = pairs[0], pairs[4]
        gone.under_test.close()
        left.under_test.abort()
        assert (gone.wire.is_aborted, gone.wire.sent) == (True, b""), "no word by two threads"
    finally:
        Held.may_go_on.set()
    for pair in pairs[1:4]:
        await until(lambda pair=pair: pair.wire.sent, "it answers")  # type: ignore[misc]
        pair.go_on()
        await until(lambda pair=pair: pair.wire.is_reading, "it is over")  # type: ignore[misc]
        assert pair.shaken == [None]
        pair.pass_on(pair.records(b"hi"))
        assert pair.behind.pieces == [b"hi"]
    assert gone.shaken == left.shaken == []


@pytest.mark.parametrize("count", [MOST_CERTIFICATES, MOST_CERTIFICATES + 1])
async def test_many_certificates_are_refused(certs: Certificates, count: int) -> None:
    """They would be kept for as long as the connection."""
    cert, key = certs.leaf("many", "someone")
    cert.write_bytes(cert.read_bytes() + certs.ca.read_bytes() * (count - 1))
    server = certs.server("x", wants=certs.ca)
    pair = Pair(certs, server=server, client=certs.client((cert, key)))
    pair.hello()
    await until(lambda: pair.wire.sent, "it answers")
    pair.go_on()
    await until(lambda: pair.shaken, "it is over")
    said = [None] if count <= MOST_CERTIFICATES else ["over 10 certificates were shown"]
    assert [error and error.args[0] for error in pair.shaken] == said
    assert pair.wire.is_closed == (count > MOST_CERTIFICATES)


class Paced(Behind):
    """The same, which keeps whether it was told to write."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def pause_writing(self) -> None:
        self.told.append("pause")

    def resume_writing(self) -> None:
        self.told.append("resume")


async def test_what_is_written_within_half_a_ticket_is_sent_behind_it(certs: Certificates) -> None:
    """A ticket has the client's certificate in it: a large one does not fit into one record."""
    wire, behind = Wire(), Paced()
    leaf = certs.leaf("large", *[f"client-{n}.example" for n in range(800)])
    shaken: list[OSError | None] = []
    asks = Secured(
        certs.client(leaf), lambda: behind, lambda _, error: shaken.append(error), Shaking(), "x"
    )
    to, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = certs.server("x", wants=certs.ca)
    context.num_tickets = 1
    engine = context.wrap_bio(to, out, server_side=True)

    def pass_on(data: bytes) -> None:
        asks.get_buffer(-1)[: len(data)] = data
        asks.buffer_updated(len(data))

    asks.connection_made(cast(asyncio.Transport, wire))
    to.write(wire.take())
    with pytest.raises(ssl.SSLWantReadError):
        engine.do_handshake()
    pass_on(out.read())
    await until(lambda: shaken and wire.is_reading, "it has seen the certificate")
    to.write(wire.take())
    engine.do_handshake()
    ticket = out.read()
    assert len(ticket) > SLICE_BYTES
    pass_on(ticket[: SLICE_BYTES + 100])
    sent = bytes(range(256)) * 256
    asks.write(b"first")
    asks.write(sent)
    assert behind.told == ["pause"]
    assert asks.get_write_buffer_size() == len(b"first") + len(sent)
    assert wire.sent == b""
    pass_on(ticket[SLICE_BYTES + 100 :])
    assert behind.told == ["pause", "resume"]
    assert not asks.is_closing()
    to.write(wire.take())
    received = b""
    while to.pending or engine.pending():
        received += engine.read(1 << 16)
    assert received == b"first" + sent


async def test_it_tells_of_tls(certs: Certificates) -> None:
    pair = await Pair(certs).shake()
    told = pair.under_test.get_extra_info
    assert cast(Any, told("ssl_object")).version() == "TLSv1.3"
    assert isinstance(told("sslcontext"), ssl.SSLContext)
    assert cast(Any, told("cipher"))[1] == "TLSv1.3"
    assert told("peercert") is None
    assert not pair.under_test.can_write_eof()


async def test_what_was_given_up_before_it_was_made_is_aborted(certs: Certificates) -> None:
    shaken: list[OSError | None] = []
    given_up = Secured(
        certs.client(), Behind, lambda _, error: shaken.append(error), Shaking(), "x"
    )
    given_up.abort()
    wire = Wire()
    given_up.connection_made(cast(asyncio.Transport, wire))
    assert wire.is_aborted
    assert wire.sent == b""
    given_up.connection_lost(None)
    assert len(shaken) == 1
