"""Busy answers of one instance: whether they speak for the instance, or of one client's request.

An engine may say "busy" (429, 503) to a request that no engine takes: one that is too wide for its
queue, or of a user or a model with a limit of its own. Its first word is no state of the engine.
So an instance is closed for all once something else says so too: another instance that serves the
same request, a refusal to another client, or a second one in a row. A second one in a row to the
same client closes it for a second, each further one for twice as long, up to what the engine asks.

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


class Refusals:
    """The busy answers of one instance since it last took a new request; times in s.

    A client is a tenant, or else a session; one without a name (empty) is never known again.
    """

    __slots__ = ("_clients", "_last_s", "_own", "_row")

    def __init__(self) -> None:
        self._clients: list[str] = []
        self._own = ""
        self._row = 0
        self._last_s = -math.inf

    def refused(self, client: str, busy_s: float, now_s: float) -> float:
        """It said busy to a client, for so long; returns for how long it is closed to all."""
        self._row += 1
        self._last_s = now_s
        if len(self._clients) < 2 and client not in self._clients:
            self._clients.append(client)
        if self._is_several:
            return busy_s
        doubled = self._row - (2 + OWN if self._is_own(client) else 2)
        return min(busy_s, LEAST_S * 2.0 ** min(doubled, 10)) if doubled >= 0 else 0.0

    def judged(self, client: str, busy_s: float) -> float:
        """Another instance has served the request that it refused; returns the same."""
        is_own = self._is_own(client) and self._row <= OWN
        return 0.0 if is_own else busy_s

    def binds(self, client: str) -> bool:
        """Whether the instance is closed to this client too, while it is closed."""
        return not self._clients or self._is_several or client in self._clients

    def binds_only(self, client: str) -> bool:
        """Whether it is closed to this client, and another one is to try."""
        return bool(client) and self._clients == [client]

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
        return opens

    @property
    def _is_several(self) -> bool:
        return len(self._clients) > 1

    def _is_own(self, client: str) -> bool:
        return bool(client) and client == self._own and not self._is_several
