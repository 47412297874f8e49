"""The turns in which streams migrate, where an instance with many of them is lost or drains."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final, Protocol

BODIES_BYTES: Final = 16 << 20
"""Most bytes of the bodies that are sent at once. Of each there are up to three copies until its
instance answers."""


class Moving(Protocol):
    """A stream that is to migrate."""

    @property
    def body_bytes(self) -> int:
        """Bytes of the body that it would send now."""

    def begin(self) -> None:
        """Its turn has come; it may leave at once."""


class MoveTurns:
    """Streams that migrate, and those that wait for it, in their order.

    One begins in each turn of the event loop, which serves all others in between.
    """

    __slots__ = ("_is_called", "_moving", "_waiting", "most_bytes", "taken_bytes")

    def __init__(self, most_bytes: int = BODIES_BYTES) -> None:
        self.most_bytes, self.taken_bytes = most_bytes, 0
        self._waiting: OrderedDict[Moving, None] = OrderedDict()
        self._moving: dict[Moving, int] = {}
        self._is_called = False

    def has(self, stream: Moving) -> bool:
        """Whether it is this stream's turn."""
        return stream in self._moving

    def enter(self, stream: Moving, *, is_next: bool = False) -> None:
        """Wait for a turn; `is_next`: before all others, as it has begun already."""
        if stream in self._moving:
            return
        self._waiting.setdefault(stream)
        if is_next:
            self._waiting.move_to_end(stream, last=False)
        self._call()

    def leave(self, stream: Moving) -> None:
        """It sends no body any more, or waits no longer; without effect for any other one."""
        self._waiting.pop(stream, None)
        self.taken_bytes -= self._moving.pop(stream, 0)
        self._call()

    def _call(self) -> None:
        if self._waiting and not self._is_called:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_called = False
        stream = next(iter(self._waiting), None)
        if stream is None:
            return
        size = stream.body_bytes
        if self._moving and self.taken_bytes + size > self.most_bytes:
            return  # until one of them leaves
        del self._waiting[stream]
        self._moving[stream] = size
        self.taken_bytes += size
        stream.begin()
        self._call()
