"""What is known of each instance, in one object per incarnation: to forget it is to drop it.

Who still holds an object that was dropped writes into the void: what ends later, or is reported of
a process that is gone, never reaches the one that has its name now.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from proxy.core.admission.engine_reports import ReportHistory
from proxy.core.kvcache.room import ReleaseRate


class InstanceState:
    """One incarnation of one instance.

    `kv_tokens`: the size of its KV cache, `kv_used_ratio`: the part in use, None while unknown;
    both as its engine reported at `reported_s`. `released`: what ending streams gave back.
    `cooldown_until_s`: its engine has said that it is at capacity.
    """

    __slots__ = (
        "cooldown_until_s",
        "kv_tokens",
        "kv_used_ratio",
        "name",
        "released",
        "reported_s",
        "reports",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.kv_tokens: int | None = None
        self.kv_used_ratio: float | None = None
        self.reported_s: float | None = None
        self.reports = ReportHistory()
        self.released = ReleaseRate()
        self.cooldown_until_s = -math.inf


class InstanceStates:
    """The states of the present instances by name; the fleet adds and removes them."""

    def __init__(self) -> None:
        self._states: dict[str, InstanceState] = {}

    def __iter__(self) -> Iterator[InstanceState]:
        return iter(self._states.values())

    def add(self, name: str) -> InstanceState:
        """A fresh state; an older one of this name is dropped."""
        state = self._states[name] = InstanceState(name)
        return state

    def remove(self, name: str) -> None:
        """Drop a state, if there is one."""
        self._states.pop(name, None)

    def of(self, name: str) -> InstanceState:
        """The state of an instance; of one that is not there, the void."""
        return self._states.get(name) or InstanceState(name)
