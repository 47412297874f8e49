"""What the KV cache of one engine is believed to hold, of one incarnation of an instance.

`EngineCache` is a part of the instance's state (core.instances). Its blocks are kept in the order
in which the engine evicts them, as runs of equal age (`Runs`). A prompt in use holds its blocks
(`Hold`); from its placement to its end it is a `Use`.

A cache that is lost, as its process is gone, stays in the hands of those who hold it: requests that
have not ended, sessions that lived there. What they write into it reaches nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False, init=False)
class Hold:
    """A prompt in use in one cache; `age` is that of its last block there."""

    cache: EngineCache
    hashes: Sequence[int]
    age: int

    def __init__(self, cache: EngineCache, hashes: Sequence[int], age: int) -> None:
        self.cache, self.hashes, self.age = cache, hashes, age


@dataclass(slots=True, eq=False, init=False)
class Use:
    """One prompt in one cache, from its placement to the end of its answer.

    `blocks` of it were there before, the last of them used at `age`; None where the instance was
    given the KV by a peer, so that its count of cached tokens says nothing.
    """

    cache: EngineCache
    blocks: int | None
    age: int
    hold: Hold | None

    def __init__(
        self, cache: EngineCache, blocks: int | None, age: int = 0, hold: Hold | None = None
    ) -> None:
        self.cache = cache
        self.blocks, self.age, self.hold = blocks, age, hold


class Runs:
    """The blocks of one cache, in runs: each of consecutive blocks that were last used together.

    Of a run the tail is evicted first, of several the oldest. `size`: blocks in all of them.
    """

    __slots__ = ("_ages", "_first", "_runs", "size")

    def __init__(self) -> None:
        self.size = 0
        self._runs: dict[int, list[int]] = {}
        self._first: dict[int, int] = {}
        # Of all uses, those that have no run left included, until they are too many.
        self._ages: deque[int] = deque()

    def take(self, hashes: Sequence[int], known: int) -> list[int]:
        """Take the first `known` blocks of a prompt, all of them here, out of their runs.

        They are given back as they are here: should two hashes collide, these count.
        """
        taken: list[int] = []
        while (at := len(taken)) < known:
            age = self._first.pop(hashes[at], None)
            if age is None:
                break
            run = self._runs[age]
            common = _common(run, hashes, at, known)
            if common == len(run):
                taken = taken + run if taken else run
                del self._runs[age]
            else:
                taken += run[:common]
                del run[:common]
                self._first[run[0]] = age
        return taken

    def put(self, blocks: list[int], age: int) -> None:
        """Add these blocks, none of which is in a run, as the newest run."""
        if blocks:
            self._runs[age] = blocks
            self._first[blocks[0]] = age
            self._ages.append(age)
            if len(self._ages) > 2 * len(self._runs) + 16:
                self._ages = deque(self._runs)

    def age_at(self, hashes: Sequence[int], count: int) -> int:
        """When the last of the first `count` blocks of a prompt, all of them here, was used."""
        at, age = 0, 0
        while at < count:
            found = self._first.get(hashes[at])
            if found is None:
                break
            age = found
            at += _common(self._runs[age], hashes, at, count)
        return age

    @property
    def oldest(self) -> int | None:
        """Age of the run that is evicted next."""
        ages = self._ages
        while ages and ages[0] not in self._runs:
            ages.popleft()
        return ages[0] if ages else None

    def is_newest(self, hashes: Sequence[int], age: int) -> bool:
        """Whether all of a prompt was last used at `age`, and nothing after it."""
        run = self._runs.get(age)
        if run is None or self._ages[-1] != age or not 0 < len(hashes) <= len(run):
            return False
        return run[len(hashes) - 1] == hashes[-1]

    def rows(self) -> list[list[int]]:
        """A copy of the runs, the oldest first: they came in the order of their ages."""
        return [run[:] for run in self._runs.values()]

    def pop(self, count: int) -> list[int]:
        """Take up to `count` blocks off the tail of the oldest run."""
        age = self.oldest
        if age is None:
            return []
        run = self._runs[age]
        left = run[-count:]
        del run[-count:]
        self.size -= len(left)
        if not run:
            del self._runs[age]
            if self._first.get(left[0]) == age:  # where hashes collide, another run's
                del self._first[left[0]]
        return left


class EngineCache:
    """The cache of one engine: its blocks, prompts in use and on their way, who lives there.

    `is_lost`: its process is gone. `bit`: its place in the prefix index, 0 while it has none there.
    `limit_blocks`: what it can hold, None while unknown; `reported_blocks` of it as its engine
    reported, `learned_blocks` as its answers showed. `reserved_blocks`: on their way. `full_ratio`:
    None when it is to be reckoned again. `holds`: by the age of their last block. `computing`: the
    first missing block of each prompt on its way, and how many there are; `computing_blocks`: of
    all of them. `sessions`: how many live there.
    """

    __slots__ = (
        "bit",
        "computing",
        "computing_blocks",
        "full_ratio",
        "holds",
        "is_lost",
        "learned_blocks",
        "limit_blocks",
        "name",
        "reported_blocks",
        "reserved_blocks",
        "runs",
        "sessions",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_lost = False
        self.bit = 0
        self.runs = Runs()
        self.limit_blocks: int | None = None
        self.reported_blocks: int | None = None
        self.learned_blocks: float | None = None
        self.reserved_blocks = 0
        self.full_ratio: float | None = None
        self.holds: dict[int, dict[Hold, None]] = {}
        self.computing: dict[object, tuple[int, int]] = {}
        self.computing_blocks = 0
        self.sessions = 0

    @property
    def blocks(self) -> int:
        """Number of blocks believed to be in the cache."""
        return self.runs.size


def _common(run: Sequence[int], hashes: Sequence[int], at: int, end: int) -> int:
    """How many blocks of a run are the prompt's from `at` on, before `end`; the first one is."""
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
