"""What each client's requests say about one instance: believed for that client, and by nobody else.

One client's failures may be the fault of its own requests, or of the instance. For that client it
is all one: it fails here, and is served elsewhere. So the instance is priced for its requests, by
the part of failures in its last answers here. Where all instances fail it alike, none is priced
(core.fleet.members). For others it is priced as far as two clients say so, until a newer request of
another one is served.

Two failures in a row are the least that is priced, or one hollow answer. A whole answer of that
client takes half of it away, and time all of it: the first time after `FADE_S`. Each further
failure after that doubles the time. A trial that was passed changes nothing, as it is no request of
that client.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

MOST: Final = 8
"""Clients that are kept, one entry each. Where as many have failed, two say so for all."""
GAIN: Final = 0.5
HOLLOW_GAIN: Final = 0.75
"""Weight of the last answer in the part of failures; a hollow one is priced by itself."""
LEAST: Final = 0.125
"""A part below this is none."""
FADE_S, FADE_MOST_S = 10.0, 60.0
"""Seconds after its last failure in which a client is kept away, ever less: at first, at most."""
KEPT_S: Final = 300.0
"""Seconds after which a client's failures are forgotten."""


DOUBTS: Final = 5
"""Failures that nobody has judged which say that an instance may fail at everything."""
AGREED: Final = 2
"""How many of them have to be other clients' than the one that has most."""


class Unjudged:
    """Failures since an instance last worked that no other one's answer has judged, by client."""

    __slots__ = ("_by_client", "count")

    def __init__(self) -> None:
        self.count = 0
        self._by_client: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._by_client)

    def failed(self, client: str) -> None:
        """A client's request failed. Where the table is full, several say so."""
        self.count += 1
        if client in self._by_client or len(self._by_client) < MOST:
            self._by_client[client] = self._by_client.get(client, 0) + 1

    def judged(self, client: str) -> None:
        """Another instance has served a client's request that failed."""
        own = self._by_client.pop(client, 0)
        if own > 1:
            self._by_client[client] = own - 1
        if own or self.count > sum(self._by_client.values()):
            self.count -= 1

    def are_enough(self, client: str) -> bool:
        """Whether a client's further failure would say nothing: by its own, or as several agree."""
        if self.count < DOUBTS:
            return False
        if self._by_client.get(client, 0) >= DOUBTS:
            return True
        return self.count - max(self._by_client.values(), default=0) >= AGREED

    def clear(self) -> None:
        """It works."""
        self.count = 0
        self._by_client.clear()


@dataclass(slots=True)
class _Part:
    """One client's part of failures; `first_s`, `last_s`: of those since it was last away."""

    part: float
    first_s: float
    last_s: float
    fade_s: float

    def weight(self, now_s: float) -> float:
        fresh = 1.0 - (now_s - self.last_s) / self.fade_s
        return max(0.0, 2.0 * self.part - 1.0) * max(0.0, min(1.0, fresh))


class Askers:
    """The clients that one instance has failed; times are the router's clock, in s."""

    __slots__ = ("_parts", "_worked_s")

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._worked_s = -math.inf

    def __len__(self) -> int:
        return len(self._parts)

    def failed(self, client: str, now_s: float, gain: float = GAIN) -> None:
        """A client's answer broke off here, or another instance has served what failed here."""
        one = self._parts.pop(client, None)
        if one is None or now_s - one.last_s > KEPT_S:
            one = _Part(0.0, now_s, now_s, FADE_S)
        if now_s - one.last_s >= one.fade_s / 2:
            one.fade_s, one.first_s = min(FADE_MOST_S, 2.0 * one.fade_s), now_s
        one.part += gain * (1.0 - one.part)
        one.last_s = now_s
        if len(self._parts) >= MOST:
            del self._parts[next(iter(self._parts))]
        self._parts[client] = one

    def served(self, client: str, since_s: float) -> None:
        """A client has a whole answer, of a request that may be older than its failures."""
        one = self._parts.get(client)
        if one is None:
            self._worked_s = max(self._worked_s, since_s)
            return
        if since_s < one.last_s:
            return
        one.part -= GAIN * one.part
        if one.part < LEAST:
            del self._parts[client]

    def goes_on(self, now_s: float) -> None:
        """A trial was not answered in time either: those who are kept away stay so."""
        for one in self._parts.values():
            if one.weight(now_s) > 0.0:
                one.last_s = now_s

    def weight(self, client: str, now_s: float) -> float:
        """Doubt for a client's requests, 0 to 1."""
        if not self._parts:
            return 0.0
        most = second = 0.0
        for one in self._parts.values():
            weight = one.weight(now_s) if one.first_s > self._worked_s else 0.0
            most, second = max(most, weight), max(second, min(most, weight))
        own = self._parts.get(client)
        return second if own is None else max(second, own.weight(now_s))

    def has(self, client: str) -> bool:
        """Whether it has failed this client, and has not served it as often since."""
        return client in self._parts

    def are_several(self, now_s: float) -> bool:
        """Whether two clients or more say so, with no newer request of another one served."""
        parts = self._parts.values()
        fresh = [p for p in parts if p.first_s > self._worked_s and now_s - p.last_s < p.fade_s]
        return len(fresh) > 1

    def is_any(self, now_s: float) -> bool:
        """Whether any client is kept away, with no newer request of another one served."""
        parts = self._parts.values()
        return any(one.first_s > self._worked_s and one.weight(now_s) > 0.0 for one in parts)

    def clear(self) -> None:
        """What was says nothing any more."""
        self._parts.clear()
