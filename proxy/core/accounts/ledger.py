"""Ongoing tokens per instance, and KV that broken hand-overs may still hold.

Only leases write counters (`lease.py`), so the conservation law holds by construction. An
instance's counters equal the sum over live leases, and are zero without leases.

An engine does not report what it has pinned. KV that a broken hand-over may have left pinned
(`UnreleasedKv`) counts against the instance's room for further hand-overs until the engine's own
timeout has freed it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from proxy.core.accounts.instances import InstanceState, InstanceStates
from proxy.core.accounts.lease import Account, Charge, OpenLeases, Phase
from proxy.core.types import NONE_UNRELEASED, Load


class Ledger(OpenLeases):
    """All live leases, over the accounts of the present instances."""

    def __init__(self, states: InstanceStates) -> None:
        super().__init__()
        self._states = states

    def charge(self, name: str, phase: Phase, tokens: int) -> tuple[Charge, ...]:
        """A charge on an instance; empty if the instance has left."""
        state = self._states.get(name)
        return () if state is None else (Charge(state.account, phase, tokens),)

    def computing(self, name: str, new_tokens: int, hit_tokens: int) -> tuple[Charge, ...]:
        """The charges of a prompt that an instance is to compute, of which it has a part cached."""
        state = self._states.get(name)
        if state is None:
            return ()
        account = state.account
        prefill = Charge(account, Phase.PREFILL, new_tokens)
        cached_tokens = hit_tokens - account.load().shared_once_tokens
        if cached_tokens <= 0:
            return (prefill,)
        return prefill, Charge(account, Phase.CACHED, cached_tokens)

    def load(self, name: str) -> Load:
        """The present counters of an instance; KeyError if it is unknown."""
        return self._states[name].account.load()

    def own(self, name: str) -> Load:
        """Those of this process alone, without what other replicas have there."""
        return Load(*self._states[name].account.own())

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
        self._until_s = -math.inf

    def book(self, name: str, tokens: int, now_s: float) -> None:
        """`tokens` may be pinned on an instance from now on."""
        until_s = now_s + self._hold_s
        self._until_s = max(self._until_s, until_s)
        state = self._states.of(name)
        state.unreleased.append((until_s, tokens))
        state.unreleased_tokens += tokens

    def on(self, name: str, now_s: float) -> tuple[int, int]:
        """Number of hand-overs whose KV an instance may still hold, and their tokens."""
        return self.on_each([self._states.of(name)], now_s)[0]

    def on_each(self, states: Sequence[InstanceState], now_s: float) -> list[tuple[int, int]]:
        """`on` for several instances; nearly always none has any."""
        if now_s >= self._until_s:
            return [NONE_UNRELEASED] * len(states)
        return [
            _unreleased(state, now_s) if state.unreleased else NONE_UNRELEASED for state in states
        ]


def _unreleased(state: InstanceState, now_s: float) -> tuple[int, int]:
    entries = state.unreleased
    while entries and entries[0][0] <= now_s:
        state.unreleased_tokens -= entries.popleft()[1]
    return len(entries), state.unreleased_tokens
