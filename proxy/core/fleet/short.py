"""Whole answers of one instance with next to nothing in them, which may be right.

A model may answer nothing, or with one word. So such an answer speaks against nobody by itself. It
is held against the instance's peers: nearly all of its last answers are short, and most of theirs
are not. Then it is in doubt, and a trial decides: a request that asks for several tokens, which a
peer gives. Until then it is priced: for all where several clients had them, else for that client.

A trial that is passed lets its short answers rest for a while: its clients ask for no more.
"""

from __future__ import annotations

import math
from typing import Final

RECENT: Final = 8
MOST_RECENT: Final = 6
"""An instance may be in doubt where so many of its last `RECENT` answers are short."""
_ALL: Final = (1 << RECENT) - 1
REST_S, REST_MOST_S = 10.0, 60.0
"""Seconds after a passed trial in which short answers say nothing: at first, and at most."""
FADE_S: Final = 10.0
"""Seconds after the last one in which a doubted instance is priced, ever less."""
WHY: Final = "its answers end at once, with next to nothing in them"


class Short:
    """One instance's last answers; times are the router's clock, in s.

    `known`: how many of the last ones there are; `is_doubted`: a trial is to decide. `path`,
    `streams`: of the last one that counted, as the trial has to be like it.
    """

    __slots__ = (
        "_bits",
        "_client",
        "_is_shared",
        "_last_s",
        "_rest_s",
        "_rests_until_s",
        "is_doubted",
        "known",
        "path",
        "streams",
    )

    def __init__(self) -> None:
        self.known = self._bits = 0
        self.is_doubted = self.streams = self._is_shared = False
        self.path = self._client = ""
        self._last_s = self._rests_until_s = -math.inf
        self._rest_s = REST_S

    @property
    def count(self) -> int:
        """How many of the last answers are short."""
        return self._bits.bit_count()

    def note(self, client: str, *, is_short: bool) -> None:
        """A client's answer is whole."""
        if is_short:
            self._is_shared = self._bits > 0 and (self._is_shared or client != self._client)
            self._client = client
        self.known = min(RECENT, self.known + 1)
        self._bits = (self._bits << 1 | is_short) & _ALL

    def is_odd(self, now_s: float, known: int, count: int) -> bool:
        """Whether it gives short answers alone: of `known` ones of its peers so many are short."""
        is_alike = known > 0 and 2 * count >= known
        return self.count >= MOST_RECENT and now_s >= self._rests_until_s and not is_alike

    def doubt(self, path: str, now_s: float, *, streams: bool) -> None:
        """A short answer counts: a trial is due."""
        self.is_doubted, self._last_s = True, now_s
        self.path, self.streams = path, streams

    def is_doubted_for(self, client: str) -> bool:
        """Whether it is in doubt for this client's requests too."""
        return self.is_doubted and (self._is_shared or client == self._client)

    def weight(self, client: str, now_s: float) -> float:
        """Doubt for a client's requests, 0 to 1."""
        if not self.is_doubted_for(client):
            return 0.0
        return max(0.0, 1.0 - (now_s - self._last_s) / FADE_S)

    def passed(self, now_s: float) -> None:
        """A trial was answered at length, or as its peers answer it."""
        if self.is_doubted:
            is_soon = now_s - self._rests_until_s < REST_MOST_S
            self._rest_s = min(REST_MOST_S, 2.0 * self._rest_s) if is_soon else REST_S
            self._rests_until_s = now_s + self._rest_s
            self._forget()

    def clear(self) -> None:
        """What was says nothing any more."""
        self._rests_until_s = -math.inf
        self._forget()

    def _forget(self) -> None:
        self.is_doubted = False
        self.known = self._bits = 0
