"""The prefix index: prefixes per instance, approximated by the prompts routed there.

What is known of one instance's cache is in its `EngineCache`; here is what is kept over all. One
dict maps a chained block hash to a bitmask of instances. A chained hash stands for its whole
prefix. An instance that holds a block holds the blocks before it: blocks of one prompt are used
together and evicted tail first. So the masks along a prompt only lose bits, and halving finds
where: a few looks instead of one per block, for all instances at once.

It has two bounds: `max_blocks` per instance (an engine's size) and `max_bytes` overall. The least
recently used block is evicted first, as in vLLM, so the root, shared by most prompts, stays
longest. Every use has a number, its age, and what requests in flight use is held: an engine evicts
only what nobody runs on. Where prompts wait as all of it is held, room for them is made when a hold
ends, and of what that one leaves.

A use takes over all blocks of its prompt, and later uses take its leading blocks. So the blocks
last used at one age are always one run. So the order of eviction is kept per run, and a use costs a
few steps and some copying in C, however long the prompt is.

An engine caches its answers too. Their hashes come with the next turn, which has them in its
prompt. Until then numbers stand for them at the end of the prompt's run, in no mask.

Blocks that one tenant alone has used have it as their owner. What stands on such a block has the
same owner, as whoever uses a block uses those before it. So one tenant's blocks may go, and those
of the others stay (`trim_of`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat
from operator import or_
from typing import Final

from proxy.core.kvcache.engine_cache import (
    NOBODYS,
    NOT_TRIMMED,
    OWNERS,
    EngineCache,
    Hold,
    Runs,
    owner_of,
)

BYTES_PER_BLOCK: Final = 750
"""Most memory of one block on one instance, measured by test_prefix_index.py when compiled
(interpreted: 600). The worst case is a prompt of one block just after the tables grew. Of long
prompts a block takes less than half."""
GROUPS_MAX: Final = 256
SWEPT: Final = 8192
"""Blocks that are taken out of the masks at once, which takes up to 3 ms. The others follow with
each prompt that is noted."""

SPARED: Final = 32
"""Runs in use that are passed over at once on the way to one that is not."""


class PrefixIndex:
    """Block hashes -> instances, which are known by name to those who ask for hits."""

    def __init__(self, max_bytes: int, max_blocks: int | None = None) -> None:
        self._max_total = max(1, max_bytes // BYTES_PER_BLOCK)
        self._max_blocks = max_blocks
        self._masks: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._groups: dict[int, tuple[str, ...]] = {}
        self._caches: dict[str, EngineCache] = {}
        self._uses = 0
        self._owners: dict[str, int] = {"": NOBODYS}
        self._everyone = 0
        self._lost: deque[tuple[int, Runs]] = deque()
        """Bits of lost caches, and their runs, that the masks still have."""
        self._total = 0
        self.now_s = 0.0
        """The time of the last decision, at which blocks are taken to be used."""

    @property
    def total_blocks(self) -> int:
        """Number of blocks over all instances; a block on two instances counts twice."""
        return self._total - sum(runs.size for _, runs in self._lost)

    def limit(self, cache: EngineCache, max_blocks: int) -> None:
        """Set the most blocks that an engine holds."""
        if cache.limit_blocks != max_blocks:
            cache.limit_blocks = max(1, max_blocks)
            self._shrink(cache)

    def reserve(self, cache: EngineCache, blocks: int) -> None:
        """Reserve room for blocks that an engine will compute: evict the oldest blocks now.

        As far as they are not held: an engine begins with a prompt when there is room for it.
        """
        cache.reserved_blocks = blocks
        self._shrink(cache)

    def lacks_room(self, cache: EngineCache) -> bool:
        """Whether an engine has less room than was reserved: prompts wait there."""
        limit = self.capacity(cache)
        return limit is not None and cache.blocks + cache.reserved_blocks > limit

    def capacity(self, cache: EngineCache) -> int | None:
        """The limit of a cache in blocks, or None."""
        return self._max_blocks if cache.limit_blocks is None else cache.limit_blocks

    def full_ratio(self, cache: EngineCache) -> float:
        """Fill level of an engine's cache, reserved room included, 0..1; 0 while unknown."""
        capacity = self.capacity(cache)
        used = cache.reserved_blocks + cache.blocks
        cache.full_ratio = ratio = min(1.0, used / capacity) if capacity else 0.0
        return ratio

    def full_ratios(self, caches: Sequence[EngineCache]) -> list[float]:
        """`full_ratio` of several instances."""
        ratios = []
        for cache in caches:
            ratio = cache.full_ratio
            ratios.append(self.full_ratio(cache) if ratio is None else ratio)
        return ratios

    def displaced(
        self, cache: EngineCache, hashes: Sequence[int], hit: int
    ) -> list[tuple[int, float]]:
        """The blocks that a prompt displaces: their number and last use.

        `hit`: blocks of the prompt that are there; they are in use while it runs.
        """
        capacity = self.capacity(cache)
        if capacity is None:
            return []
        new = len(hashes) - hit
        excess = min(new, cache.blocks + cache.reserved_blocks + new - capacity)
        if excess <= 0:
            return []
        own, _start = cache.runs.last_run(hashes, hit)
        return cache.runs.evicted_next(excess, own, cache.holds)

    def hits(self, hashes: Sequence[int]) -> dict[str, int]:
        """Leading blocks of the prompt that each known instance holds, in blocks."""
        hit = dict.fromkeys(self._caches, 0)
        if hashes:
            first = self._everyone & self._masks.get(hashes[0], 0)
            last = first & self._masks.get(hashes[-1], 0)
            if last:
                self._settle(hit, last, len(hashes))
            if first != last:
                self._halve(hit, hashes, (0, first), (len(hashes) - 1, last))
        return hit

    def _halve(
        self,
        hit: dict[str, int],
        hashes: Sequence[int],
        low: tuple[int, int],
        high: tuple[int, int],
    ) -> None:
        """Find where instances drop out between two blocks: (place, mask of holders) each."""
        (start, held), (end, still) = low, high
        masks = self._masks.get
        while held != still:
            if end - start == 1:
                self._settle(hit, held & ~still, end)
                return
            middle = (start + end) // 2
            kept = held & masks(hashes[middle], 0)
            if kept == held:
                start = middle
            else:
                if kept != still:
                    self._halve(hit, hashes, (middle, kept), (end, still))
                end, still = middle, kept

    def _settle(self, hit: dict[str, int], lost: int, count: int) -> None:
        for name in self._groups.get(lost) or self._group(lost):
            hit[name] = count

    def _group(self, mask: int) -> tuple[str, ...]:
        """Names of the instances in a mask; remembered, since few masks occur."""
        if len(self._groups) >= GROUPS_MAX:
            self._groups.clear()
        names, left = [], mask
        while left:
            lowest = left & -left
            names.append(self._names[lowest])
            left ^= lowest
        self._groups[mask] = group = tuple(names)
        return group

    def insert(
        self, cache: EngineCache, hashes: Sequence[int], reserved: int = 0, tenant: str = ""
    ) -> int:
        """Note that an engine now has this tenant's prompt's blocks; gives the age of this use.

        `reserved`: as of `reserve`, from now on.
        """
        age = self._add(cache, hashes, tenant)
        self.reserve(cache, reserved)
        return age

    def insert_held(
        self, cache: EngineCache, hashes: Sequence[int], reserved: int, tenant: str = ""
    ) -> Hold | None:
        """`insert` for a prompt that is in use from now on."""
        self._add(cache, hashes, tenant)
        hold = self.hold(cache, hashes)
        self.reserve(cache, reserved)
        return hold

    def _add(self, cache: EngineCache, hashes: Sequence[int], tenant: str) -> int:
        if not cache.bit and not self._enter(cache):
            return 0
        if self._lost:
            self._sweep(SWEPT)
        cache.is_all_held = False
        cache.serves(tenant)
        runs = cache.runs
        known, owner = self.held(cache, hashes), self._owner(tenant)
        if known == len(hashes):
            return self._touch(cache, hashes, known, owner)  # as at the end of most turns
        blocks, age = self._take(cache, hashes, known, owner)
        if len(blocks) == known:
            new = hashes[known:]
            self._mark(cache.bit, new)
            blocks += new
            runs.size += len(new)
            self._total += len(new)
        runs.put(blocks, age, self.now_s)
        return age

    def answered(self, cache: EngineCache, age: int, blocks: int) -> None:
        """Add an answer's blocks after the prompt that was last used at `age`."""
        self._total += cache.runs.append_answer(age, blocks)

    def goes_on(self, hold: Hold) -> None:
        """A prompt goes on after what is held of it: with the answer, if one was noted there."""
        self._total -= hold.cache.runs.remove_answer(hold.age, hold.hashes[hold.blocks - 1])

    def _mark(self, bit: int, blocks: Sequence[int]) -> None:
        """Note these blocks, one after the other in a prompt, for an instance that lacks them all.

        Mostly no instance has the first block, so none has any. Should two hashes collide,
        other instances may lose one.
        """
        masks = self._masks
        if blocks[0] in masks:
            before = map(masks.get, blocks, repeat(0))
            masks.update(zip(blocks, map(or_, list(before), repeat(bit)), strict=False))
        else:
            masks.update(dict.fromkeys(blocks, bit))

    def _owner(self, tenant: str) -> int:
        """The number of a tenant; beyond so many they own nothing."""
        owner = self._owners.get(tenant)
        if owner is None:
            if len(self._owners) == OWNERS:
                return NOBODYS
            owner = self._owners[tenant] = len(self._owners)
        return owner

    def _touch(self, cache: EngineCache, hashes: Sequence[int], known: int, owner: int) -> int:
        """Make the first `known` blocks of a prompt, all in the cache, the most recently used."""
        blocks, age = self._take(cache, hashes, known, owner)
        cache.runs.put(blocks, age, self.now_s)
        return age

    def _take(
        self, cache: EngineCache, hashes: Sequence[int], known: int, owner: int
    ) -> tuple[list[int], int]:
        """Take a prompt's blocks out of their runs, to put them into that of a new age.

        They are the owner's if all of them were. Holds follow their last block.
        """
        blocks, ages = cache.runs.take(hashes, known)
        for old in ages:
            if owner_of(old) != owner:
                owner = NOBODYS
        self._uses += 1
        age = self._uses * OWNERS + owner
        if cache.holds:
            for old in ages:
                for hold in list(cache.holds.get(old, ())):
                    last = hold.blocks - 1
                    if last < len(blocks) and blocks[last] == hold.hashes[last]:
                        _move_hold(hold, age)
        return blocks, age

    def held(self, cache: EngineCache, hashes: Sequence[int]) -> int:
        """Leading blocks of the prompt in one cache.

        A block is never there without those before it, so a binary search finds the end.
        """
        bit, masks = cache.bit, self._masks.get
        low, high = 0, len(hashes)
        if not bit:
            return 0
        if not high or masks(hashes[-1], 0) & bit:
            return high
        while low < high:
            middle = (low + high) // 2
            if masks(hashes[middle], 0) & bit:
                low = middle + 1
            else:
                high = middle
        return low

    def hold(
        self, cache: EngineCache, hashes: Sequence[int], blocks: int | None = None
    ) -> Hold | None:
        """Hold a prompt's blocks on an engine: they are not evicted until released.

        `blocks`: how much that is, where `held` has just said so.
        """
        if blocks is None:
            blocks = self.held(cache, hashes)
        if not blocks:
            return None
        hold = Hold(cache, hashes, blocks, cache.runs.last_run(hashes, blocks)[0])
        cache.holds.setdefault(hold.age, {})[hold] = None
        return hold

    def release(self, hold: Hold) -> None:
        """End a hold; the blocks keep their place in the order of eviction until a new use."""
        hold.cache.is_all_held = False
        _leave_hold(hold)

    @property
    def holds(self) -> int:
        """Number of open holds over all instances."""
        caches = self._caches.values()
        return sum(len(sharing) for cache in caches for sharing in cache.holds.values())

    def trim(self, cache: EngineCache, age: int) -> None:
        """Drop every block of a cache that was last used at `age` or earlier, some of them later.

        SWEPT are dropped at once, and so many with each prompt that is noted there.
        """
        cache.trimmed = max(cache.trimmed, age)
        self._trim(cache)
        cache.full_ratio = None

    def _trim(self, cache: EngineCache) -> None:
        runs, left = cache.runs, SWEPT
        while (oldest := runs.oldest) is not None and oldest <= cache.trimmed:
            if left <= 0:
                return
            left -= SWEPT // SPARED if self._spare(cache, oldest) else self._evict(cache, left)
        cache.trimmed = NOT_TRIMMED

    def trim_of(self, cache: EngineCache, tenant: str, age: int) -> None:
        """Drop those blocks of `age` or earlier that this tenant alone has used, SWEPT at most."""
        runs, owner, left = cache.runs, self._owner(tenant), SWEPT
        while left > 0 and (oldest := runs.oldest_of(owner)) is not None and oldest <= age:
            if not self._spare(cache, oldest):
                blocks = runs.pop_of(oldest, left)
                self._unmark(cache.bit, blocks)
                left -= len(blocks)
        cache.full_ratio = None

    def empty(self, cache: EngineCache) -> None:
        """Drop every block of a cache that no running prompt holds: its engine has emptied it."""
        self.trim(cache, (self._uses + 1) * OWNERS - 1)

    def _spare(self, cache: EngineCache, oldest: int | None) -> bool:
        """If the next run to be evicted is held, make it and its prefix the most recently used."""
        holds = cache.holds
        if not holds or oldest is None or oldest not in holds:
            return False
        for hold in list(holds[oldest]):
            if hold.age == oldest:
                hold.blocks = self.held(cache, hold.hashes)
                age = self._touch(cache, hold.hashes, hold.blocks, owner_of(oldest))
                _move_hold(hold, age)
        return True

    def adopt(self, cache: EngineCache, rows: Sequence[Sequence[int]]) -> None:
        """Take over what another index knew of a cache that this one knows nothing of.

        `rows`: as `Runs.rows` gave them, what is evicted next first.
        """
        if cache.bit or not rows or not self._enter(cache):
            return
        runs = cache.runs
        cache.serves("")
        for blocks in rows:
            self._uses += 1
            age = self._uses * OWNERS + NOBODYS
            self._mark(cache.bit, blocks)
            runs.put(list(blocks), age, self.now_s)
            runs.size += len(blocks)
            self._total += len(blocks)
        self._shrink(cache)

    def _enter(self, cache: EngineCache) -> bool:
        """Give a cache a bit in the masks, unless it is lost."""
        if cache.is_lost:
            return False
        taken = self._everyone
        for lost, _ in self._lost:
            taken |= lost
        cache.bit = bit = ~taken & (taken + 1)
        self._names[bit] = cache.name
        self._caches[cache.name] = cache
        self._everyone |= bit
        return True

    def drop(self, cache: EngineCache) -> None:
        """Take a cache that is lost out of the masks, block by block, some of them later.

        Dropping an instance's state does not do this by itself: its bit is wanted for another, and
        a mask without other bits would stay for ever. Until then nobody asks for its bit.
        """
        cache.is_lost = True
        cache.holds = {}
        if not cache.bit:
            return
        self._everyone ^= cache.bit
        self._groups.clear()
        del self._names[cache.bit], self._caches[cache.name]
        self._lost.append((cache.bit, cache.runs))
        cache.bit, cache.runs = 0, Runs()
        self._sweep(SWEPT)

    def _sweep(self, count: int) -> None:
        """Take up to so many blocks of lost caches out of the masks."""
        while self._lost and count > 0:
            bit, runs = self._lost[0]
            swept = self._pop(bit, runs, count)
            count -= swept
            if not swept:
                self._lost.popleft()

    def _shrink(self, cache: EngineCache) -> None:
        """Evict until the cache is within its limit, and all caches within the index's bytes."""
        cache.full_ratio = None
        if not cache.bit:
            return
        if cache.trimmed != NOT_TRIMMED:
            self._trim(cache)
        limit = self.capacity(cache)
        if limit is not None:
            # A size that has shrunk may leave much over: the rest goes with the next prompts.
            self._evict_to(cache, max(limit - cache.reserved_blocks, cache.runs.size - SWEPT))
        if self._lost:
            self._sweep(self._total - self._max_total)
        while self._total > self._max_total:
            largest = max(self._caches.values(), key=_blocks)
            room = largest.blocks - (self._total - self._max_total)
            self._evict_to(largest, room, spares_holds=False)
            largest.full_ratio = None

    def _evict_to(self, cache: EngineCache, room: int, *, spares_holds: bool = True) -> None:
        """Evict the oldest blocks that are not held; if it `spares_holds` not, then held ones too.

        Each hold is examined once, and SPARED of them: the next call goes on.
        """
        excess = cache.runs.size - max(0, room)
        if excess <= 0 or (spares_holds and cache.is_all_held):
            return
        spared, is_all = min(SPARED, len(cache.holds)), len(cache.holds) <= SPARED
        while excess > 0:
            if spared and self._spare(cache, cache.runs.oldest):
                spared -= 1
            elif spares_holds and cache.runs.oldest in cache.holds:
                cache.is_all_held = is_all
                return
            else:
                count = self._evict(cache, excess)
                if not count:
                    return
                excess -= count

    def _evict(self, cache: EngineCache, count: int) -> int:
        """Evict up to `count` blocks of one run; returns how many."""
        return self._pop(cache.bit, cache.runs, count)

    def _pop(self, bit: int, runs: Runs, count: int) -> int:
        left = runs.pop(count)
        self._unmark(bit, left)
        return len(left)

    def _unmark(self, bit: int, left: Sequence[int]) -> None:
        """Note that blocks have left a cache."""
        masks = self._masks
        for block in left:
            mask = masks.get(block, 0) & ~bit
            if mask:
                masks[block] = mask
            else:
                masks.pop(block, None)
        self._total -= len(left)


def _blocks(cache: EngineCache) -> int:
    return cache.runs.size


def _leave_hold(hold: Hold) -> None:
    holds = hold.cache.holds
    sharing = holds.get(hold.age, {})
    sharing.pop(hold, None)
    if not sharing:
        holds.pop(hold.age, None)


def _move_hold(hold: Hold, age: int) -> None:
    _leave_hold(hold)
    hold.age = age
    hold.cache.holds.setdefault(age, {})[hold] = None
