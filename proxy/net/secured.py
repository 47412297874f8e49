"""TLS over a plain connection of the event loop, in pieces that hold nobody up.

The event loop's own TLS reads 256 KiB and decrypts it in one turn, whatever is in it, and keeps a
buffer of that size for each connection. Here all connections read into one buffer. A turn takes
some records of it, and a connection with too many for their content is ended.

A certificate is read before it is verified, and its key may be of a curve of its own: OpenSSL takes
0.2 s for each of them. Where the other side may show some, its handshake goes on in a thread.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, cast

from proxy.core.admission.turns import Turns
from proxy.net.addresses import party
from proxy.net.tls_records import SmallRecordsError, TlsRecords

READ_BYTES = 49152
"""Most bytes of one read. With the rest of an earlier record they fit into 64 KiB, an instance's
buffer, when they are decrypted."""
TURN_RECORDS = 64
"""Most records of one turn."""
RECORD_BYTES = SLICE_BYTES = 16384
"""Most bytes of a record's content. So many are encrypted or decrypted in a step: OpenSSL's buffers
stay as long as they have ever been."""
TURN_HANDSHAKES = 2
"""Most connections whose handshake goes on in a turn. A step takes 0.6 ms on P-256, 2 ms with a key
of RSA 2048, and any number of clients may say hello at once."""
TURN_HANDSHAKES_S = 0.003
"""After so long it is one."""
THREADS = 4
"""Handshakes with certificates that go on at a time, one of each address: a chain of 16 KiB takes
11 ms, or 8 s if it is made for that."""
NICER = 10
"""Niceness of their threads, so that the event loop has its processor first."""
HELLO_BYTES = 6144
"""Most bytes of a client that shows no certificate. Its hello has some 2 KiB, and may come twice.
OpenSSL takes time for each of its groups times its keys: 9 ms in 16 KiB."""
HANDSHAKE_BYTES = 16384
"""Most bytes of the other side's handshake. OpenSSL takes a millisecond for each 1,000 bytes of a
chain of unknown certificates, and would take 100 KiB."""
MOST_CERTIFICATES = 10
"""Of the other side. OpenSSL keeps them as long as the connection: 4 to 5 KiB for each, however
short it is, and 60 fit into a handshake. A chain to a root has 2 to 4."""
_NOTHING = memoryview(b"")
_reads = memoryview(bytearray(READ_BYTES))


class Shaking:
    """The handshakes of many connections: a few go on in each turn, and a few beside the loop.

    Addresses take turns. A connection reads nothing while it waits, so it waits here once at most.
    """

    def __init__(self) -> None:
        self._waiting: Turns[Callable[[], None]] = Turns()
        self._is_due = False
        self._threads: ThreadPoolExecutor | None = None
        self._free = THREADS
        self._ready: deque[Secured] = deque()
        """Those that wait for a thread, one of each address."""
        self._behind: dict[str, deque[Secured]] = {}
        """By address of one that is ready or in a thread: those that wait for it."""

    def ask(self, owner: str, go_on: Callable[[], None]) -> None:
        """Have this called in a turn to come."""
        self._waiting.add(owner, go_on)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        end_s = time.monotonic() + TURN_HANDSHAKES_S
        for _ in range(TURN_HANDSHAKES):
            if not self._waiting:
                break
            self._waiting.next()()
            if time.monotonic() >= end_s:
                break
        self._is_due = bool(self._waiting)
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._turn)

    def go_beside(self, one: Secured) -> None:
        """Have its `step` done in a thread, and `stepped` called with the result."""
        behind = self._behind.get(one.owner)
        if behind is None:
            self._behind[one.owner] = deque()
            self._ready.append(one)
            self._begin()
        else:
            behind.append(one)

    def _begin(self) -> None:
        while self._free and self._ready:
            one = self._ready.popleft()
            if one.is_closing():
                self._next(one.owner)
                continue
            self._free -= 1
            if self._threads is None:
                self._threads = ThreadPoolExecutor(THREADS, "tls", _be_nicer)
            loop = asyncio.get_running_loop()
            self._threads.submit(one.step).add_done_callback(partial(self._tell, loop, one))

    def _tell(
        self, loop: asyncio.AbstractEventLoop, one: Secured, done: Future[ssl.SSLError | None]
    ) -> None:
        """Pass a result on from its thread; with the loop its connection has ended."""
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._ended, one, done.result())

    def _ended(self, one: Secured, error: ssl.SSLError | None) -> None:
        self._free += 1
        self._next(one.owner)
        self._begin()
        one.stepped(error)

    def _next(self, owner: str) -> None:
        """The next one of this address is ready, behind those of others."""
        behind = self._behind[owner]
        if behind:
            self._ready.append(behind.popleft())
        else:
            del self._behind[owner]


def _number_of_certificates(tls: ssl.SSLObject) -> int:
    """How many the other side has shown, whether they belong together or not."""
    # Before Python 3.13 it has the method under the same name, but one object deeper.
    known: Any = tls if sys.version_info >= (3, 13) else getattr(tls, "_sslobj")  # noqa: B009
    return len(known.get_unverified_chain() or ())


def _be_nicer() -> None:
    with suppress(OSError):  # a kernel may know no priority of a thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICER)


class Secured(asyncio.BufferedProtocol):
    """TLS on one connection: the protocol of its plain transport, and a transport itself.

    `make_protocol` makes the protocol behind it once the handshake is over. `on_shaken` is called
    at the handshake's end, with the error if it failed. `shaking` says when the handshake goes on.
    """

    __slots__ = (
        "_begun",
        "_error",
        "_held",
        "_incoming",
        "_is_away",
        "_is_closing",
        "_is_due",
        "_is_full",
        "_is_made",
        "_is_paused",
        "_is_shaken",
        "_is_shown",
        "_left",
        "_loop",
        "_outgoing",
        "_protocol",
        "_records",
        "_rest",
        "_shaking",
        "_tls",
        "_wire",
        "owner",
    )

    def __init__(
        self,
        secure: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        on_shaken: Callable[[Secured, OSError | None], None],
        shaking: Shaking,
        server_hostname: str | None = None,
    ) -> None:
        """`server_hostname`: the name to verify; None: the other side is the client."""
        self._begun: tuple[Callable[..., asyncio.BaseProtocol], Callable[..., None]] | None
        self._begun = make_protocol, on_shaken
        self._shaking = shaking
        self._loop = asyncio.get_running_loop()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = secure.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
        )
        self._records = TlsRecords(self._loop.time())
        self._protocol: asyncio.BaseProtocol | None = None
        self._error: OSError | None = None
        self._is_shaken = self._is_closing = self._is_paused = False
        self._is_due = self._is_made = self._is_full = False
        self._is_shown = server_hostname is not None or secure.verify_mode != ssl.CERT_NONE
        """Whether the other side may show certificates."""
        self._is_away = False
        """Whether the handshake goes on in a thread, which alone uses `_tls` then."""
        self.owner = ""
        """The other side's address, for its turns."""
        self._held = bytearray()
        self._left = HANDSHAKE_BYTES if self._is_shown else HELLO_BYTES
        self._rest = _NOTHING
        self._wire: asyncio.Transport

    # The protocol of the plain transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected: the client begins the handshake."""
        # uvloop's is no subclass of asyncio.Transport
        self._wire = cast(asyncio.Transport, transport)
        self._is_made = True
        address = transport.get_extra_info("peername")
        self.owner = party(str(address[0])) if address else ""
        if self._is_closing:
            self._wire.abort()
        else:
            self._shake()

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer of the next read, used before anything else can read."""
        del sizehint
        return _reads

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` were read."""
        data = _reads[:nbytes]
        at = self._take(data) if self._is_shaken else 0
        if at < nbytes:
            self._rest = memoryview(bytes(data[at:]))
        if (at < nbytes or nbytes == READ_BYTES) and not self._is_closing:
            self._wire.pause_reading()
            self._go_on_soon()

    def eof_received(self) -> bool:
        """The other side has closed without a goodbye: so does this one."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The plain connection is closed."""
        self._is_closing = True
        self._rest, self._held = _NOTHING, bytearray()
        protocol, self._protocol = self._protocol, None  # they refer to each other
        if protocol is not None:
            protocol.connection_lost(self._error or exc)
        else:
            self._end_handshake(ConnectionResetError("closed within the TLS handshake"))

    def pause_writing(self) -> None:
        """The other side reads less than is written."""
        self._is_full = True
        if self._protocol is not None and not self._held:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """The other side reads again."""
        self._is_full = False
        if self._protocol is not None and not self._held:
            self._protocol.resume_writing()

    # Reading.

    def _go_on_soon(self) -> None:
        if self._is_due or self._is_paused or self._is_away:
            return
        self._is_due = True
        if self._is_shaken:
            self._loop.call_soon(self._go_on)
        else:
            self._shaking.ask(self.owner, self._go_on)

    def _go_on(self) -> None:
        """Take what waits; when nothing does, read again."""
        self._is_due = False
        if not self.is_reading():
            return
        at = self._take(self._rest)
        self._rest = self._rest[at:] if at < len(self._rest) else _NOTHING
        if self._rest:
            self._go_on_soon()
        elif self.is_reading():
            self._wire.resume_reading()

    def _take(self, data: memoryview) -> int:
        """Take the records of one turn; where they end."""
        at, left, size = 0, TURN_RECORDS, len(data)
        while at < size and left > 0 and self.is_reading():
            most = left if self._is_shaken else 1
            end = self._records.cut(data[: at + SLICE_BYTES], at, most)
            left -= self._records.ended
            self._incoming.write(data[at:end])
            if self._is_shaken:
                self._read()
                if self._records.is_hollow:
                    left = 0
            else:
                self._left -= end - at
                if self._is_shown and self._left >= 0:
                    self._is_away = True
                    self._shaking.go_beside(self)
                else:
                    self._shake()
            at = end
        return at

    def _shake(self) -> None:
        """Go on with the handshake."""
        self._note(self.step())

    def step(self) -> ssl.SSLError | None:
        """Take a step of the handshake; why it is not over yet, or failed."""
        if self._left < 0:
            return ssl.SSLError("the handshake is too long")
        try:
            self._tls.do_handshake()
        except ssl.SSLError as error:
            return error
        if self._is_shown and _number_of_certificates(self._tls) > MOST_CERTIFICATES:
            return ssl.SSLError(f"over {MOST_CERTIFICATES} certificates were shown")
        return None

    def stepped(self, error: ssl.SSLError | None) -> None:
        """A step in a thread has ended."""
        self._is_away = False
        if not self._is_closing:
            self._note(error)
            self._go_on_soon()

    def _note(self, error: ssl.SSLError | None) -> None:
        self._flush()
        if error is None:
            self._is_shaken = True
            self._end_handshake(None)
        elif not isinstance(error, ssl.SSLWantReadError):
            self._is_closing = True
            self._wire.close()
            self._end_handshake(error)

    def _end_handshake(self, error: OSError | None) -> None:
        """Tell of the handshake's end, once; if it is done, there is a protocol from now on."""
        if self._begun is None:
            return
        make_protocol, on_shaken = self._begun
        self._begun = None
        if error is None:
            self._protocol = make_protocol()
            on_shaken(self, None)
            self._protocol.connection_made(cast(asyncio.Transport, self))
        else:
            on_shaken(self, error)

    def _read(self) -> None:
        """Decrypt what is there, and pass it on."""
        protocol = self._protocol
        if isinstance(protocol, asyncio.BufferedProtocol):
            is_open = self._read_into(protocol)
        else:
            is_open = self._read_for(cast(asyncio.Protocol, protocol))
        if self._outgoing.pending:
            self._flush()
        if self._held:
            self._send_held()
        if not is_open and not self._is_closing:
            assert protocol is not None
            cast(asyncio.Protocol, protocol).eof_received()
            self.close()

    def _read_for(self, protocol: asyncio.Protocol) -> bool:
        tls, incoming = self._tls, self._incoming
        pieces: list[bytes] = []
        is_open = True
        try:
            while incoming.pending or tls.pending():
                if not (piece := tls.read(RECORD_BYTES)):
                    is_open = False
                    break
                pieces.append(piece)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._fail(error)
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self._is_paid(len(pieces), len(data)) and data:
            protocol.data_received(data)
        return is_open

    def _read_into(self, protocol: asyncio.BufferedProtocol) -> bool:
        tls, incoming = self._tls, self._incoming
        buffer = cast(memoryview, protocol.get_buffer(-1))
        pieces = size = 0
        is_open = True
        try:
            while incoming.pending or tls.pending():
                # typeshed knows no memoryview here, nor that a number is returned
                read = cast(int, tls.read(RECORD_BYTES, cast(bytearray, buffer[size:])))
                if not read:
                    is_open = False
                    break
                pieces += 1
                size += read
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._fail(error)
        if self._is_paid(pieces, size) and size:
            protocol.buffer_updated(size)
        return is_open

    def _is_paid(self, pieces: int, size: int) -> bool:
        """Charge the records of this step; False if the connection has ended."""
        if self._is_closing:
            return False
        try:
            self._records.charge(pieces, size, self._loop.time())
        except SmallRecordsError as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: OSError) -> None:
        """End the connection for an error; the other side is told."""
        self._error = self._error or error
        self._flush()
        self.abort()

    def _flush(self) -> None:
        if self._outgoing.pending and not self._wire.is_closing():
            self._wire.write(self._outgoing.read())

    # The transport of the protocol behind it.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send; nothing, once it is closed."""
        if self._is_closing:
            return
        if self._held:
            self._held += data
        elif (done := self._encrypt(data)) < len(data):
            self._held += memoryview(data)[done:]
            if self._protocol is not None and not self._is_full:
                self._protocol.pause_writing()

    def _encrypt(self, data: bytes | bytearray | memoryview) -> int:
        """Encrypt and send; how many bytes are done with.

        OpenSSL encrypts nothing while a part of a message has come, such as half of a ticket.
        """
        at, size = 0, len(data)
        try:
            if size <= RECORD_BYTES:
                if size:
                    self._tls.write(data)
                    self._wire.write(self._outgoing.read())
                return size
            view = memoryview(data)
            while at < size:
                self._tls.write(view[at : at + RECORD_BYTES])
                self._wire.write(self._outgoing.read())
                at += RECORD_BYTES
        except ssl.SSLWantReadError:
            return at
        except ssl.SSLError as error:
            self._fail(error)
        return size

    def _send_held(self) -> None:
        """Go on with what could not be encrypted."""
        held = self._held
        self._held = held[self._encrypt(held) :]
        if self._protocol is not None and not (self._held or self._is_full):
            self._protocol.resume_writing()

    def writelines(self, list_of_data: list[bytes | bytearray | memoryview]) -> None:
        """Encrypt and send all of them."""
        for data in list_of_data:
            self.write(data)

    def can_write_eof(self) -> bool:
        """False: TLS has no end of one direction that all sides understand."""
        return False

    def close(self) -> None:
        """Say goodbye, and close when all is sent."""
        if self._is_closing:
            return
        if self._is_away:
            self.abort()
            return
        self._is_closing = True
        with suppress(ssl.SSLError):  # the other side has not said goodbye
            self._tls.unwrap()
        self._flush()
        self._wire.close()

    def abort(self) -> None:
        """Close at once, without a goodbye."""
        self._is_closing = True
        if self._is_made:
            self._wire.abort()

    def is_closing(self) -> bool:
        """Whether nothing is written any more."""
        return self._is_closing or self._wire.is_closing()

    def pause_reading(self) -> None:
        """Pass nothing on until `resume_reading`."""
        self._is_paused = True
        if not self._is_closing:
            self._wire.pause_reading()

    def resume_reading(self) -> None:
        """Pass on again, from the next turn on."""
        self._is_paused = False
        if not self._is_closing:
            self._go_on_soon()

    def is_reading(self) -> bool:
        """Whether what comes is passed on."""
        return not (self._is_paused or self._is_closing or self._is_away)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Pass everything to another protocol from now on."""
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol | None:
        """The protocol behind it; None before the end of the handshake."""
        return self._protocol

    def get_extra_info(self, name: str, default: object = None) -> object:
        """What is known of the connection: of TLS, else of the plain transport."""
        if name == "ssl_object":
            return self._tls
        if name == "sslcontext":
            return self._tls.context
        if name == "peercert":
            return self._tls.getpeercert()
        if name == "cipher":
            return self._tls.cipher()
        return self._wire.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        """Bytes that are written and not sent."""
        return len(self._held) + self._wire.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Low and high mark of them."""
        return self._wire.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set these marks."""
        self._wire.set_write_buffer_limits(high, low)
