"""Which instance holds which prefix: an approximation by what was routed there.

One dict maps a chained block hash to a bitmask of instances. A chained hash stands for its whole
prefix, and an instance that holds a block holds those before it: blocks of one prompt are used
together and leave tail first. So the masks along a prompt only lose bits, and halving finds
where: a few looks instead of one per block, for all instances at once.

Bounded twice: `max_blocks` per instance (what an engine can hold) and `max_bytes` overall; the
least recently used block leaves first, so the root, which the most prompts share, stays longest
(vLLM frees in the same order). Every use has a number, its age, and what requests in flight use is
held: an engine evicts only what nobody runs on.

A use takes over all blocks of its prompt, and later ones take its leading blocks from it: what was
last used at one age is always one run of blocks. So the order of eviction is kept per run, and a
use costs a few steps and some copying in C, however long the prompt is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import or_
from typing import cast

from proxy.core.kvcache.eviction_order import Hold, Runs

BYTES_PER_BLOCK = 600
"""Memory of one block on one instance, at its worst, as test_prefix_index.py measures it: a prompt
of one block, just after the tables grew, in a compiled installation (interpreted: 500). Of long
prompts a block takes less than half."""
GROUPS_MAX = 256


class PrefixIndex:
    """Block hashes -> instances, which are known by name."""

    def __init__(self, max_bytes: int, max_blocks: int | None = None) -> None:
        self._max_total = max(1, max_bytes // BYTES_PER_BLOCK)
        self._max_blocks = max_blocks
        self._limits: dict[str, int] = {}
        self._reserved: dict[str, int] = {}
        self._masks: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._groups: dict[int, tuple[str, ...]] = {}
        self._runs: dict[str, Runs] = {}
        self._full: dict[str, float] = {}
        self._holds: dict[str, dict[int, dict[Hold, None]]] = {}
        self._uses = 0
        self._everyone = 0
        self._total = 0

    @property
    def total_blocks(self) -> int:
        """Blocks over all instances; one block on two instances counts twice."""
        return self._total

    def blocks(self, instance: str) -> int:
        """Blocks believed to be on one instance."""
        runs = self._runs.get(instance)
        return runs.size if runs is not None else 0

    def limit(self, instance: str, max_blocks: int) -> None:
        """An instance turned out to hold at most this many blocks."""
        if self._limits.get(instance) != max_blocks:
            self._limits[instance] = max(1, max_blocks)
            self._shrink(instance)

    def reserve(self, instance: str, blocks: int) -> None:
        """So many blocks are on their way to an instance: the oldest make place for them now."""
        self._reserved[instance] = blocks
        self._shrink(instance)

    def capacity(self, instance: str) -> int | None:
        """The limit in blocks, where one is known."""
        return self._limits.get(instance, self._max_blocks)

    def full_ratio(self, instance: str) -> float:
        """How full an instance's cache is, reserved room included, 0..1; 0 while it is unknown."""
        capacity = self._limits.get(instance, self._max_blocks)
        used = self._reserved.get(instance, 0) + self.blocks(instance)
        self._full[instance] = ratio = min(1.0, used / capacity) if capacity else 0.0
        return ratio

    def full_ratios(self, names: Sequence[str]) -> list[float]:
        """The same of several."""
        ratios = list(map(self._full.get, names))
        for at, ratio in enumerate(ratios) if None in ratios else ():
            if ratio is None:
                ratios[at] = self.full_ratio(names[at])
        return cast("list[float]", ratios)

    def hits(self, hashes: Sequence[int]) -> dict[str, int]:
        """Leading blocks of the prompt that each known instance holds, in blocks."""
        hit = dict.fromkeys(self._runs, 0)
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
        hit.update(dict.fromkeys(self._groups.get(lost) or self._group(lost), count))

    def _group(self, mask: int) -> tuple[str, ...]:
        """The instances of a mask. Few occur: prompts begin alike and end on few instances."""
        if len(self._groups) >= GROUPS_MAX:
            self._groups.clear()
        names, left = [], mask
        while left:
            lowest = left & -left
            names.append(self._names[lowest])
            left ^= lowest
        self._groups[mask] = group = tuple(names)
        return group

    def insert(self, instance: str, hashes: Sequence[int]) -> int:
        """Note that `instance` now has this prompt's blocks; gives the age of this use."""
        runs = self._runs.get(instance) or self._enter(instance)
        known = self.held(instance, hashes)
        if known == len(hashes):
            return self._touch(runs, hashes, known)  # as every turn but the first ends
        self._uses = age = self._uses + 1
        blocks = runs.take(hashes, known)
        if len(blocks) == known:
            new = hashes[known:]
            self._mark(runs.bit, new)
            blocks += new
            runs.size += len(new)
            self._total += len(new)
        runs.put(blocks, age)
        self._shrink(instance)
        return age

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

    def _touch(self, runs: Runs, hashes: Sequence[int], known: int) -> int:
        """Use the first `known` blocks of a prompt, all there."""
        self._uses = age = self._uses + 1
        runs.put(runs.take(hashes, known), age)
        return age

    def held(self, instance: str, hashes: Sequence[int]) -> int:
        """Leading blocks of the prompt on one instance.

        A block is never there without those before it, so a binary search finds the end.
        """
        runs, masks = self._runs.get(instance), self._masks.get
        low, high = 0, len(hashes)
        if runs is None:
            return 0
        bit = runs.bit
        if not high or masks(hashes[-1], 0) & bit:
            return high
        while low < high:
            middle = (low + high) // 2
            if masks(hashes[middle], 0) & bit:
                low = middle + 1
            else:
                high = middle
        return low

    def is_newest(self, instance: str, hashes: Sequence[int], age: int) -> bool:
        """Whether the use of this number found all of the prompt there, and was the last one."""
        runs = self._runs.get(instance)
        return runs is not None and runs.is_newest(hashes, age)

    def hold(self, instance: str, hashes: Sequence[int], blocks: int | None = None) -> Hold | None:
        """What an instance has of a prompt is not evicted until the hold is released.

        `blocks`: how much that is, where `held` has just said so.
        """
        if blocks is None:
            blocks = self.held(instance, hashes)
        if not blocks:
            return None
        hold = Hold(instance, hashes, self._runs[instance].age_at(hashes, blocks))
        self._enter_hold(hold)
        return hold

    def _enter_hold(self, hold: Hold) -> None:
        self._holds.setdefault(hold.instance, {}).setdefault(hold.age, {})[hold] = None

    def release(self, hold: Hold) -> None:
        """The prompt is in use no more; its blocks keep their place in the order of eviction."""
        holds = self._holds.get(hold.instance, {})
        sharing = holds.get(hold.age, {})
        sharing.pop(hold, None)
        if not sharing:
            holds.pop(hold.age, None)

    @property
    def holds(self) -> int:
        """Holds that were not released, over all instances."""
        return sum(len(sharing) for holds in self._holds.values() for sharing in holds.values())

    def trim(self, instance: str, age: int) -> None:
        """Drop what an instance has not used since the use of this number, that use included."""
        runs = self._runs.get(instance)
        while runs is not None and (oldest := runs.oldest) is not None and oldest <= age:
            if not self._spare(instance, runs):
                self._evict(runs, runs.size)
        self._full.pop(instance, None)

    def _spare(self, instance: str, runs: Runs) -> bool:
        """If what is evicted next is held, move it behind the rest, with all that it stands on."""
        holds, oldest = self._holds.get(instance), runs.oldest
        sharing = holds.pop(oldest, None) if holds and oldest is not None else None
        if sharing is None:
            return False
        for hold in sharing:
            hold.age = self._touch(runs, hold.hashes, self.held(instance, hold.hashes))
            self._enter_hold(hold)
        return True

    def runs(self, instance: str) -> list[list[int]]:
        """An instance's blocks as they are kept, for `adopt`; what is evicted next is first."""
        runs = self._runs.get(instance)
        return runs.rows() if runs is not None else []

    def adopt(self, instance: str, rows: Sequence[Sequence[int]]) -> None:
        """Take over what another index knew of an instance that this one knows nothing of."""
        if instance in self._runs or not rows:
            return
        runs = self._enter(instance)
        for blocks in rows:
            self._uses = age = self._uses + 1
            self._mark(runs.bit, blocks)
            runs.put(list(blocks), age)
            runs.size += len(blocks)
            self._total += len(blocks)
        self._shrink(instance)

    def _enter(self, instance: str) -> Runs:
        bit = ~self._everyone & (self._everyone + 1)
        self._names[bit] = instance
        self._runs[instance] = runs = Runs(bit)
        self._everyone |= bit
        return runs

    def forget(self, instance: str) -> None:
        """Drop everything known of an instance that restarted or left."""
        for table in (self._limits, self._reserved, self._holds, self._full):
            table.pop(instance, None)
        if (runs := self._runs.pop(instance, None)) is None:
            return
        while runs.size and self._evict(runs, runs.size):
            pass
        self._everyone ^= runs.bit
        self._groups.clear()
        del self._names[runs.bit]

    def _shrink(self, instance: str) -> None:
        """Bring an instance within its limit, and all of them within theirs."""
        self._full.pop(instance, None)
        runs = self._runs.get(instance)
        if runs is None:
            return
        limit = self._limits.get(instance, self._max_blocks)
        if limit is not None:
            self._evict_to(instance, runs, limit - self._reserved.get(instance, 0))
        while self._total > self._max_total:
            largest = max(self._runs, key=self.blocks)
            runs = self._runs[largest]
            self._evict_to(largest, runs, runs.size - (self._total - self._max_total))
            self._full.pop(largest, None)

    def _evict_to(self, instance: str, runs: Runs, room: int) -> None:
        """Evict the oldest, those in use last; each hold is looked at once."""
        excess = runs.size - max(0, room)
        if excess <= 0:
            return
        spared = len(self._holds.get(instance, ()))
        while excess > 0:
            if spared and self._spare(instance, runs):
                spared -= 1
            else:
                count = self._evict(runs, excess)
                if not count:
                    return
                excess -= count

    def _evict(self, runs: Runs, count: int) -> int:
        """Evict up to so many blocks, of one run; how many that were."""
        masks, bit = self._masks, runs.bit
        left = runs.pop(count)
        for block in left:
            mask = masks.get(block, 0) & ~bit
            if mask:
                masks[block] = mask
            else:
                masks.pop(block, None)
        self._total -= len(left)
        return len(left)
