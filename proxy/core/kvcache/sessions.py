"""Which instance a session lives on, and which one holds a response that it stored.

Both tables are bounded by time and count; the least recently used entry goes first.

A session's home is the cache that has its KV. Of one that is lost (its process is gone) nothing is
swept: the session has no home any more, and its entry leaves as others do, or is used again.
An engine keeps the responses that it stores in its own memory, so they are lost with its process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from proxy.core.kvcache.engine_cache import EngineCache


@dataclass(slots=True, init=False)
class _Home:
    cache: EngineCache
    turn: int
    used_s: float

    def __init__(self, cache: EngineCache, turn: int, used_s: float) -> None:
        self.cache, self.turn, self.used_s = cache, turn, used_s


Row = tuple[str, str, int, float]
"""A session's id, instance, turn and last use."""


class Sessions:
    """Sticky session table. `ttl_s` counts from a session's last use.

    How many live on an instance is in its cache (`EngineCache.sessions`); the table's length counts
    the homeless ones too.
    """

    def __init__(self, ttl_s: float, max_sessions: int) -> None:
        self._ttl_s = ttl_s
        self._max = max_sessions
        self._homes: OrderedDict[str, _Home] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, session_id: str | None, now_s: float) -> str | None:
        """The instance that holds the session's KV, or None when unknown, expired or lost."""
        self._expire(now_s)
        home = self._homes.get(session_id) if session_id is not None else None
        return None if home is None or home.cache.is_lost else home.cache.name

    def assign(self, session_id: str | None, cache: EngineCache, now_s: float) -> int:
        """Note that the session is served there; gives the turn's number, from 0."""
        if session_id is None:
            return 0
        self._expire(now_s)
        turn = 0
        if (old := self._homes.pop(session_id, None)) is not None:
            old.cache.sessions -= 1
            turn = 0 if old.cache.is_lost else old.turn + 1
        self._homes[session_id] = _Home(cache, turn, now_s)
        cache.sessions += 1
        if len(self._homes) > self._max:
            self._drop(next(iter(self._homes)))
        return turn

    def move(self, session_id: str | None, cache: EngineCache, turn: int, now_s: float) -> None:
        """The same turn goes on elsewhere, also when its old home was lost meanwhile."""
        self.assign(session_id, cache, now_s)
        if session_id is not None:
            self._homes[session_id].turn = turn

    def end_session(self, session_id: str) -> bool:
        """Forget one session; tells whether it had a home."""
        home = self._homes.get(session_id)
        if home is None:
            return False
        self._drop(session_id)
        return not home.cache.is_lost

    def rows(self) -> Iterator[Row]:
        """The sessions that have a home at this moment; the longest idle first."""
        homes = [(s, home) for s, home in self._homes.items() if not home.cache.is_lost]
        return map(_row, homes)

    def adopt(self, rows: Iterable[tuple[str, EngineCache, int, float]]) -> None:
        """Take over rows of another table, the longest idle first; older than anything here."""
        for session_id, cache, turn, used_s in reversed(list(rows)):
            if session_id not in self._homes and len(self._homes) < self._max:
                self._homes[session_id] = _Home(cache, turn, used_s)
                self._homes.move_to_end(session_id, last=False)
                cache.sessions += 1

    def _expire(self, now_s: float) -> None:
        while self._homes:
            session_id, home = next(iter(self._homes.items()))
            if now_s - home.used_s <= self._ttl_s:
                return
            self._drop(session_id)

    def _drop(self, session_id: str) -> None:
        self._homes.pop(session_id).cache.sessions -= 1


def _row(entry: tuple[str, _Home]) -> Row:
    session_id, home = entry
    return session_id, home.cache.name, home.turn, home.used_s


class StoredResponses:
    """The instance that holds each stored response, by the response's key.

    `ttl_s` counts from a response's last use. A holder whose process is gone is still known, so
    that a client can be told; its cache says `is_lost`.
    """

    def __init__(self, ttl_s: float, most: int) -> None:
        self._ttl_s = ttl_s
        self._most = most
        self._holders: OrderedDict[str, tuple[EngineCache, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, key: str, cache: EngineCache, now_s: float) -> None:
        """An instance has stored a response, or one there was used."""
        self._expire(now_s)
        self._holders.pop(key, None)
        self._holders[key] = cache, now_s
        if len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def holder(self, key: str, now_s: float) -> EngineCache | None:
        """The cache of the instance that holds the response, lost or not; None where unknown."""
        self._expire(now_s)
        found = self._holders.get(key)
        if found is None:
            return None
        self.note(key, found[0], now_s)
        return found[0]

    def forget(self, key: str) -> None:
        """The response was deleted."""
        self._holders.pop(key, None)

    def rows(self) -> Iterator[tuple[str, str, float]]:
        """Key, instance and last use of the responses that are held; the longest unused first."""
        held = [
            (k, cache.name, used_s)
            for k, (cache, used_s) in self._holders.items()
            if not cache.is_lost
        ]
        return iter(held)

    def adopt(self, rows: Iterable[tuple[str, EngineCache, float]]) -> None:
        """Take over rows of another table, the longest unused first; older than anything here."""
        for key, cache, used_s in reversed(list(rows)):
            if key not in self._holders and len(self._holders) < self._most:
                self._holders[key] = cache, used_s
                self._holders.move_to_end(key, last=False)

    def _expire(self, now_s: float) -> None:
        while self._holders:
            key, (_, used_s) = next(iter(self._holders.items()))
            if now_s - used_s <= self._ttl_s:
                return
            del self._holders[key]
