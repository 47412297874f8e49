"""A bounded memory of what was worked out before, for texts of which few different ones occur."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(Generic[K, V]):
    """At most `limit` results by what they were made of; emptied when it is full.

    Readers look in `known` themselves: a call for each look-up would cost as much as many of the
    results. To be emptied is cheap and rare; a client that sends ever new texts makes the results
    of the other clients be worked out once more.
    """

    __slots__ = ("_limit", "known")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.known: dict[K, V] = {}

    def keep(self, key: K, value: V) -> V:
        """Remember a result, and give it back."""
        if len(self.known) >= self._limit:
            self.known.clear()
        self.known[key] = value
        return value
