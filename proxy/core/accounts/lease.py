"""Leases: the charges of one request, each on an instance's account.

Every change of phase replaces that tuple: the old charges are taken back, the new ones made, in one
step. Nothing else writes a counter. Counters are never clamped, since a clamp would hide a leak.

A charge points at the account it was made on, which is that of one incarnation of an instance
(`instances.py`). What comes after it has an account of its own, so a lease from before releases
into the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

from proxy.core.types import Load

Numbers = tuple[int, int, int, int, int, int, int, int, int, int, int]
"""The numbers of a `Load` in the order of its fields."""


class Phase(IntEnum):
    """The phase that a charge is for; the index of its pair of counters."""

    PREFILL = 0
    INBOUND = 1
    DECODE = 2
    PINNED = 3
    SHARED = 4
    """Tokens of a decode charge that other sessions' prompts begin with as well."""
    CACHED = 5
    """Tokens of a prompt beside its prefill charge: found in the cache, so no work, but in use."""


def added(one: Numbers, other: Numbers) -> Numbers:
    """The sum of two, number by number."""
    a, b = one, other
    return (
        *(a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5]),
        *(a[6] + b[6], a[7] + b[7], a[8] + b[8], a[9] + b[9], a[10] + b[10]),
    )


def exchanged(total: Numbers, old: Numbers, new: Numbers) -> Numbers:
    """A sum with `new` in the place of `old`."""
    t, a, b = total, old, new
    return (
        *(t[0] - a[0] + b[0], t[1] - a[1] + b[1], t[2] - a[2] + b[2], t[3] - a[3] + b[3]),
        *(t[4] - a[4] + b[4], t[5] - a[5] + b[5], t[6] - a[6] + b[6], t[7] - a[7] + b[7]),
        *(t[8] - a[8] + b[8], t[9] - a[9] + b[9], t[10] - a[10] + b[10]),
    )


class Account:
    """The counters of one incarnation of one instance; written by `Lease` only.

    `foreign`: what other replicas of this proxy have on it, as `own` of each, summed; None where
    nothing is shared. It is a part of `load`, and of nothing else.
    """

    __slots__ = ("foreign", "name", "requests", "seen", "tokens")

    def __init__(self, name: str) -> None:
        self.name = name
        self.tokens = [0] * len(Phase)
        self.requests = [0] * len(Phase)
        self.seen: Load | None = None
        self.foreign: Numbers | None = None

    def change(self, phase: Phase, tokens: int, requests: int) -> None:
        """Add to one pair of counters."""
        self.tokens[phase] += tokens
        self.requests[phase] += requests
        self.seen = None

    def load(self) -> Load:
        """A snapshot of the counters; the same object until they change.

        A decision looks at every instance several times, a request changes one or two.
        """
        if self.seen is None:
            t, r = self.tokens, self.requests
            self.seen = Load(t[0], r[0], t[1], r[1], t[2], r[2], t[3], r[3], t[4], r[4], t[5])
            if self.foreign is not None:
                self.seen = Load(*added(self.own(), self.foreign))
        return self.seen

    def own(self) -> Numbers:
        """The counters of this process alone, in the order of a `Load`."""
        t, r = self.tokens, self.requests
        return t[0], r[0], t[1], r[1], t[2], r[2], t[3], r[3], t[4], r[4], t[5]

    def share(self, foreign: Numbers | None) -> None:
        """What others have on this instance, from now on; None: they have nothing."""
        self.foreign, self.seen = foreign, None


@dataclass(slots=True, init=False)
class Charge:
    """`tokens` on one account, for one phase."""

    account: Account
    phase: Phase
    tokens: int

    def __init__(self, account: Account, phase: Phase, tokens: int) -> None:
        self.account, self.phase, self.tokens = account, phase, tokens


class Lease:
    """The charges of one request. Ends with `close`, which may be called any number of times."""

    __slots__ = ("_among", "_charges")

    def __init__(self, open_leases: OpenLeases, charges: tuple[Charge, ...]) -> None:
        self._among: OpenLeases | None = open_leases
        self._charges: tuple[Charge, ...] = ()
        if charges:
            self.replace(charges)

    @property
    def charges(self) -> tuple[Charge, ...]:
        """The present charges; empty once closed."""
        return self._charges

    @property
    def is_open(self) -> bool:
        """Whether the lease can still change its charges."""
        return self._among is not None

    def replace(self, charges: Iterable[Charge]) -> None:
        """Replace the present charges by these; without effect once closed."""
        if self._among is None:
            return
        for old in self._charges:
            old.account.change(old.phase, -old.tokens, -1)
        self._charges = tuple(charges)
        for new in self._charges:
            new.account.change(new.phase, new.tokens, 1)
        if self._among.on_freed is not None:
            self._among.on_freed()

    def grow(self, tokens: int) -> None:
        """Add output tokens to the decode charge, if there is one."""
        if any(c.phase is Phase.DECODE for c in self._charges):
            self.replace(
                Charge(c.account, c.phase, c.tokens + tokens) if c.phase is Phase.DECODE else c
                for c in self._charges
            )

    def close(self) -> None:
        """Subtract all charges; idempotent."""
        if self._among is not None:
            if self._charges:
                self.replace(())
            self._among.discard(self)
            self._among = None


class OpenLeases:
    """All open leases. `on_freed` is called after a lease has changed; None: no call."""

    def __init__(self) -> None:
        self._leases: set[Lease] = set()
        self.on_freed: Callable[[], None] | None = None

    def open(self, charges: Iterable[Charge]) -> Lease:
        """A new lease with these charges."""
        lease = Lease(self, tuple(charges))
        self._leases.add(lease)
        return lease

    def discard(self, lease: Lease) -> None:
        """Remove a lease; called by the lease when it closes."""
        self._leases.discard(lease)

    @property
    def live(self) -> int:
        """Number of open leases."""
        return len(self._leases)
