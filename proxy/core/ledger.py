"""Ongoing tokens per instance, and KV that broken hand-overs may still hold.

A lease holds a tuple of charges. Every change of phase replaces that tuple in one step: the old
charges are subtracted, the new ones added. Nothing else writes a counter, so the conservation law
holds by construction: for each instance, the sum over live leases equals its counters, and without
leases every counter is zero. Counters are never clamped, since a clamp would hide a leak.

A charge refers to the account on which it was made, that of one incarnation of an instance
(core.instances). A later incarnation has an account of its own, so an older lease releases into the
old one.

An engine does not report what it has pinned. KV that a broken hand-over may have left pinned
(`UnreleasedKv`) counts against the instance's room for further hand-overs until the engine's own
timeout has freed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from proxy.core.instances import Account, InstanceState, InstanceStates, Phase
from proxy.core.types import NONE_UNRELEASED, Load

__all__ = ["Account", "Charge", "Lease", "Ledger", "Phase", "UnreleasedKv"]


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

    __slots__ = ("_charges", "_ledger")

    def __init__(self, ledger: Ledger, charges: tuple[Charge, ...]) -> None:
        self._ledger: Ledger | None = ledger
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
        return self._ledger is not None

    def replace(self, charges: Iterable[Charge]) -> None:
        """Replace the present charges by these; without effect once closed."""
        if self._ledger is None:
            return
        for old in self._charges:
            old.account.change(old.phase, -old.tokens, -1)
        self._charges = tuple(charges)
        for new in self._charges:
            new.account.change(new.phase, new.tokens, 1)
        if self._ledger.on_freed is not None:
            self._ledger.on_freed()

    def grow(self, tokens: int) -> None:
        """Add output tokens to the decode charge, if there is one."""
        if any(c.phase is Phase.DECODE for c in self._charges):
            self.replace(
                Charge(c.account, c.phase, c.tokens + tokens) if c.phase is Phase.DECODE else c
                for c in self._charges
            )

    def close(self) -> None:
        """Subtract all charges; idempotent."""
        if self._ledger is not None:
            self.replace(())
            self._ledger.forget(self)
            self._ledger = None


class Ledger:
    """All live leases, over the accounts of the present instances."""

    def __init__(self, states: InstanceStates) -> None:
        self._states = states
        self._leases: set[Lease] = set()
        self.on_freed: Callable[[], None] | None = None
        """Called after a lease has changed; None: no call."""

    def charge(self, name: str, phase: Phase, tokens: int) -> tuple[Charge, ...]:
        """A charge on an instance; empty if the instance has left."""
        state = self._states.get(name)
        return () if state is None else (Charge(state.account, phase, tokens),)

    def load(self, name: str) -> Load:
        """The present counters of an instance; KeyError if it is unknown."""
        return self._states[name].account.load()

    def open(self, charges: Iterable[Charge]) -> Lease:
        """A new live lease with these charges."""
        lease = Lease(self, tuple(charges))
        self._leases.add(lease)
        return lease

    def forget(self, lease: Lease) -> None:
        """Remove a lease; called by the lease when it closes."""
        self._leases.discard(lease)

    @property
    def live(self) -> int:
        """Number of open leases."""
        return len(self._leases)

    def drift(self) -> int:
        """Sum of |counter - sum over live leases|, tokens and requests; anything but 0 is a bug."""
        present = {state.name: state.account for state in self._states}
        expected = {name: Account(name) for name in present}
        for lease in self._leases:
            for charge in lease.charges:
                if present.get(charge.account.name) is charge.account:
                    shadow = expected[charge.account.name]
                    shadow.tokens[charge.phase] += charge.tokens
                    shadow.requests[charge.phase] += 1
        return sum(
            sum(abs(a - b) for a, b in zip(account.tokens, shadow.tokens, strict=True))
            + sum(abs(a - b) for a, b in zip(account.requests, shadow.requests, strict=True))
            for account, shadow in ((a, expected[n]) for n, a in present.items())
        )


class UnreleasedKv:
    """Broken hand-overs whose KV an instance may still hold, each for `hold_s` seconds."""

    def __init__(self, hold_s: float, states: InstanceStates) -> None:
        self._hold_s = hold_s
        self._states = states

    def book(self, name: str, tokens: int, now_s: float) -> None:
        """`tokens` may be pinned on an instance from now on."""
        self._states.of(name).unreleased.append((now_s + self._hold_s, tokens))

    def on(self, name: str, now_s: float) -> tuple[int, int]:
        """Number of hand-overs whose KV an instance may still hold, and their tokens."""
        return self.on_each([self._states.of(name)], now_s)[0]

    def on_each(self, states: Iterable[InstanceState], now_s: float) -> list[tuple[int, int]]:
        """`on` for several instances; nearly always none has any."""
        return [
            _unreleased(state.unreleased, now_s) if state.unreleased else NONE_UNRELEASED
            for state in states
        ]


def _unreleased(entries: deque[tuple[float, int]], now_s: float) -> tuple[int, int]:
    while entries and entries[0][0] <= now_s:
        entries.popleft()
    return len(entries), sum(tokens for _, tokens in entries)
