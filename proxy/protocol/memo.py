"""Memo: a bounded cache of computed results, for keys with few different values."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(Generic[K, V]):
    """At most `limit` results by key; emptied when full.

    Callers look in `known` themselves: a call per look-up would cost as much as many of the
    results. Emptying is cheap and rare; a client that always sends new texts only makes the others'
    results be computed again.
    """

    __slots__ = ("_limit", "known")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.known: dict[K, V] = {}

    def keep(self, key: K, value: V) -> V:
        """Store a result and return it."""
        if len(self.known) >= self._limit:
            self.known.clear()
        self.known[key] = value
        return value
