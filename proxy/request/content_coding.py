"""Compressed request bodies: the accepted codings, and unpacking within a limit.

vLLM's server unpacks nothing, so the proxy does, and an engine gets the plain body. A body is
unpacked in steps and no further than `--max-body-bytes`: what is small only while it is packed
costs no more than a large one. On the event loop only a short body is unpacked. A body that waits
for a thread is kept packed: what it has made and its window would be counted by nobody.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Protocol

from proxy.core.admission.turns import Turns
from proxy.protocol.errors import (
    CONTENT_CODINGS,
    BadRequestError,
    BodyTooLargeError,
    UnsupportedEncodingError,
)

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

STEP_BYTES = 1 << 18
"""Most bytes that one step makes, in 0.5 to 1.5 ms."""
FEED_BYTES = 1 << 14
"""Packed bytes of one step; a longer body is unpacked in a thread."""
SHORT_BYTES = 1 << 16
"""Most bytes of a body that is unpacked on the event loop."""
AT_ONCE = 2
"""Threads that unpack; further bodies wait for one as they came, packed."""
_WINDOW_BITS, _WINDOW_BITS_MOST = 23, 27
"""A zstd frame may ask for a window of 8 MiB (RFC 9659), or of `--max-body-bytes` up to 128 MiB."""
_FRAME_HEAD_BYTES = 18
_ALIASES = {"x-gzip": "gzip"}
_ZLIB_METHOD, _ZLIB_CHECK = 8, 31


class _Decompressor(Protocol):
    """The common interface of zlib's and zstd's."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


def _gzip(raw: bytes, most_bytes: int) -> _Decompressor:
    del raw, most_bytes
    return zlib.decompressobj(zlib.MAX_WBITS | 16)


def _deflate(raw: bytes, most_bytes: int) -> _Decompressor:
    """A zlib stream, as the name means; or a bare one, which some clients send under that name."""
    del most_bytes
    is_zlib = raw[0] & 15 == _ZLIB_METHOD and int.from_bytes(raw[:2], "big") % _ZLIB_CHECK == 0
    return zlib.decompressobj(zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS)


def _zstd(raw: bytes, most_bytes: int) -> _Decompressor:
    told_bytes = zstd.get_frame_info(raw[:_FRAME_HEAD_BYTES]).decompressed_size
    if (told_bytes or 0) > most_bytes:
        raise _too_large(most_bytes)
    bits = min(max(most_bytes.bit_length(), _WINDOW_BITS), _WINDOW_BITS_MOST)
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: bits})


_CODINGS: dict[str, Callable[[bytes, int], _Decompressor]] = dict(
    zip(CONTENT_CODINGS, (_zstd, _gzip, _deflate), strict=True)
)


def coding_of(fields: Iterable[str]) -> str | None:
    """The one coding of a body by its Content-Encoding; None where it came plain.

    Raises UnsupportedEncodingError for any other coding, and for several layers.
    """
    named = [one.strip().lower() for field in fields for one in field.split(",")]
    codings = [_ALIASES.get(one, one) for one in named if one not in ("", "identity")]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in _CODINGS:
        accepted = f"one of {', '.join(CONTENT_CODINGS)}, in one layer, or identity"
        raise UnsupportedEncodingError(f"Content-Encoding: must be {accepted}")
    return codings[0]


def _too_large(most_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"body: over {most_bytes} bytes when unpacked (--max-body-bytes)")


class Unpacking:
    """Unpacks bodies, `AT_ONCE` in threads at a time; for a thread, owners take turns."""

    def __init__(self) -> None:
        self._free = AT_ONCE
        self._turns: Turns[asyncio.Future[None]] = Turns()

    async def plain(self, raw: bytes, coding: str, most_bytes: int, owner: str = "") -> bytes:
        """The plain body; raises BodyTooLargeError, or BadRequestError where it is broken.

        `owner`: whose turn it takes.
        """
        try:
            if len(raw) <= FEED_BYTES:
                first = _Steps(raw, coding, most_bytes)
                if first.take(SHORT_BYTES):
                    return first.joined()
                del first
            async with self._turn(owner):
                return await self._in_thread(_Steps(raw, coding, most_bytes))
        except (zlib.error, zstd.ZstdError, ValueError) as error:
            raise BadRequestError(f"body: not one whole {coding} stream ({error})") from error

    @staticmethod
    async def _in_thread(steps: _Steps) -> bytes:
        try:
            return await asyncio.to_thread(steps.whole)
        except asyncio.CancelledError:
            steps.is_unwanted = True  # its thread stops behind the present step
            raise

    @asynccontextmanager
    async def _turn(self, owner: str) -> AsyncIterator[None]:
        """One of the threads."""
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._turns.add(owner, turn)
            try:
                await turn
            except asyncio.CancelledError:
                self._turns.remove(owner, turn)
                if not turn.cancelled():
                    self._release()
                raise
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        while self._turns:
            turn = self._turns.next()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class _Steps:
    """The steps of one body. `is_unwanted`: no request waits for it any more."""

    def __init__(self, raw: bytes, coding: str, most_bytes: int) -> None:
        self.is_unwanted = False
        self._made: list[bytes] = []
        self._bytes, self._most_bytes = 0, most_bytes
        self._raw, self._decompressor = raw, _CODINGS[coding](raw, most_bytes)

    def take(self, enough_bytes: int) -> bool:
        """Unpack until the end, or until more bytes are made than that; whether it is the end."""
        step_bytes = min(STEP_BYTES, enough_bytes + 1)
        for piece in _pieces(self._raw, self._decompressor, step_bytes):
            self._made.append(piece)
            self._bytes += len(piece)
            if self._bytes > self._most_bytes:
                raise _too_large(self._most_bytes)
            if self._bytes > enough_bytes or self.is_unwanted:
                return False
        return True

    def whole(self) -> bytes:
        """Unpack all; the whole body."""
        self.take(self._most_bytes)
        return self.joined()

    def joined(self) -> bytes:
        """The plain body so far."""
        return b"".join(self._made)


def _pieces(raw: bytes, decompressor: _Decompressor, step_bytes: int) -> Iterator[bytes]:
    """A body's plain pieces of `step_bytes` at most.

    Raises ValueError where it ends too early or goes on too long.

    A second frame or member behind the first is not unpacked: a decoder that ignores it would read
    another body.
    """
    for at in range(0, len(raw), FEED_BYTES):
        data = raw[at : at + FEED_BYTES]
        while True:
            piece = decompressor.decompress(data, step_bytes)
            yield piece
            if decompressor.eof:
                if decompressor.unused_data or at + FEED_BYTES < len(raw):
                    raise ValueError("something follows its end")
                return
            if len(piece) < step_bytes:
                break
            data = getattr(decompressor, "unconsumed_tail", b"")
    raise ValueError("it ends too early")
