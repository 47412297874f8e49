"""Answers of one instance that broke off after they had begun: whose they were, and what that says.

Its client has a part of such an answer, so nobody else can be asked whose fault the break is: that
of an engine that fails, or of one request on which every engine fails. So the breaks of one client
make a trial due and count for nothing until it fails. Once a second client has had one, with no
newer request served in between, they count as any failure.

A client is a tenant, or else a session. After a trial that was passed, the breaks of the client
that had them alone make no other one due for a while.
"""

from __future__ import annotations

import math
from typing import Final

TRIED: Final = 2
"""Breaks in a row after which a trial is due at once."""
ALONE_S: Final = 1.0
"""Seconds in which a single one waits for a second."""
REST_S: Final = 10.0
"""Seconds after a trial that was passed in which its client's breaks make no other one due."""


class Broken:
    """The breaks in a row; times are the router's clock, in s.

    `row`: their number since a newer request was served, or a trial was passed; `cuts`: those that
    were no whole answers; `late`: those of an answer that fell silent. `is_open`: a trial has to
    say whose fault they are.
    """

    __slots__ = (
        "_clients",
        "_first_s",
        "_last_s",
        "_own",
        "_rests_until_s",
        "cuts",
        "is_open",
        "late",
        "row",
    )

    def __init__(self) -> None:
        self._clients: list[str] = []
        self._own: list[str] = []
        self._first_s = self._last_s = self._rests_until_s = -math.inf
        self.row = self.cuts = self.late = 0
        self.is_open = False

    def broke(self, client: str, now_s: float, *, is_cut: bool, is_late: bool) -> None:
        """An answer to a client broke off."""
        if not self.row:
            self._first_s = now_s
        self.row += 1
        self._last_s = now_s
        self.cuts += is_cut
        self.late += is_late
        if len(self._clients) < 2 and client not in self._clients:
            self._clients.append(client)
        is_own = self._clients == self._own and now_s < self._rests_until_s
        self.is_open = self.is_open or not is_own

    @property
    def is_several(self) -> bool:
        """Whether more than one client has had a break."""
        return len(self._clients) > 1

    def is_trial_due(self, now_s: float) -> bool:
        """Whether a trial has to say so now."""
        return self.is_open and (self.row >= TRIED or now_s - self._first_s >= ALONE_S)

    def served(self, since_s: float) -> None:
        """A client has a whole answer, of a request that may be older than the breaks."""
        if self.row and since_s >= self._last_s:
            self.clear()

    def passed(self, now_s: float) -> None:
        """A trial was answered, as a stream to its end."""
        if self.row:
            self._own, self._rests_until_s = self._clients, now_s + REST_S
            self.clear()

    def clear(self) -> None:
        """What was says nothing any more."""
        self.row = self.cuts = self.late = 0
        self.is_open, self._clients = False, []
