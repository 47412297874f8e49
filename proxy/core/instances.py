"""What is known of each instance, in one object per incarnation: to forget it is to drop it.

Code that still holds a dropped object writes into the void: a request that ends later, or a report
of a process that is gone, never reaches the process that has the name now.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from enum import IntEnum

from proxy.core.admission.engine_reports import ReportHistory
from proxy.core.kvcache.room import ReleaseRate
from proxy.core.types import Load


class Phase(IntEnum):
    """What a charge is for; the index of its pair of counters."""

    PREFILL = 0
    INBOUND = 1
    DECODE = 2
    PINNED = 3


class Account:
    """The counters of one incarnation of one instance; written by `Lease` only."""

    __slots__ = ("name", "requests", "seen", "tokens")

    def __init__(self, name: str) -> None:
        self.name = name
        self.tokens = [0] * len(Phase)
        self.requests = [0] * len(Phase)
        self.seen: Load | None = None

    def change(self, phase: Phase, tokens: int, requests: int) -> None:
        """Move one pair of counters."""
        self.tokens[phase] += tokens
        self.requests[phase] += requests
        self.seen = None

    def load(self) -> Load:
        """A snapshot of the counters; the same object until they change.

        A decision looks at every instance several times, a request changes one or two.
        """
        if self.seen is None:
            t, r = self.tokens, self.requests
            self.seen = Load(t[0], r[0], t[1], r[1], t[2], r[2], t[3], r[3])
        return self.seen


class InstanceState:
    """One incarnation of one instance. `account`: what requests charge it.

    `kv_tokens`: the size of its KV cache, `kv_used_ratio`: the part in use, None while unknown;
    both as its engine reported at `reported_s`. `released`: what ending streams gave back.
    `cooldown_until_s`: its engine has said that it is at capacity. `unreleased`: until when broken
    hand-overs may have left how many tokens pinned.
    """

    __slots__ = (
        "account",
        "cooldown_until_s",
        "kv_tokens",
        "kv_used_ratio",
        "name",
        "released",
        "reported_s",
        "reports",
        "unreleased",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.account = Account(name)
        self.kv_tokens: int | None = None
        self.kv_used_ratio: float | None = None
        self.reported_s: float | None = None
        self.reports = ReportHistory()
        self.released = ReleaseRate()
        self.unreleased: deque[tuple[float, int]] = deque()
        self.cooldown_until_s = -math.inf


class InstanceStates:
    """The states of the present instances by name; the fleet adds and removes them."""

    def __init__(self) -> None:
        self._states: dict[str, InstanceState] = {}

    def __iter__(self) -> Iterator[InstanceState]:
        return iter(self._states.values())

    def __getitem__(self, name: str) -> InstanceState:
        return self._states[name]

    def add(self, name: str) -> InstanceState:
        """A fresh state; an older one of this name is dropped."""
        state = self._states[name] = InstanceState(name)
        return state

    def forget(self, name: str) -> InstanceState:
        """A state that knows nothing; its account goes on, since its requests may not be over."""
        known, state = self._states.get(name), InstanceState(name)
        if known is not None:
            state.account = known.account
        self._states[name] = state
        return state

    def remove(self, name: str) -> None:
        """Drop a state, if there is one."""
        self._states.pop(name, None)

    def get(self, name: str) -> InstanceState | None:
        """The state of an instance, or None."""
        return self._states.get(name)

    def of(self, name: str) -> InstanceState:
        """The state of an instance; of one that is not there, the void."""
        return self._states.get(name) or InstanceState(name)
