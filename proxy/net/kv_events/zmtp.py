"""ZeroMQ over TCP, as far as a subscriber needs it: ZMTP 3.0 without authentication.

A connection begins with a greeting of 64 bytes in each direction and a READY command. Frames
follow, each after its flags and length; several frames are one message. `Decoder` is this for the
bytes of a peer, in whatever pieces they come; `Channel` is a connection of it. Source: ZeroMQ RFC
23 (ZMTP 3.0) and RFC 37 (PING and PONG of 3.1, which a peer may send all the same).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Self, cast

from proxy.net import tcp
from proxy.net.timeouts import Limit

GREETING_BYTES = 64
_SIGNATURE_END = 10
_MECHANISM_START, _MECHANISM_BYTES = 12, 20
_NULL = b"NULL".ljust(_MECHANISM_BYTES, b"\0")
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + _NULL + bytes(GREETING_BYTES - 32)
_MORE, _LONG, _COMMAND = 1, 2, 4
_SHORT_HEAD, _LONG_HEAD = 2, 9
_SHORT_MOST = 255
READ_BYTES = 64 << 10
"""Most bytes that are read at once, so that other tasks have their turn."""
FRAMES = 64
"""Most frames that are decoded at once: one of two bytes takes as long as one of hundreds."""
READ_S, FRAME_S, BYTE_S = 3e-5, 5e-6, 5e-9
"""Cost of a read, of a frame in it, and of a byte."""
MOST_BYTES = 1 << 20
"""A longer message is refused. One step of an engine is a few hundred KiB at most."""
MOST_PARTS = 16
COMMAND_BYTES = 4096
"""A longer command is refused. READY has a few properties, and each of them may be of 5 bytes."""
_CONTEXT_END = 18
"""The end of a PING's context, behind the time it allows: ZMTP 3.1 has 16 bytes at most."""
_ERROR_CHARS = 200
Message = list[bytes]


class ZmtpError(Exception):
    """The peer speaks no ZMTP, refuses the connection, or has ended it."""


class Decoder:
    """The bytes that a peer sends, as messages. `peer_type`: the socket type that it must have.

    `replies`: what has to be sent to the peer in return. `frames`: how many were decoded last.
    """

    def __init__(self, peer_type: str) -> None:
        self._peer_type = peer_type.encode()
        self._buffer = bytearray()
        self._is_greeted = False
        self._parts: Message = []
        self._size = 0
        self.is_ready = False
        self.frames = 0
        self.replies = bytearray()

    @property
    def held_bytes(self) -> int:
        """Bytes of what is not complete."""
        return len(self._buffer) + self._size

    @property
    def is_behind(self) -> bool:
        """Whether frames may be left that no more bytes are needed for."""
        return self.frames >= FRAMES

    def feed(self, data: bytes = b"") -> list[Message]:
        """The messages that the next FRAMES frames complete; raises ZmtpError."""
        buffer = self._buffer
        buffer += data
        at, self.frames, found = 0, 0, []
        if not self._is_greeted:
            _check_greeting(buffer)
            if len(buffer) < GREETING_BYTES:
                return []
            self._is_greeted, at = True, GREETING_BYTES
        while self.frames < FRAMES and (frame := self._frame(at)) is not None:
            self.frames += 1
            flags, start, end = frame
            body, at = bytes(buffer[start:end]), end
            if flags & _COMMAND:
                self._command(body)
            elif self._is_last(body, flags):
                found.append(self._parts)
                self._parts, self._size = [], 0
        del buffer[:at]
        return found

    def _frame(self, at: int) -> tuple[int, int, int] | None:
        """Flags, start and end of the frame at a place; None while it is not complete."""
        buffer = self._buffer
        if len(buffer) < at + _SHORT_HEAD:
            return None
        flags = buffer[at]
        if flags > _MORE | _LONG | _COMMAND or flags & (_COMMAND | _MORE) == _COMMAND | _MORE:
            raise ZmtpError("the peer does not speak ZMTP: unknown flags")
        start = at + (_LONG_HEAD if flags & _LONG else _SHORT_HEAD)
        if len(buffer) < start:
            return None
        size = int.from_bytes(buffer[at + 1 : start], "big")
        if flags & _COMMAND and size > COMMAND_BYTES:
            raise ZmtpError(f"a command of over {COMMAND_BYTES >> 10} KiB")
        if self._size + size > MOST_BYTES or len(self._parts) >= MOST_PARTS:
            raise ZmtpError(f"a message of over {MOST_BYTES >> 20} MiB or {MOST_PARTS} parts")
        return None if len(buffer) < start + size else (flags, start, start + size)

    def _is_last(self, part: bytes, flags: int) -> bool:
        """Add a part to the message; whether it is complete."""
        if not self.is_ready:
            raise ZmtpError("the peer does not speak ZMTP: a message before READY")
        self._parts.append(part)
        self._size += len(part)
        return not flags & _MORE

    def _command(self, body: bytes) -> None:
        length = body[0] if body else 0
        if not 0 < length < len(body):
            raise ZmtpError("the peer does not speak ZMTP: a command without a name")
        name, data = body[1 : 1 + length], body[1 + length :]
        if name == b"ERROR":
            reason = data[1:].decode("ascii", "replace")[:_ERROR_CHARS]
            raise ZmtpError(f"the peer refuses the connection: {reason or 'no reason given'}")
        if (name == b"READY") is self.is_ready:
            raise ZmtpError("the peer does not speak ZMTP: its first command alone is READY")
        if not self.is_ready:
            self._greet(data)
        elif name == b"PING":
            self.replies += command(b"PONG", data[2:_CONTEXT_END])

    def _greet(self, data: bytes) -> None:
        """The properties of the peer's READY."""
        kind = _properties(data).get(b"socket-type", b"")
        if kind != self._peer_type:
            wanted, told = self._peer_type.decode(), kind.decode("ascii", "replace")
            raise ZmtpError(f"its socket is {told[:_ERROR_CHARS] or 'of no type'}, not {wanted}")
        self.is_ready = True


def _check_greeting(begun: bytearray) -> None:
    """Refuse a peer as soon as its greeting shows that it is none; raises ZmtpError."""
    is_wrong = bool(begun) and begun[0] != GREETING[0]
    if len(begun) >= _SIGNATURE_END:
        is_wrong = is_wrong or begun[_SIGNATURE_END - 1] != GREETING[_SIGNATURE_END - 1]
    if is_wrong:
        raise ZmtpError("the peer does not speak ZMTP")
    if len(begun) > _SIGNATURE_END and begun[_SIGNATURE_END] < GREETING[_SIGNATURE_END]:
        raise ZmtpError("the peer's ZMTP is older than version 3")
    if len(begun) >= GREETING_BYTES:
        mechanism = bytes(begun[_MECHANISM_START : _MECHANISM_START + _MECHANISM_BYTES])
        if mechanism != _NULL:
            told = mechanism.rstrip(b"\0").decode("ascii", "replace")
            raise ZmtpError(f"the peer wants authentication ({told}), which is not supported")


def _properties(data: bytes) -> dict[bytes, bytes]:
    """The metadata of a READY command: names in lower case to values; raises ZmtpError."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        end = at + 1 + data[at]
        start = end + 4
        size = int.from_bytes(data[end:start], "big")
        if start + size > len(data):
            raise ZmtpError("the peer does not speak ZMTP: READY is cut")
        found[data[at + 1 : end].lower()] = data[start : start + size]
        at = start + size
    return found


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) > _SHORT_MOST:
        return bytes((flags | _LONG,)) + len(body).to_bytes(8, "big") + body
    return bytes((flags, len(body))) + body


def command(name: bytes, data: bytes) -> bytes:
    """A command as bytes."""
    return _frame(_COMMAND, bytes((len(name),)) + name + data)


def ready(socket_type: str) -> bytes:
    """The READY command of a socket of this type, as bytes."""
    name, value = b"Socket-Type", socket_type.encode()
    return command(b"READY", bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value)


def message(parts: Sequence[bytes]) -> bytes:
    """A message as bytes."""
    last = len(parts) - 1
    return b"".join([_frame(_MORE if at < last else 0, part) for at, part in enumerate(parts)])


def _nobody(held_bytes: int) -> None:
    del held_bytes


async def _turn(cost_s: float) -> None:
    """Whoever pays nothing gives other tasks their turn."""
    del cost_s
    await asyncio.sleep(0)


class Channel:
    """One connection to a socket of a peer; used by one task at a time, and closed by it.

    Its methods raise OSError and ZmtpError. None has a time limit of its own.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: Decoder
    ) -> None:
        self._reader, self._writer, self._decoder = reader, writer, decoder
        self._come: list[Message] = []
        self._owed_s = 0.0
        self._is_paused = False
        self.pay: Callable[[float], Awaitable[None]] = _turn
        """Awaited with what the last read or frames cost, in seconds, before there are others."""
        self.on_held: Callable[[int], None] = _nobody
        """Called with the bytes of what is not complete, after each read; with 0 at the end."""

    @classmethod
    async def open(cls, address: str, port: int, socket_type: str, peer_type: str) -> Self:
        """Connect, greet, and say what this socket is; the peer must be of `peer_type`."""
        reader, writer = await asyncio.open_connection(address, port, limit=READ_BYTES)
        channel = cls(reader, writer, Decoder(peer_type))
        with ExitStack() as unless_ready:
            unless_ready.callback(channel.close)
            tcp.watch(writer.get_extra_info("socket"))
            writer.write(GREETING + ready(socket_type))
            while not channel._decoder.is_ready:
                await channel._read()  # READY is the first frame, so the turns are few
            unless_ready.pop_all()
        return channel

    def close(self) -> None:
        """Close the connection at once."""
        self.on_held(0)
        self._writer.transport.abort()

    async def send(self, *parts: bytes) -> None:
        """Send a message; waits while the peer takes nothing."""
        self._writer.write(message(parts))
        await self._writer.drain()

    async def messages(self, within_s: float = math.inf) -> list[Message]:
        """The next messages, one at least, of at most FRAMES frames.

        Raises TimeoutError if none come in that time, of which paying for others is no part.
        """
        now_s = asyncio.get_running_loop().time
        while not self._come:
            await self._pay()
            begun_s = now_s()
            with Limit(within_s):
                await self._read()
            within_s -= now_s() - begun_s
        await self._pay()
        come, self._come = self._come, []
        return come

    async def _pay(self) -> None:
        owed_s, self._owed_s = self._owed_s, 0.0
        if owed_s:
            await self.pay(owed_s)

    async def _read(self) -> None:
        """Decode the next frames: of what is there already, or of what comes."""
        decoder = self._decoder
        data = b"" if decoder.is_behind else await self._data()
        self._come += decoder.feed(data)
        self._owed_s += FRAME_S * decoder.frames
        self.on_held(decoder.held_bytes)
        if decoder.replies:
            if self._writer.transport.get_write_buffer_size() > READ_BYTES:
                raise ZmtpError("the peer takes no answers")
            self._writer.write(bytes(decoder.replies))
            decoder.replies.clear()

    async def _data(self) -> bytes:
        """What comes next. Meanwhile nothing is received: each piece of a byte would be a turn."""
        # uvloop's is no subclass of asyncio.Transport
        transport = cast("asyncio.Transport", self._writer.transport)
        if self._is_paused:
            self._is_paused = False
            transport.resume_reading()
        data = await self._reader.read(READ_BYTES)
        # The reader does the same where it has much; its own pause is not to be ended here.
        if transport.is_reading():
            transport.pause_reading()
            self._is_paused = True
        self._owed_s += READ_S + BYTE_S * len(data)
        if not data:
            raise ZmtpError("the peer has closed the connection")
        return data
