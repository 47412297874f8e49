"""Framing and checks of client requests, stricter than the HTTP parser's.

The parser in front accepts blanks in the request line, other versions, any text as Host. A reverse
proxy must not: servers behind it may read the same bytes differently. Ends of messages are also
found here, apart from the parser: bytes on which the two disagree are refused.
"""

from __future__ import annotations

import re
from enum import StrEnum
from ipaddress import IPv6Address

from proxy.protocol.framing import CHUNK_BYTES, Chunked

HEAD_BYTES = 65536
"""A longer head is refused."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
FIRST_CHUNKS, MORE_CHUNKS = 2048, 16
"""Small chunks that a connection may send, and more of them with each request."""
_MOST_SPARE = FIRST_CHUNKS * CHUNK_BYTES
_TARGET = re.compile(r"/[!\"$-\[\]-~]*")
_NAME = re.compile(r"([A-Za-z0-9._~-]+|\[([0-9A-Fa-f:.]{2,45})\])?(?::([0-9]{0,5}))?")
_END = b"\r\n\r\n"
_PATH = re.compile(rb"[^ \r\n]{1,32} (/[!-~]{0,8190})")
"""Begins a request line, also one that is refused."""


class Refusal(StrEnum):
    """Why a connection's bytes were refused as a request: the label of a metric."""

    SYNTAX = "syntax"
    LINE = "request_line"
    METHOD = "method"
    TARGET = "target"
    VERSION = "version"
    HOST = "host"
    HEADER = "header"
    HEAD_SIZE = "head_size"
    HEAD_LATE = "head_timeout"
    FRAMING = "framing"
    CHUNKS = "small_chunks"
    RECORDS = "small_records"
    BODY_SIZE = "body_size"
    EXPECTATION = "expectation"
    UPGRADE = "upgrade"
    PIPELINED = "pipelined"
    SILENT = "silent"
    """Nothing came within the header timeout, or before the place was needed for another."""


def is_target(target: str) -> bool:
    """Whether a request target is a path with a query, in printable ASCII, without a fragment."""
    return _TARGET.fullmatch(target) is not None


def is_authority(host: str) -> bool:
    """Whether a Host is a name or an address with an optional port (RFC 3986 3.2, no user, no %).

    An empty Host says that the target has no authority (RFC 9112 3.2).
    """
    match = _NAME.fullmatch(host)
    if match is None:
        return False
    name, address, port = match.groups()
    return int(port or 0) <= 65535 and (name is not None or not host) and _is_ipv6(address)


def _is_ipv6(address: str | None) -> bool:
    if address is None:
        return True
    try:
        IPv6Address(address)
    except ValueError:
        return False
    return True


def is_line(head: bytes, start: int = 0) -> bool:
    """Whether the request line at `start` has exactly two blanks."""
    return head.count(b" ", start, head.find(b"\r\n", start)) == 2


class RequestFraming:
    """Finds where messages begin and end in a connection's bytes.

    Call `feed` for every piece; `head` for each message that the parser has found, then `body` with
    its framing. `left`: bytes of a body of known length that are still to come.
    """

    __slots__ = ("_chunks", "_spare", "left", "pending")

    def __init__(self) -> None:
        self.left = 0
        self.pending = bytearray()
        """Bytes from the beginning of a message whose head `head` has not returned yet."""
        self._chunks: Chunked | None = None
        self._spare = _MOST_SPARE

    @property
    def is_between(self) -> bool:
        """Whether the bytes so far end between two messages."""
        return not self.left and not self.pending and self._chunks is None

    @property
    def in_body(self) -> bool:
        """Whether a body has begun and not ended."""
        return bool(self.left) or self._chunks is not None

    @property
    def in_head(self) -> bool:
        """Whether a head has begun and not ended."""
        return bool(self.pending)

    @property
    def target(self) -> str:
        """The target of the request that has begun, for an answer in its form; empty: unknown."""
        line = _PATH.match(self.pending)
        return line[1].decode() if line else ""

    def feed(self, data: bytes) -> None:
        """Add the next bytes. Raises FramingError if a chunked body's chunks are invalid."""
        if self._chunks is not None:
            chunks = self._chunks
            chunks.feed(data)
            if not chunks.is_done:
                return
            data = data[chunks.end :]
            self._spare = chunks.spare
            self._chunks = None
        elif self.left:
            here = min(self.left, len(data))
            self.left -= here
            data = data[here:]
        self.pending += data
        if self.pending.startswith((b"\r", b"\n")):
            self.pending = self.pending.lstrip(b"\r\n")  # some clients end a body with a line end

    def head(self) -> bytes | None:
        """Remove and return the head of the next message; None if it is incomplete."""
        end = self.pending.find(_END)
        if end < 0 or self.left or self._chunks is not None:
            return None
        head = bytes(self.pending[: end + 4])
        del self.pending[: end + 4]
        return head

    def body(self, length: int | None) -> None:
        """Set the framing of the body after the head: `length` bytes, or chunks (None).

        Raises FramingError.
        """
        data = bytes(self.pending)
        self.pending.clear()
        if length is None:
            earned = self._spare + MORE_CHUNKS * CHUNK_BYTES
            self._chunks = Chunked(min(earned, _MOST_SPARE))
        self.left = length or 0
        self.feed(data)
