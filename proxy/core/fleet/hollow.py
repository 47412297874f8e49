"""Hollow answers of one instance, and their weight against it.

A hollow answer is of no use to its client, whatever its status. Examples: a refusal (a 4xx), a
success without content, a stream that ends before its first token, an end by `abort` or `error`. An
instance that gives such answers does so at once. So it is always idle, and whatever goes by load or
by time prefers it: a quick failure would be rewarded.

A refusal may be right, and a client could have any number of them. So an instance is held against
its peers: a hollow answer counts where another instance has served the same request. It is asked
about refusals after `REFUSALS` in a row with nothing served in between. `FEW` are enough if several
clients got them, or peers have served requests meanwhile. What a client has a part of, nobody else
can be asked about: it counts once two of them have had one (core.fleet.broken).

What counts makes a trial due, which decides: at once after `DOUBTS` in a row, in a moment after the
first one. It is priced for its client at once (core.fleet.askers). Once two clients have had one,
with no newer request of another one served, the instance is priced for all (`weight`). The price is
the higher, the larger their part of its last answers, and fades with time. After a passed trial it
may refuse `SPARED` more requests that others serve, between two that it serves, before they count
in its price. Newer engines beside it may know more fields.
"""

from __future__ import annotations

import math
from typing import Final

REFUSALS: Final = 8
FEW: Final = 3
"""Refusals in a row that are taken for their clients' fault: of one client, and otherwise."""
DOUBTS: Final = 2
ALONE_S: Final = 1.0
"""Seconds in which a single one waits for a second."""
SPARED: Final = 8
"""Refusals of requests that others serve, for which one that has passed its trial is not priced."""
GAIN: Final = 0.5
"""Weight of the last answer in the part of hollow ones."""
FADE_S: Final = 10.0
"""Seconds after the last hollow answer in which it is priced, ever less."""


class Hollow:
    """One instance's hollow answers; times are the router's clock, in s.

    `doubts`: those that count, since it last served a request or a trial; `shared`: those of them
    that count for all clients; `refusals`: in a row, with their clients; `answers`: requests
    served, in all. `is_blind`: the last trial told nothing, as its peers answer it alike. `why`:
    what was wrong with the last one that counts.
    """

    __slots__ = (
        "_clients",
        "_doubted_s",
        "_failed_s",
        "_has_passed",
        "_last_s",
        "_part",
        "_peers",
        "_spared",
        "answers",
        "doubts",
        "is_blind",
        "refusals",
        "shared",
        "why",
    )

    def __init__(self) -> None:
        self.doubts = self.shared = self.refusals = 0
        self.answers = self._peers = 0
        self._clients: set[str] = set()
        self.is_blind = self._has_passed = False
        self.why = ""
        self._part = 0.0
        self._last_s = self._doubted_s = self._failed_s = -math.inf
        self._spared = 0

    def is_trial_due(self, now_s: float) -> bool:
        """Whether a trial is to say now if the instance still works."""
        return self.doubts >= DOUBTS or (self.doubts > 0 and now_s - self._doubted_s >= ALONE_S)

    def counts(self, why: str, now_s: float, *, is_refusal: bool) -> bool:
        """A hollow answer speaks against the instance; `is_refusal`: a client's error.

        Returns whether it is to be priced: for its client, or for all (`count_for_all`).
        """
        self.doubts += 1
        self.why = why
        self._failed_s = now_s
        if self.doubts == 1:
            self._doubted_s = now_s
        if is_refusal and self._spared > 0:
            self._spared -= 1
            return False
        return True

    def count_for_all(self, now_s: float) -> None:
        """The last one is priced for all clients: two have had one."""
        self.shared += 1
        self._part = self._faded(now_s)
        self._part += GAIN * (1.0 - self._part)
        self._last_s = now_s

    def key_refused(self, why: str, *, is_for_all: bool) -> None:
        """Note that it refuses the proxy's own key; if its peers do too, a trial has shown that.

        Not `is_for_all`: it may be one client's request that it refuses.
        """
        self.why = why
        if not self.is_blind:
            self.doubts += DOUBTS
            self.shared += DOUBTS * is_for_all

    def refused(
        self, client: str, now_s: float, peers: int = 0, *, is_redirect: bool = False
    ) -> bool:
        """Note a client's error; returns whether another instance is asked for a second answer.

        `peers`: how many requests its peers have served. A path's redirection is the same
        everywhere: where nobody serves, any number of them is a client's fault.
        """
        self._failed_s = now_s
        if not self.refusals:
            self._peers = peers
        self.refusals += 1
        is_odd = peers > self._peers or len(self._clients) >= FEW
        if (self.refusals > FEW and is_odd) or (self.refusals > REFUSALS and not is_redirect):
            return True
        if len(self._clients) < FEW:
            self._clients.add(client)
        return False

    def acquitted(self) -> None:
        """Another instance refuses the same request: the refusals were right."""
        self.refusals = 0
        self._clients.clear()

    def served(self, since_s: float) -> None:
        """Note a complete answer, of a request that may be older than the trouble."""
        self.answers += 1
        if since_s < self._failed_s:
            return
        self.doubts = self.shared = self.refusals = 0
        self._clients.clear()
        self._part -= GAIN * self._part
        self._spared = SPARED if self._has_passed else 0

    def passed(self, *, is_blind: bool) -> None:
        """Note an answered trial; `is_blind`: with an error that its peers give too."""
        self.doubts = self.shared = 0
        self.is_blind = is_blind
        if not is_blind:
            self.returned()
            self._has_passed, self._spared = True, SPARED

    def returned(self) -> None:
        """Note that its breaker has closed: it gets requests again."""
        self.doubts = self.shared = 0
        self._part = 0.0

    def renew(self) -> None:
        """Another process: what was says nothing any more."""
        self.returned()
        self.refusals = self._spared = 0
        self._clients.clear()
        self.is_blind = self._has_passed = False

    def weight(self, now_s: float) -> float:
        """Doubt, 0 to 1."""
        return self._faded(now_s) if self._part else 0.0

    def _faded(self, now_s: float) -> float:
        return self._part * max(0.0, 1.0 - (now_s - self._last_s) / FADE_S)
