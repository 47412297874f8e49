"""What heads, and requests that wait, hold of a connection: a share of a room, beyond 4 KiB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from aiohttp.http_parser import RawRequestMessage
from aiohttp.web import BaseRequest

from proxy.net.server.aiohttp_adapter import Unreadable

UNCOUNTED_BYTES = 4096
"""Heads of a connection that hold less are not counted: the connection costs more."""
COPIES, COPIES_IN_PARTS = 2, 3
"""A head is kept as bytes and as text; one that is incomplete also by its framing."""


class Room(Protocol):
    """Room for what is held for clients, see `HeldForClients`."""

    def take(self, holder: Any, owner: str, size: int) -> bool:
        """Hold so much; False where the holder has to go."""

    def free(self, holder: Any) -> None:
        """Nothing is held any more."""


class HeldHeads:
    """The share of a connection's heads in the room; `give_way` ends the connection."""

    __slots__ = ("_owner", "_room", "give_way", "held_bytes")

    def __init__(self, room: Room, owner: str, give_way: Callable[[], None]) -> None:
        self._room, self._owner, self.give_way = room, owner, give_way
        self.held_bytes = 0

    def hold(self, size: int) -> None:
        """Hold so much from now on. The connection ends where there is no room for it."""
        self.held_bytes = size
        if not self._room.take(self, self._owner, size):
            self.give_way()

    def free(self) -> None:
        """Nothing is held any more."""
        self._room.free(self)


def size_of(message: RawRequestMessage | Unreadable | BaseRequest) -> int:
    """Bytes of a head, about; none of one that could not be read."""
    if isinstance(message, Unreadable):
        return 0
    target = message.raw_path if isinstance(message, BaseRequest) else message.path
    return len(target) + sum(len(name) + len(value) for name, value in message.raw_headers)
