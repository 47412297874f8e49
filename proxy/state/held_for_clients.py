"""Rooms for bytes that are held for clients: in a full one the largest of the largest owner ends.

One is for bodies of requests without an answer. They wait in the queue, for an engine that is slow
or hangs, or for another attempt. A field that costs no engine anything is held all the same.
Another is for answers that their clients do not read, the third for long heads of requests: also of
connections that are idle, or wait for a stream's end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from proxy.core.admission.largest_pays import LargestPays
from proxy.telemetry.log import Throttle, more

SHORT_BYTES = 4096
"""A shorter body is not counted: its connection costs more."""
MEMORY_PART = 4
"""Bodies have this part of the memory limit."""
MOST_BYTES = 512 << 20
"""The room where there is no memory limit: 1,300 agents with contexts of 400 kB at once."""
LARGE_BYTES, LARGE_PART = 1 << 20, 8
"""While memory is short, no body of this size is taken, and none of an owner that has this part of
the room."""
UNREAD_BYTES = 32 << 20
"""Most bytes of answers that wait for clients which do not read."""
HEADS_BYTES, HEADS_PART = 64 << 20, 8
"""Most bytes of long heads, and their part of the memory limit: 8 KiB of each of 4,000 clients."""
_WAITING = "\n"
_BODIES = "bodies of requests without an answer"
_HEADS = "long heads of requests"
_UNREAD = "answers that their clients do not read"
_log = logging.getLogger(__name__)


class Holder(Protocol):
    """Something of a client for which bytes are held."""

    @property
    def held_bytes(self) -> int:
        """Bytes that are held for it now."""

    def give_way(self) -> None:
        """End it: it is the largest of too many."""


def room_bytes(limit_bytes: int | None, max_body_bytes: int) -> int:
    """The room for bodies; a single one has room in any case. `limit_bytes`: of the process."""
    most = MOST_BYTES if limit_bytes is None else limit_bytes // MEMORY_PART
    return max(most, max_body_bytes)


def heads_bytes(limit_bytes: int | None) -> int:
    """The room for long heads. `limit_bytes`: of the process."""
    return HEADS_BYTES if limit_bytes is None else min(HEADS_BYTES, limit_bytes // HEADS_PART)


class HeldForClients:
    """One room and its holders; an owner is a tenant, or a client's address."""

    def __init__(self, what: str, room: LargestPays[Holder], now_s: Callable[[], float]) -> None:
        self._what, self.room = what, room
        self._now_s = now_s
        self._throttle = Throttle()

    def take(self, holder: Holder, owner: str, size: int) -> bool:
        """Hold so much until `free`; False where there is no room, and it has to go itself.

        There is room where another owner has more: then its largest goes.
        """
        largest = self.room.hold(holder, owner, size)
        while largest is not None:
            if (size := largest.held_bytes) < self.room.size_of(largest):
                largest = self._resize(largest, size)
                continue
            self._say()
            self.free(largest)
            if largest is holder:
                return False
            largest.give_way()
            largest = self._resize(holder, holder.held_bytes)
        return True

    def _resize(self, holder: Holder, size: int) -> Holder | None:
        """It has so much by now; the one that has to go next, if there is one."""
        return self.room.resize(holder, size)

    @property
    def held_bytes(self) -> int:
        """Bytes that are held for all together."""
        return self.room.held_bytes

    def free(self, holder: Holder) -> None:
        """Nothing is held for it any more."""
        self.room.drop(holder)

    def _say(self) -> None:
        if (before := self._throttle.turn("full", self._now_s())) is not None:
            _log.warning(
                "%s have %d of %d MiB: the largest of whoever has most end%s",
                self._what,
                self.room.held_bytes >> 20,
                self.room.max_bytes >> 20,
                more(before),
            )


class HeldBodies(HeldForClients):
    """Bodies of requests that have no answer yet."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        # The newest: on the others engines may have worked already.
        super().__init__(_BODIES, LargestPays(MOST_BYTES, ends_newest=True), now_s)

    def take(self, holder: Holder, owner: str, size: int) -> bool:
        """See `HeldForClients.take`; there is always room for a short body."""
        return size < SHORT_BYTES or super().take(holder, owner, size)

    def is_large(self, owner: str, size: int) -> bool:
        """Whether a body, which is held already, is too large while memory is short."""
        if size < SHORT_BYTES:
            return False
        has_much = self.room.owned_bytes(owner) * LARGE_PART > self.room.max_bytes
        return has_much or size >= LARGE_BYTES


class LongHeads(HeldForClients):
    """Heads of requests that run, wait, are incomplete, or were a connection's last ones."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        # The newest: the others' requests may have run for long.
        super().__init__(_HEADS, LargestPays(HEADS_BYTES, ends_newest=True), now_s)


class Unread(HeldForClients):
    """Bytes of answers that their clients do not read."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        super().__init__(_UNREAD, LargestPays(UNREAD_BYTES), now_s)
        self._waiting: dict[str, dict[Holder, asyncio.Future[None]]] = {}
        """By owner. Only those are woken that may go on: one that leaves costs no other owner."""

    def take(self, holder: Holder, owner: str, size: int) -> bool:
        """See `HeldForClients.take`; it may be less than before."""
        has_room = super().take(holder, owner, size)
        self._wake(owner)
        return has_room

    def free(self, holder: Holder) -> None:
        """Its client has read most of it, or is gone."""
        owner = self.room.owner_of(holder)
        super().free(holder)
        if owner is None:
            return
        if owner.endswith(_WAITING):
            _end(self._waiting.get(owner.removesuffix(_WAITING), {}).get(holder))
        else:
            self._wake(owner)

    def _resize(self, holder: Holder, size: int) -> Holder | None:
        largest, owner = super()._resize(holder, size), self.room.owner_of(holder)
        if owner is not None:
            self._wake(owner)
        return largest

    def _wake(self, owner: str) -> None:
        """Let those that wait go on, if their owner's clients have read enough."""
        if owner in self._waiting and not self.is_scarce(owner):
            for turn in self._waiting.pop(owner).values():
                _end(turn)

    def is_scarce(self, owner: str) -> bool:
        """Whether no more should come for an owner's clients: they leave half of it unread."""
        return 2 * self.room.owned_bytes(owner) > self.room.max_bytes

    def enter(self, holder: Holder, owner: str, size: int) -> bool:
        """Hold what has come of an event, of which the rest waits, see `take`.

        It does not count among what the owner's clients leave unread: that is what it waits for.
        """
        return self.take(holder, owner + _WAITING, size)

    async def room_for(self, holder: Holder, owner: str) -> None:
        """Wait until more may come for one that was entered, or it had to give way."""
        while holder in self.room and self.is_scarce(owner):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(owner, {})[holder] = turn
            try:
                await turn
            finally:
                self._forget(holder, owner)
        self.free(holder)

    def _forget(self, holder: Holder, owner: str) -> None:
        """It does not wait, whether it was woken or is gone."""
        others = self._waiting.get(owner, {})
        others.pop(holder, None)
        if not others:
            self._waiting.pop(owner, None)


def _end(turn: asyncio.Future[None] | None) -> None:
    if turn is not None and not turn.done():
        turn.set_result(None)
