"""Finds where an answer's body ends: by length, by chunks, or at the end of the connection.

A framing is fed each piece of a body as it came, in any segmentation, and returns the body's own
bytes. It knows to the byte where the message ends, and whether the last piece may be passed on
unchanged.
"""

from __future__ import annotations

import re

from proxy.protocol.memo import Memo

LINE_BYTES = 256
"""A longer chunk size line, extensions included, is refused; a trailer line may have 8 KiB."""
TRAILER_BYTES = 8192
SMALL_CHUNKS, CHUNK_BYTES = 8192, 64
"""Chunks that may be small: a chunk takes the time of CHUNK_BYTES or more of body. Beyond this
number a body's chunks are on average longer than their size lines by CHUNK_BYTES."""
MOST_SPARE = SMALL_CHUNKS * CHUNK_BYTES
_SIZE_LINE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n\0]*)?\r\n")
_TRAILER_LINE = re.compile(rb"[!#-'*+.^-z|~0-9A-Z-]+:[^\r\n\0]*\r\n")
_SIZES: Memo[bytes, int] = Memo(4096)
"""Chunk sizes by their size lines without line ends: few different ones occur."""
_NEWLINE = ord("\n")
_SIZE, _DATA, _DATA_END, _TRAILER = range(4)


class FramingError(Exception):
    """The bytes do not follow this framing."""


class SmallChunksError(FramingError):
    """Too many chunks for their bytes."""


def wrap(data: bytes) -> bytes:
    """The bytes as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Length:
    """A body of `length` bytes; 0 for an answer without a body."""

    __slots__ = ("end", "is_done", "is_whole", "left")

    def __init__(self, length: int) -> None:
        self.left = length
        self.is_done = length == 0
        self.is_whole = not self.is_done
        self.end = 0

    def feed(self, data: bytes) -> bytes:
        """The body's bytes in this piece; `end` is where the body ends once `is_done`."""
        left = self.left - len(data)
        if left > 0:
            self.left = left
            return data
        self.end = self.left
        self.left = 0
        self.is_done, self.is_whole = True, False
        return data if left == 0 else data[: self.end]


class UntilClose:
    """A body that ends with its connection."""

    __slots__ = ("end", "is_done", "is_whole")

    def __init__(self) -> None:
        self.is_done = False
        self.is_whole = True
        self.end = 0

    def feed(self, data: bytes) -> bytes:
        """The body's bytes: the whole piece."""
        return data


class Chunked:
    """A chunked body, which may be cut anywhere. Raises FramingError if it is not chunked.

    `is_whole`: the last piece was whole chunks, none of them the last one. `is_done`: the empty
    line after the last chunk has come; it ends at `end` of that piece. `spare`: bytes by which its
    chunks may still be too small, all together; SmallChunksError beyond.
    """

    __slots__ = ("_left", "_line", "_state", "end", "is_done", "is_whole", "spare")

    def __init__(self, spare: int = MOST_SPARE) -> None:
        self.spare = spare
        self.is_done = self.is_whole = False
        self.end = 0
        self._state = _SIZE
        self._left = 0
        self._line = b""

    def feed(self, data: bytes) -> bytes:
        """The body's bytes in this piece."""
        if self._state == _SIZE and not self._line:
            # Nearly every piece of a stream is exactly one chunk.
            at = data.find(b"\r")
            size = _SIZES.known.get(data[:at])
            whole = size is not None and len(data) == at + size + 4
            if whole and data[at + 1] == _NEWLINE and data.endswith(b"\r\n"):
                self.is_whole = True
                return data[at + 2 : -2]
        return self._walk(data)

    def _walk(self, data: bytes) -> bytes:
        body: list[bytes] = []
        at, size = 0, len(data)
        begins_whole = self._is_between
        while at < size and not self.is_done:
            if self._state == _SIZE and not self._line:
                at = self._take_chunks(data, at, body)
            if self._state == _DATA:
                piece = data[at : at + self._left]
                body.append(piece)
                at += len(piece)
                self._left -= len(piece)
                self._state = _DATA if self._left else _DATA_END
            elif at < size:
                at = self._take_line(data, at)
        self.end = at
        self.is_whole = begins_whole and self._is_between
        return body[0] if len(body) == 1 else b"".join(body)

    def _take_chunks(self, data: bytes, at: int, body: list[bytes]) -> int:
        """Append the chunks that are there to their ends; where the next one begins.

        The last chunk and whatever is odd is left to `_take_line`.
        """
        spare = self.spare
        while match := _SIZE_LINE.match(data, at):
            start = match.end()
            left = int(match[1], 16)
            end = start + left
            if not left or start - at > LINE_BYTES or not data.startswith(b"\r\n", end):
                break
            if not at and end + 2 == len(data) and start == len(match[1]) + 2:
                _SIZES.keep(match[1], left)
            body.append(data[start:end])
            spare = min(spare + left - (start - at) - CHUNK_BYTES, MOST_SPARE)
            at = end + 2
            if spare < 0:
                break
        self.spare = spare
        self._check_spare()
        return at

    def _check_spare(self) -> None:
        if self.spare < 0:
            raise SmallChunksError("many chunks of few bytes")

    @property
    def _is_between(self) -> bool:
        """Whether the bytes so far end between two chunks."""
        return self._state == _SIZE and not self._line

    def _take_line(self, data: bytes, at: int) -> int:
        """Parse a size line, a chunk's end or a trailer line, or keep the part that has come."""
        stop = data.find(b"\n", at) + 1
        line = self._line + data[at : stop or None]
        limit = TRAILER_BYTES if self._state == _TRAILER else LINE_BYTES
        if len(line) > limit:
            raise FramingError("a line between chunks is too long")
        if self._state == _DATA_END and not b"\r\n".startswith(line):
            raise FramingError("a chunk does not end where it should")
        if not stop:
            self._line = line
            return len(data)
        self._line = b""
        if self._state == _SIZE:
            self._begin(line)
        elif self._state == _DATA_END:
            self._state = _SIZE
        elif line == b"\r\n":
            self.is_done = True
        else:
            self._check_trailer(line)
        return stop

    def _begin(self, line: bytes) -> None:
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise FramingError("a chunk without a size")
        self._left = int(match[1], 16)
        if self._left == 0:
            self._state = _TRAILER
            return
        self._state = _DATA
        self.spare = min(self.spare + self._left - len(line) - CHUNK_BYTES, MOST_SPARE)
        self._check_spare()

    def _check_trailer(self, line: bytes) -> None:
        self._left += len(line)
        if self._left > TRAILER_BYTES or _TRAILER_LINE.fullmatch(line) is None:
            raise FramingError("bad trailers")


Framing = Length | Chunked | UntilClose
