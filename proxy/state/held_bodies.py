"""The bodies of requests that have no answer yet, from when they are read: one room for all.

They wait in the queue, for an engine that is slow or hangs, or for another attempt. Whether they
cost an engine anything is not asked here: a field that no engine reads is held all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from proxy.core.admission.largest_pays import LargestPays
from proxy.telemetry.log import Throttle, more
from proxy.telemetry.metrics import Metrics

SHORT_BYTES = 4096
"""A shorter body is not counted: its connection costs more."""
MEMORY_PART = 4
"""Bodies have this part of the memory limit."""
MOST_BYTES = 512 << 20
"""The room where there is no memory limit: 1,300 agents with contexts of 400 kB at once."""
LARGE_BYTES, LARGE_PART = 1 << 20, 8
"""While memory is short, no body of this size is taken, and none of an owner that has this part of
the room."""
_log = logging.getLogger(__name__)


class Holder(Protocol):
    """A request whose body is held."""

    def give_way(self) -> None:
        """End it: its body is the largest of too many."""


def room_bytes(limit_bytes: int | None, max_body_bytes: int) -> int:
    """The room for bodies; a single one has room in any case. `limit_bytes`: of the process."""
    most = MOST_BYTES if limit_bytes is None else limit_bytes // MEMORY_PART
    return max(most, max_body_bytes)


class HeldBodies:
    """Who holds how much; an owner is a tenant, or a client's address."""

    def __init__(self, now_s: Callable[[], float], metrics: Metrics) -> None:
        self.room: LargestPays[Holder] = LargestPays(MOST_BYTES)
        metrics.held_bytes.set_function(lambda: self.room.held_bytes)
        self._now_s = now_s
        self._throttle = Throttle()

    def take(self, holder: Holder, owner: str, size: int) -> bool:
        """Hold a body until `free`; False where there is no room, and it has to go itself.

        There is room where another owner has more: then its largest goes.
        """
        if size < SHORT_BYTES:
            return True
        held_bytes = self.room.held_bytes + size
        if (largest := self.room.hold(holder, owner, size)) is None:
            return True
        self._say(held_bytes)
        while largest is not None:
            self.room.drop(largest)
            if largest is holder:
                return False
            largest.give_way()
            largest = self.room.hold(holder, owner, size)
        return True

    def free(self, holder: Holder) -> None:
        """A request has its answer, or is over."""
        self.room.drop(holder)

    def is_large(self, owner: str, size: int) -> bool:
        """Whether a body, which is held already, is too large while memory is short."""
        if size < SHORT_BYTES:
            return False
        has_much = self.room.owned_bytes(owner) * LARGE_PART > self.room.max_bytes
        return has_much or size >= LARGE_BYTES

    def _say(self, held_bytes: int) -> None:
        if (before := self._throttle.turn("full", self._now_s())) is not None:
            _log.warning(
                "bodies of requests without an answer have %d of %d MiB: the largest of whoever "
                "has most end%s",
                held_bytes >> 20,
                self.room.max_bytes >> 20,
                more(before),
            )
