"""Which instance a session lives on: bounded by time and count, least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(slots=True, init=False)
class _Home:
    instance: str
    turn: int
    used_s: float

    def __init__(self, instance: str, turn: int, used_s: float) -> None:
        self.instance, self.turn, self.used_s = instance, turn, used_s


Row = tuple[str, str, int, float]
"""A session's id, instance, turn and last use."""


def _row(entry: tuple[str, _Home]) -> Row:
    session_id, home = entry
    return session_id, home.instance, home.turn, home.used_s


class Sessions:
    """Sticky session table. `ttl_s` counts from a session's last use."""

    def __init__(self, ttl_s: float, max_sessions: int) -> None:
        self._ttl_s = ttl_s
        self._max = max_sessions
        self._homes: OrderedDict[str, _Home] = OrderedDict()
        self._per_instance: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, session_id: str | None, now_s: float) -> str | None:
        """The instance that holds the session's KV, or None when unknown or expired."""
        self._expire(now_s)
        home = self._homes.get(session_id) if session_id is not None else None
        return None if home is None else home.instance

    def count(self, instance: str) -> int:
        """How many sessions live on an instance."""
        return self._per_instance.get(instance, 0)

    def counts(self, instances: Iterable[str]) -> list[int]:
        """The same of several."""
        per_instance = self._per_instance
        return [per_instance.get(instance, 0) for instance in instances]

    def assign(self, session_id: str | None, instance: str, now_s: float) -> int:
        """Note that the session is served by `instance`; gives the turn's number, from 0."""
        if session_id is None:
            return 0
        self._expire(now_s)
        turn = 0
        if (old := self._homes.pop(session_id, None)) is not None:
            self._per_instance[old.instance] -= 1
            turn = old.turn + 1
        self._homes[session_id] = _Home(instance, turn, now_s)
        self._per_instance[instance] = self.count(instance) + 1
        if len(self._homes) > self._max:
            self._drop(next(iter(self._homes)))
        return turn

    def move(self, session_id: str | None, instance: str, turn: int, now_s: float) -> None:
        """The same turn goes on elsewhere, also when its old home was forgotten meanwhile."""
        self.assign(session_id, instance, now_s)
        if session_id is not None:
            self._homes[session_id].turn = turn

    def end(self, session_id: str) -> bool:
        """Forget one session; tells whether it was known."""
        known = session_id in self._homes
        if known:
            self._drop(session_id)
        return known

    def rows(self) -> Iterator[Row]:
        """The sessions there are at this moment, for `adopt`; the longest idle first."""
        return map(_row, list(self._homes.items()))

    def adopt(self, rows: Iterable[Row]) -> None:
        """Take over rows of another table, the longest idle first; older than anything here."""
        for session_id, instance, turn, used_s in reversed(list(rows)):
            if session_id not in self._homes and len(self._homes) < self._max:
                self._homes[session_id] = _Home(instance, turn, used_s)
                self._homes.move_to_end(session_id, last=False)
                self._per_instance[instance] = self.count(instance) + 1

    def forget(self, instance: str) -> None:
        """Forget every session of an instance that has gone."""
        for session_id in [s for s, home in self._homes.items() if home.instance == instance]:
            self._drop(session_id)
        self._per_instance.pop(instance, None)

    def _expire(self, now_s: float) -> None:
        while self._homes:
            session_id, home = next(iter(self._homes.items()))
            if now_s - home.used_s <= self._ttl_s:
                return
            self._drop(session_id)

    def _drop(self, session_id: str) -> None:
        self._per_instance[self._homes.pop(session_id).instance] -= 1
