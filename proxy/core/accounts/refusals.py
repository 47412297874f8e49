"""Busy answers of one instance: whether they speak for the instance, or of one client's request.

An engine may say "busy" (429, 503) to a request that no engine takes: one that is too wide for its
queue, or of a user or a model with a limit of its own. Its first word is no state of the engine.
Another instance that serves the request, or a second refusal in a row, closes the instance to that
client, and leaves it open to others. Once it has refused two it is closed to all.

It is closed for as long as the engine says, and tried meanwhile: after a second, and after twice as
long each time that it refuses again. Each of the two clients has such times of its own, and all
others together. It is tried ten times as soon after the end of an answer: one wide request may have
filled it for a moment.

Answers speak for it. One to another client opens an instance that is closed for the refusals of a
single client. After one to a newer request of another client, the refusals were that client's own,
and more of them are needed.
"""

from __future__ import annotations

import math
from typing import Final

OWN: Final = 4
"""Refusals in a row, beyond the usual, of a client beside whom others were served."""
LEAST_S: Final = 1.0
ROOM_S: Final = 0.1
"""As `LEAST_S`, where a request has ended since it refused."""


class _Tries:
    """When clients may try an instance that is closed to them; they have been refused by then."""

    __slots__ = ("count", "refused_s", "try_s")

    def __init__(self, now_s: float) -> None:
        self.refused_s, self.try_s, self.count = now_s, now_s + LEAST_S, 1

    def refused(self, now_s: float) -> None:
        """Wait for twice as long; requests that were on their way before change nothing."""
        if now_s >= self.try_s:
            self.refused_s, self.try_s = now_s, now_s + LEAST_S * 2.0 ** min(self.count, 10)
            self.count += 1

    def ended(self, now_s: float) -> None:
        """A request has ended there."""
        room_s = self.refused_s + ROOM_S * 2.0 ** min(self.count - 1, 10)
        self.try_s = min(self.try_s, max(now_s, room_s))


_OTHERS: Final = "\n"
"""In place of the clients that are not known; no client has such a name."""


class Refusals:
    """The busy answers of one instance since it last took a new request; times in s.

    A client is a tenant, or else a session; those without a name (empty) are one.
    """

    __slots__ = ("_clients", "_last_s", "_own", "_row", "_tries")

    def __init__(self) -> None:
        self._clients: list[str] = []
        self._own = ""
        self._row = 0
        self._last_s = -math.inf
        self._tries: dict[str, _Tries] = {}

    def refused(self, client: str, busy_s: float, now_s: float) -> float:
        """It said busy to a client, for so long; returns how long it is closed, see `until_s`."""
        self._row += 1
        self._last_s = now_s
        if len(self._clients) < 2 and client not in self._clients:
            self._clients.append(client)
        self._delay(client if client in self._clients else _OTHERS, now_s)
        if self._is_several:
            self._tries.setdefault(_OTHERS, _Tries(now_s))
            return busy_s
        doubled = self._row - (2 + OWN if self._is_own(client) else 2)
        return min(busy_s, LEAST_S * 2.0 ** min(doubled, 10)) if doubled >= 0 else 0.0

    def judged(self, client: str, busy_s: float, now_s: float) -> float:
        """Another instance has by now served the request that it refused; returns the same.

        A newer request that this one has served in between says more.
        """
        if client not in self._clients and not self._is_several:
            return 0.0
        if self._is_own(client) and self._row <= OWN:
            return 0.0
        if (tries := self._tries.get(client)) is not None:
            tries.try_s = max(tries.try_s, now_s + LEAST_S)
        return busy_s

    def until_s(self, client: str, until_s: float) -> float:
        """Until when it is closed to a client, where it is closed until then to some."""
        if not self._clients:
            return until_s
        tries = self._tries.get(client) or self._tries.get(_OTHERS)
        return -math.inf if tries is None else min(until_s, tries.try_s)

    def tries_s(self) -> list[float]:
        """When clients may try it."""
        return [tries.try_s for tries in self._tries.values()]

    def is_own(self, client: str) -> bool:
        """Whether a closed one is open to others than this client."""
        return bool(client) and self._clients == [client] and _OTHERS not in self._tries

    def served(self, client: str, since_s: float) -> bool:
        """It serves a client's request that it has had since then; whether that opens it."""
        if not self._row:
            return False
        is_other, is_newer = not client or client not in self._clients, since_s >= self._last_s
        opens = is_newer or (is_other and not self._is_several)
        if is_newer:
            alone = "" if self._is_several or not is_other else self._clients[0]
            self._own = alone if is_other else ""
            self._clients.clear()
            self._row = 0
        if opens:
            self._tries.clear()
        return opens

    def ended(self, now_s: float) -> None:
        """One of its requests has ended: it may have room again."""
        for tries in self._tries.values():
            tries.ended(now_s)

    def _delay(self, client: str, now_s: float) -> None:
        """Set when a client that was refused may try again."""
        if (tries := self._tries.get(client)) is None:
            self._tries[client] = _Tries(now_s)
        else:
            tries.refused(now_s)

    @property
    def _is_several(self) -> bool:
        return len(self._clients) > 1

    def _is_own(self, client: str) -> bool:
        return bool(client) and client == self._own and not self._is_several
