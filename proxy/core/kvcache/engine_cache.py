"""The assumed contents of one engine's KV cache, of one incarnation of an instance.

`EngineCache` is a part of the instance's state (core.accounts). Its blocks are kept in the order
in which the engine evicts them, as runs of equal age (`Runs`). A prompt in use holds its blocks
(`Hold`); from its placement to its end it is a `Use`.

A cache that is lost, as its process is gone, stays in the hands of those who hold it: requests that
have not ended, sessions that lived there. What they write into it is never read.

How fast ending streams free KV there is a `ReleaseRate`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

KV_USABLE_RATIO: Final = 0.95
KV_TURNOVER_S: Final = 20.0
"""Until streams have ended on an instance: it is taken to free its whole cache in this time."""
RUNS_LOOKED_AT: Final = 512
"""Runs whose blocks are counted at most, to learn a cache's size from what was evicted."""
BLOCK_USUAL: Final = 16
BLOCK_MOST: Final = 256
BLOCK_SHOWN: Final = 8
"""Tokens of an engine's block: as most have it, the most that is believed, and the answers that
show it: fewer may all be of one prompt."""
RUNS_PRICED: Final = 16
"""Runs to be evicted whose sessions are looked at; further ones are taken to be like the last."""
OWNERS: Final = 1 << 12
"""An age is the number of a use times this, plus its owner: a tenant's number. So the owner takes
no memory of its own, and ages have the order of uses."""
NOT_TRIMMED: Final = -1
NOBODYS: Final = 0
"""The owner of what several tenants have used, or who is not known."""


def owner_of(age: int) -> int:
    """The owner of the blocks last used at an age."""
    return age % OWNERS


@dataclass(slots=True, eq=False, init=False)
class Hold:
    """A prompt in use in one cache: its first `blocks`, the last of them in the run of `age`."""

    cache: EngineCache
    hashes: Sequence[int]
    blocks: int
    age: int

    def __init__(self, cache: EngineCache, hashes: Sequence[int], blocks: int, age: int) -> None:
        self.cache, self.hashes, self.blocks, self.age = cache, hashes, blocks, age


@dataclass(slots=True, eq=False, init=False)
class Use:
    """One prompt in one cache, from its placement to the end of its answer."""

    cache: EngineCache
    blocks: int | None
    """Blocks of the prompt cached before. None if a peer sent the KV, so that the cached tokens
    mean nothing."""
    age: int
    """Last use of the last of these blocks."""
    hold: Hold | None
    older_blocks: int
    """Blocks of the prompt in other runs than the last."""
    kept_blocks: int | None
    """Blocks of other prompts that are evicted after it. None if the cache size is known, they are
    too many to count, or prompts wait for room."""
    ahead_blocks: int
    """Blocks that were on their way then."""

    def __init__(
        self, cache: EngineCache, blocks: int | None, age: int = 0, hold: Hold | None = None
    ) -> None:
        self.cache = cache
        self.blocks, self.age, self.hold = blocks, age, hold
        self.older_blocks, self.kept_blocks, self.ahead_blocks = 0, None, 0


class Runs:
    """The blocks of one cache, in runs: each of consecutive blocks that were last used together.

    Of a run the tail is evicted first, of several the oldest. A run may end with the blocks of an
    answer. `size`: blocks in all of them.
    """

    __slots__ = ("_ages", "_ages_of", "_answers", "_first", "_owned", "_runs", "_used_s", "size")

    def __init__(self) -> None:
        self.size = 0
        self._runs: dict[int, list[int]] = {}
        self._used_s: dict[int, float] = {}
        self._first: dict[int, int] = {}
        self._answers = 0
        # Of all uses, those that have no run left included, until they are too many.
        self._ages: deque[int] = deque()
        # The same per owner, and how many these are.
        self._ages_of: dict[int, deque[int]] = {}
        self._owned = 0

    def take(self, hashes: Sequence[int], known: int) -> tuple[list[int], list[int]]:
        """Take the first `known` blocks of a prompt, all of them here, out of their runs.

        They are given back as they are here: should two hashes collide, these count. And the ages
        of those runs.
        """
        taken: list[int] = []
        ages: list[int] = []
        while (at := len(taken)) < known:
            age = self._first.pop(hashes[at], None)
            if age is None:
                break
            run = self._runs[age]
            ages.append(age)
            common = _common(run, hashes, at, known)
            if common == len(run):
                taken = taken + run if taken else run
                del self._runs[age], self._used_s[age]
            else:
                taken += run[:common]
                del run[:common]
                self._first[run[0]] = age
        return taken, ages

    def put(self, blocks: list[int], age: int, now_s: float) -> None:
        """Add these blocks, none of which is in a run, as the newest run."""
        if blocks:
            self._runs[age] = blocks
            self._used_s[age] = now_s
            self._first[blocks[0]] = age
            self._ages.append(age)
            if len(self._ages) > 2 * len(self._runs) + 16:
                self._ages = deque(self._runs)
            if owner_of(age) != NOBODYS:
                self._own(age)

    def _own(self, age: int) -> None:
        """Note the newest run for its owner."""
        self._ages_of.setdefault(owner_of(age), deque()).append(age)
        self._owned += 1
        if self._owned > 2 * len(self._runs) + 16:
            self._ages_of = {}
            owned = [age for age in self._runs if owner_of(age) != NOBODYS]
            for age in owned:
                self._ages_of.setdefault(owner_of(age), deque()).append(age)
            self._owned = len(owned)

    def append_answer(self, age: int, count: int) -> int:
        """Add the blocks of an answer to a run; gives how many were added.

        Their hashes are not known, so they are numbered, from -1 down.
        """
        run = self._runs.get(age)
        if run is None or count <= 0:
            return 0
        self._answers -= count
        run += range(self._answers, self._answers + count)
        self.size += count
        return count

    def remove_answer(self, age: int, last: int) -> int:
        """Remove the answer that a run ends with after the block `last`; gives its blocks."""
        run = self._runs.get(age)
        if run is None:
            return 0
        known = _before_answer(run)
        count = len(run) - known
        if not known or run[known - 1] != last:
            return 0
        del run[known:]
        self.size -= count
        return count

    def last_run(self, hashes: Sequence[int], count: int) -> tuple[int, int]:
        """Age of the run with the last of the first `count` blocks of a prompt, all of them here.

        And how many of the prompt's blocks are in runs before that one.
        """
        at, age, start = 0, 0, 0
        while at < count:
            found = self._first.get(hashes[at])
            if found is None:
                break
            age, start = found, at
            at += _common(self._runs[age], hashes, at, count)
        return age, start

    def kept_longer(self, age: int, held: Iterable[int]) -> int | None:
        """Blocks that are evicted after the run of `age`; None where too many runs have them.

        Those that were used after it, and of older runs those in use, the ages of which are `held`.
        """
        runs = self._runs
        blocks = sum([len(runs[other]) for other in held if other < age and other in runs])
        for looked, other in enumerate(reversed(runs)):
            if other <= age:
                return blocks
            if looked >= RUNS_LOOKED_AT:
                return None
            blocks += len(runs[other])
        return blocks

    def evicted_next(self, count: int, own: int, held: Container[int]) -> list[tuple[int, float]]:
        """The `count` blocks evicted next: the number per run, and when the run was used.

        `own`, `held`: ages of runs that are in use, which are not evicted. After RUNS_PRICED runs
        the rest is taken to be of the last one.
        """
        evicted: list[tuple[int, float]] = []
        for age in self._ages:
            run = self._runs.get(age)
            if run is not None and age != own and age not in held:
                is_last = len(evicted) == RUNS_PRICED - 1
                blocks = count if is_last else min(count, len(run))
                evicted.append((blocks, self._used_s[age]))
                count -= blocks
                if count <= 0:
                    break
        return evicted

    @property
    def oldest(self) -> int | None:
        """Age of the run that is evicted next."""
        ages = self._ages
        while ages and ages[0] not in self._runs:
            ages.popleft()
        return ages[0] if ages else None

    def oldest_of(self, owner: int) -> int | None:
        """Age of the run that is evicted next, of an owner's."""
        ages = self._ages_of.get(owner)
        if ages is None:
            return None
        while ages and ages[0] not in self._runs:
            ages.popleft()
            self._owned -= 1
        return ages[0] if ages else None

    def is_newest(self, hashes: Sequence[int], age: int) -> bool:
        """Whether all of a prompt was last used at `age`, and no later block."""
        run = self._runs.get(age)
        if run is None or self._ages[-1] != age or not 0 < len(hashes) <= len(run):
            return False
        return run[len(hashes) - 1] == hashes[-1]

    def rows(self) -> list[list[int]]:
        """A copy of the runs without answers, the oldest first: in the order of their ages."""
        known = [run[: _before_answer(run)] for run in self._runs.values()]
        return [run for run in known if run]

    def pop(self, count: int) -> list[int]:
        """Take up to `count` blocks off the tail of the oldest run."""
        age = self.oldest
        return [] if age is None else self.pop_of(age, count)

    def pop_of(self, age: int, count: int) -> list[int]:
        """Take up to `count` blocks off the tail of the run of this age."""
        run = self._runs[age]
        left = run[-count:]
        del run[-count:]
        self.size -= len(left)
        if not run:
            del self._runs[age], self._used_s[age]
            if self._first.get(left[0]) == age:  # where hashes collide, another run's
                del self._first[left[0]]
        return left


class EngineCache:
    """The cache of one engine: its blocks, prompts in use and on their way, its sessions.

    `is_lost`: its process is gone. `is_all_held`: nothing was left to evict, and no hold has ended
    since. `bit`: its place in the prefix index, 0 while it has none there. `limit_blocks`: its
    size, None while unknown. `reported_blocks`: size as its engine reported. `learned_blocks`,
    `learned_tokens`: size as answers showed. `proven_blocks`, `proven_tokens`: contents at one
    moment, as answers showed before a size was known. `is_shared`: prompts of several tenants
    were computed there. `witnesses`: prompts with fewer cached
    tokens than expected, by tenant and what tells two apart, and the age of the missing blocks.
    `right`: starts of prompts found as expected, with their counts. `found_gcd`: of the cached
    tokens of so many answers, `found_count`. `reserved_blocks`: on their way. `full_ratio`: None
    when it is to be computed again. `holds`: by their age. `computing`: the first missing block of
    each prompt on its way, and how many there are; `computing_blocks`: of all of them. `sessions`:
    how many live there. `trimmed`: blocks of this age or older are gone, as far as they are not in
    use; NOT_TRIMMED once the index has none of them.
    """

    __slots__ = (
        "_tenant",
        "bit",
        "computing",
        "computing_blocks",
        "found_count",
        "found_gcd",
        "full_ratio",
        "holds",
        "is_all_held",
        "is_lost",
        "is_shared",
        "learned_blocks",
        "learned_tokens",
        "limit_blocks",
        "name",
        "proven_blocks",
        "proven_tokens",
        "reported_blocks",
        "reserved_blocks",
        "right",
        "runs",
        "sessions",
        "trimmed",
        "witnesses",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_lost = False
        self.is_all_held = False
        self.bit = 0
        self.runs = Runs()
        self.limit_blocks: int | None = None
        self.reported_blocks: int | None = None
        self.learned_blocks: float | None = None
        self.learned_tokens: int | None = None
        self.proven_blocks = self.proven_tokens = 0
        self.is_shared = False
        self._tenant: str | None = None
        self.witnesses: dict[tuple[str, int | str], int] = {}
        self.right: dict[int, int] = {}
        self.found_gcd = self.found_count = 0
        self.reserved_blocks = 0
        self.full_ratio: float | None = None
        self.holds: dict[int, dict[Hold, None]] = {}
        self.computing: dict[object, tuple[int, int]] = {}
        self.computing_blocks = 0
        self.sessions = 0
        self.trimmed = NOT_TRIMMED

    def serves(self, tenant: str) -> None:
        """Note whose prompt is computed there; an empty name where that is not known."""
        if self._tenant is None:
            self._tenant = tenant
        elif tenant != self._tenant:
            self.is_shared = True

    def note_found(self, tokens: int) -> None:
        """Note an answer's cached tokens, which are whole blocks of the engine."""
        if tokens > 0:
            self.found_gcd = math.gcd(self.found_gcd, tokens)
            self.found_count += 1

    @property
    def engine_block_tokens(self) -> int:
        """Tokens of the engine's blocks: the usual number until answers have shown them."""
        shown = self.found_count >= BLOCK_SHOWN and self.found_gcd <= BLOCK_MOST
        return self.found_gcd if shown else math.gcd(BLOCK_USUAL, self.found_gcd)

    @property
    def blocks(self) -> int:
        """Number of blocks assumed to be in the cache."""
        return self.runs.size


def _before_answer(run: Sequence[int]) -> int:
    """Number of a run's blocks before the answer that it may end with."""
    known = len(run)
    while known and run[known - 1] < 0:
        known -= 1
    return known


def _common(run: Sequence[int], hashes: Sequence[int], at: int, end: int) -> int:
    """Number of a run's blocks that are the prompt's from `at` on, before `end`; at least one."""
    high = min(len(run), end - at)
    if run[high - 1] == hashes[at + high - 1]:
        return high
    low = 1
    while low < high:
        middle = (low + high) // 2
        if run[middle] == hashes[at + middle]:
            low = middle + 1
        else:
            high = middle
    return low


class ReleaseRate:
    """KV tokens per second that ending streams give back on one instance, over the last minute."""

    WINDOW_S: ClassVar[float] = 60.0
    WINDOW_STREAMS: ClassVar[int] = 1024

    def __init__(self) -> None:
        self._ended: deque[tuple[float, int]] = deque()
        self._tokens = 0
        self.count = 0

    def add(self, tokens: int, now_s: float) -> None:
        """Note the end of a stream that held this many tokens."""
        self._ended.append((now_s, tokens))
        self._tokens += tokens
        self.count += 1
        if len(self._ended) > self.WINDOW_STREAMS:
            self._leave()

    def tokens_per_s(self, now_s: float) -> float | None:
        """The rate in tokens per second; None while no stream has ended within the window."""
        while self._ended and now_s - self._ended[0][0] > self.WINDOW_S:
            self._leave()
        if not self._tokens:
            return None
        return self._tokens / max(1.0, now_s - self._ended[0][0])

    def _leave(self) -> None:
        self._tokens -= self._ended.popleft()[1]
