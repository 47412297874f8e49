"""Which instance holds which prefix: an approximation by what was routed there.

One dict maps a chained block hash to a bitmask of instances. A chained hash stands for its whole
prefix, and an instance that holds a block holds those before it: blocks of one prompt are touched
tail first and leave tail first. So the masks along a prompt only lose bits, and halving finds
where: a few looks instead of one per block, for all instances at once.

Bounded twice: `max_blocks` per instance (what an engine can hold) and `max_bytes` overall; the
least recently used block leaves first, so the root, which the most prompts share, stays longest
(vLLM frees in the same order). Every use has a number, its age, and what requests in flight use is
held: an engine evicts only what nobody runs on.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

BYTES_PER_BLOCK = 416
"""Memory of one block on one instance, at its worst (tests/core/test_prefix.py measures it): the
entry of an OrderedDict, the entry of a dict, hash and mask as ints of their own, and both tables
just after they grew. 220 to 375 were measured once full, up to 410 at the moment of growing."""


@dataclass(slots=True, eq=False)
class Hold:
    """A prompt in use on one instance; `age` is that of its last block there."""

    instance: str
    hashes: Sequence[int]
    age: int


class PrefixIndex:
    """Block hashes -> instances, which are known by name."""

    def __init__(self, max_bytes: int, max_blocks: int | None = None) -> None:
        self._max_total = max(1, max_bytes // BYTES_PER_BLOCK)
        self._max_blocks = max_blocks
        self._limits: dict[str, int] = {}
        self._reserved: dict[str, int] = {}
        self._masks: dict[int, int] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._lru: dict[str, OrderedDict[int, int]] = {}
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
        return len(self._lru.get(instance, ()))

    def limit(self, instance: str, max_blocks: int) -> None:
        """An instance turned out to hold at most this many blocks."""
        self._limits[instance] = max(1, max_blocks)
        if instance in self._lru:
            self._shrink(instance)

    def reserve(self, instance: str, blocks: int) -> None:
        """So many blocks are on their way to an instance: the oldest make place for them now."""
        self._reserved[instance] = blocks
        if instance in self._lru:
            self._shrink(instance)

    def capacity(self, instance: str) -> int | None:
        """The limit in blocks, where one is known."""
        return self._limits.get(instance, self._max_blocks)

    def full_ratio(self, instance: str) -> float:
        """How full an instance's cache is, reserved room included, 0..1; 0 while it is unknown."""
        capacity = self._limits.get(instance, self._max_blocks)
        if not capacity:
            return 0.0
        used = self._reserved.get(instance, 0) + len(self._lru.get(instance, ()))
        return min(1.0, used / capacity)

    def full_ratios(self, names: Iterable[str]) -> list[float]:
        """The same of several."""
        return list(map(self.full_ratio, names))

    def hits(self, hashes: Sequence[int]) -> dict[str, int]:
        """Leading blocks of the prompt that each known instance holds, in blocks."""
        hit = dict.fromkeys(self._bits, 0)
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
        """Settle who is lost between two blocks, each given by its place and who holds it."""
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
        while lost:
            lowest = lost & -lost
            hit[self._names[lowest]] = count
            lost ^= lowest

    def insert(self, instance: str, hashes: Sequence[int]) -> int:
        """Note that `instance` now has this prompt's blocks; gives the age of this use."""
        if instance not in self._bits:
            self._enter(instance)
        lru, bit = self._lru[instance], self._bits[instance]
        known, age = self.held(instance, hashes), self._uses + 1
        if known == len(hashes):
            return self._touch(lru, hashes)  # as every turn but the first ends
        for block in reversed(hashes[known:]):
            if block not in lru:
                lru[block] = age
                self._masks[block] = self._masks.get(block, 0) | bit
                self._total += 1
        self._touch(lru, hashes[:known])
        self._shrink(instance)
        return age

    def _touch(self, lru: OrderedDict[int, int], hashes: Sequence[int]) -> int:
        """Use these blocks, all there, tail first; most of a prompt is, so without a loop."""
        self._uses = age = self._uses + 1
        deque(map(lru.move_to_end, reversed(hashes)), maxlen=0)
        deque(map(lru.__setitem__, hashes, repeat(age)), maxlen=0)
        return age

    def held(self, instance: str, hashes: Sequence[int]) -> int:
        """Leading blocks of the prompt on one instance.

        A block is never there without those before it, so a binary search finds the end.
        """
        lru = self._lru.get(instance, ())
        low, high = 0, len(hashes)
        if not high or hashes[-1] in lru:
            return high
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in lru:
                low = middle + 1
            else:
                high = middle
        return low

    def is_newest(self, instance: str, hashes: Sequence[int], age: int) -> bool:
        """Whether the use of this number found all of the prompt there, and was the last one."""
        lru = self._lru.get(instance)
        if not lru or not hashes or lru.get(hashes[-1]) != age:
            return False
        return next(reversed(lru.values())) == age

    def hold(self, instance: str, hashes: Sequence[int], blocks: int | None = None) -> Hold | None:
        """What an instance has of a prompt is not evicted until the hold is released.

        `blocks`: how much that is, where `held` has just said so.
        """
        if blocks is None:
            blocks = self.held(instance, hashes)
        if not blocks:
            return None
        hold = Hold(instance, hashes, self._lru[instance][hashes[blocks - 1]])
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
        lru = self._lru.get(instance)
        while lru and next(iter(lru.values())) <= age:
            if not self._spare(instance):
                self._evict(instance)

    def _spare(self, instance: str) -> bool:
        """If what is evicted next is held, move it behind the rest, with all that it stands on."""
        lru, holds = self._lru[instance], self._holds.get(instance)
        sharing = holds.pop(next(iter(lru.values())), None) if holds else None
        if sharing is None:
            return False
        for hold in sharing:
            hold.age = self._touch(lru, hold.hashes[: self.held(instance, hold.hashes)])
            self._enter_hold(hold)
        return True

    def _enter(self, instance: str) -> None:
        bit = ~self._everyone & (self._everyone + 1)
        self._bits[instance], self._names[bit] = bit, instance
        self._lru[instance] = OrderedDict()
        self._everyone |= bit

    def forget(self, instance: str) -> None:
        """Drop everything known of an instance that restarted or left."""
        for table in (self._limits, self._reserved, self._holds):
            table.pop(instance, None)
        if instance not in self._bits:
            return
        blocks, bit = self._lru.pop(instance), self._bits.pop(instance)
        for block in blocks:
            self._unmark(block, bit)
        self._total -= len(blocks)
        self._everyone ^= bit
        del self._names[bit]

    def _shrink(self, instance: str) -> None:
        limit = self.capacity(instance)
        if limit is not None:
            room = max(0, limit - self._reserved.get(instance, 0))
            self._evict_to(instance, room)
        while self._total > self._max_total:
            largest = max(self._lru, key=lambda name: len(self._lru[name]))
            self._evict_to(largest, len(self._lru[largest]) - 1)

    def _evict_to(self, instance: str, room: int) -> None:
        """Evict the oldest, those in use last; each hold is looked at once."""
        lru, spared = self._lru[instance], len(self._holds.get(instance, ()))
        while len(lru) > room:
            if spared and self._spare(instance):
                spared -= 1
            else:
                self._evict(instance)

    def _evict(self, instance: str) -> None:
        block, _ = self._lru[instance].popitem(last=False)
        self._unmark(block, self._bits[instance])
        self._total -= 1

    def _unmark(self, block: int, bit: int) -> None:
        mask = self._masks[block] ^ bit
        if mask:
            self._masks[block] = mask
        else:
            del self._masks[block]
