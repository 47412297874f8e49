"""The state of each instance, in one object per incarnation: dropping it forgets everything.

Code that still holds a dropped state, or a part of it, writes into the void. So a request that ends
later, or a report of a gone process, never reaches the process that has the name now. So nothing
compares incarnations by number.

Two tables cover all instances and get `on_dropped` for a dropped state. They are the prefix index,
whose masks have a bit per instance, and the transfer times of pairs. State of an address rather
than of a process is in the fleet's `Member`: its health (core.fleet.health) outlives the process,
to damp one that comes and goes.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from proxy.core.accounts.engine_reports import OwnRatio, ReportHistory
from proxy.core.accounts.lease import Account
from proxy.core.accounts.refusals import Refusals
from proxy.core.kvcache.engine_cache import EngineCache, ReleaseRate
from proxy.core.latency.model import Times, TimesByName


class InstanceState:
    """One incarnation of one instance. `account`: what requests charge it.

    `kv_tokens`: size of its KV cache. `kv_used_ratio`: share in use on the data-parallel rank with
    the most room, None while unknown. `ranks`: number of ranks that share the cache. All as its
    engine reported at `reported_s`. `assumed_kv_tokens`: the size that decisions go by
    (`InstanceStates.assume_sizes`). `start_s`: when its process started, unix seconds, where its
    metrics tell. `bytes_per_token`: of prompts, by model, and `tokens_per_event`: of output, both
    as its usage says. `released`: what ending streams gave back. `cooldown_until_s`: its engine is
    at capacity, as its `refusals` tell. `unreleased`: until when broken hand-overs may have
    left how many tokens pinned, `unreleased_tokens` in all. `cache`: its assumed contents.
    `times`: how long it takes and what is reserved on it, None until `Latency` is asked for it.
    """

    __slots__ = (
        "account",
        "assumed_kv_tokens",
        "bytes_per_token",
        "cache",
        "cooldown_until_s",
        "kv_tokens",
        "kv_used_ratio",
        "name",
        "ranks",
        "refusals",
        "released",
        "reported_s",
        "reports",
        "start_s",
        "times",
        "tokens_per_event",
        "unreleased",
        "unreleased_tokens",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.account = Account(name)
        self.kv_tokens: int | None = None
        self.assumed_kv_tokens: int | None = None
        self.kv_used_ratio: float | None = None
        self.ranks = 1
        self.reported_s: float | None = None
        self.start_s: float | None = None
        self.reports = ReportHistory()
        self.bytes_per_token: OrderedDict[str, OwnRatio] = OrderedDict()
        self.tokens_per_event: OwnRatio | None = None
        self.released = ReleaseRate()
        self.unreleased: deque[tuple[float, int]] = deque()
        self.unreleased_tokens = 0
        self.cooldown_until_s = -math.inf
        self.refusals = Refusals()
        self.cache = EngineCache(name)
        self.times: Times | None = None

    @property
    def is_usage_doubted(self) -> bool:
        """Whether its usage disagrees with the other instances', for any model."""
        return any(own.is_doubted for own in self.bytes_per_token.values())

    @property
    def is_dropped(self) -> bool:
        """Whether this is the void, whose content is never read."""
        return self.cache.is_lost


def _void(name: str) -> InstanceState:
    state = InstanceState(name)
    state.cache.is_lost = True
    return state


class InstanceStates(TimesByName):
    """The states of the present instances by name; the fleet adds and removes them.

    `on_dropped` is called with each state that is dropped.
    """

    def __init__(self) -> None:
        self._states: dict[str, InstanceState] = {}
        self.on_dropped: Callable[[InstanceState], None] | None = None

    def __iter__(self) -> Iterator[InstanceState]:
        return iter(self._states.values())

    def __getitem__(self, name: str) -> InstanceState:
        return self._states[name]

    def add(self, name: str) -> InstanceState:
        """A fresh state; an older one of this name is dropped."""
        self._drop(name)
        state = self._states[name] = InstanceState(name)
        self.assume_sizes()
        return state

    def leave_void(self, name: str) -> InstanceState:
        """Drop the state of an instance where no server listens; a void replaces it until the next.

        Its account goes on, since its requests may not be over.
        """
        known, state = self._states.get(name), _void(name)
        if known is not None:
            state.account = known.account
            self._drop(name)
        self._states[name] = state
        return state

    def remove(self, name: str) -> None:
        """Drop a state, if there is one."""
        self._drop(name)
        self._states.pop(name, None)
        self.assume_sizes()

    def _drop(self, name: str) -> None:
        state = self._states.get(name)
        if state is not None and not state.is_dropped:
            state.cache.is_lost = True
            if self.on_dropped is not None:
                self.on_dropped(state)

    def assume_sizes(self) -> None:
        """Take each KV cache to be as large as reported or learned, or else as the largest other.

        While no size is known, no cache counts as full and none as having room. An unknown size
        that counted as room would draw all long prompts to an unknown instance.
        """
        sizes = [state.kv_tokens or state.cache.learned_tokens for state in self]
        largest = max([size for size in sizes if size is not None], default=None)
        for state, size in zip(self, sizes, strict=True):
            state.assumed_kv_tokens = size
            if size is None and largest is not None:
                state.assumed_kv_tokens = max(largest, state.cache.proven_tokens)

    def get(self, name: str) -> InstanceState | None:
        """The state of an instance, or None."""
        return self._states.get(name)

    def of(self, name: str) -> InstanceState:
        """The state of an instance, or the void if it is absent."""
        return self._states.get(name) or _void(name)

    def times_of(self, name: str) -> Times | None:
        """See `TimesByName`."""
        state = self._states.get(name)
        return None if state is None else state.times

    def keep_times(self, name: str, times: Times) -> None:
        """See `TimesByName`."""
        if (state := self._states.get(name)) is not None:
            state.times = times

    def all_times(self) -> list[Times]:
        """See `TimesByName`."""
        return [state.times for state in self._states.values() if state.times is not None]

    def is_kept(self, name: str) -> bool:
        """See `TimesByName`."""
        state = self._states.get(name)
        return state is not None and not state.is_dropped
