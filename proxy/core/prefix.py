"""Which instance holds which prefix: an approximation by what was routed there.

One dict maps a chained block hash to a bitmask of instances, so one walk over a prompt's blocks
gives the hit length of every instance at once. A chained hash stands for its whole prefix, hence
an instance's hit ends at the first block that it lacks.

Bounded twice: `max_blocks` per instance (what an engine can hold) and `max_bytes` overall; the
least recently used block leaves first. Blocks of one prompt are touched tail first, so the root,
which the most prompts share, stays longest (vLLM frees in the same order).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

BYTES_PER_BLOCK = 416
"""Memory of one block on one instance, at its worst (tests/core/test_prefix.py measures it): the
entry of an OrderedDict, the entry of a dict, hash and mask as ints of their own, and both tables
just after they grew. 220 to 375 were measured once full, up to 410 at the moment of growing."""


class PrefixIndex:
    """Block hashes -> instances, which are known by name."""

    def __init__(self, max_bytes: int, max_blocks: int | None = None) -> None:
        self._max_total = max(1, max_bytes // BYTES_PER_BLOCK)
        self._max_blocks = max_blocks
        self._limits: dict[str, int] = {}
        self._masks: dict[int, int] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._lru: dict[str, OrderedDict[int, None]] = {}
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

    def capacity(self, instance: str) -> int | None:
        """The limit in blocks, where one is known."""
        return self._limits.get(instance, self._max_blocks)

    def hits(self, hashes: Sequence[int]) -> dict[str, int]:
        """Leading blocks of the prompt that each known instance holds, in blocks."""
        hit = dict.fromkeys(self._bits, len(hashes))
        holders, alive = self._masks.get, self._everyone
        count = 0
        while alive and count < len(hashes):
            lost = alive & ~holders(hashes[count], 0)
            if lost:
                alive ^= lost
                self._settle(hit, lost, count)
            else:
                count = self._next_loss(hashes, alive, count)
        return hit

    def _next_loss(self, hashes: Sequence[int], alive: int, held: int) -> int:
        """The first block after `held` that not all of `alive` hold, by halving.

        Who holds a block holds all before it: an insert touches them after it, so they are younger.
        """
        missing = len(hashes)
        while missing - held > 1:
            middle = (held + missing) // 2
            if alive & ~self._masks.get(hashes[middle], 0):
                missing = middle
            else:
                held = middle
        return missing

    def _settle(self, hit: dict[str, int], lost: int, count: int) -> None:
        while lost:
            lowest = lost & -lost
            hit[self._names[lowest]] = count
            lost ^= lowest

    def insert(self, instance: str, hashes: Sequence[int]) -> None:
        """Note that `instance` now holds this prompt's blocks."""
        if instance not in self._bits:
            self._enter(instance)
        lru, bit = self._lru[instance], self._bits[instance]
        known = self._known(lru, hashes)
        for block in reversed(hashes[known:]):
            if block not in lru:
                lru[block] = None
                self._masks[block] = self._masks.get(block, 0) | bit
                self._total += 1
        deque(map(lru.move_to_end, reversed(hashes[:known])), maxlen=0)
        self._shrink(instance)

    def _known(self, lru: OrderedDict[int, None], hashes: Sequence[int]) -> int:
        """How many leading blocks an instance has: all before one that it has."""
        if not hashes or hashes[-1] in lru:
            return len(hashes)
        known, missing = -1, len(hashes) - 1
        while missing - known > 1:
            middle = (known + missing) // 2
            if hashes[middle] in lru:
                known = middle
            else:
                missing = middle
        return missing

    def _enter(self, instance: str) -> None:
        bit = ~self._everyone & (self._everyone + 1)
        self._bits[instance], self._names[bit] = bit, instance
        self._lru[instance] = OrderedDict()
        self._everyone |= bit

    def forget(self, instance: str) -> None:
        """Drop everything known of an instance that restarted or left."""
        self._limits.pop(instance, None)
        if instance not in self._bits:
            return
        blocks, bit = self._lru.pop(instance), self._bits.pop(instance)
        for block in blocks:
            self._unmark(block, bit)
        self._total -= len(blocks)
        self._everyone ^= bit
        del self._names[bit]

    def _shrink(self, instance: str) -> None:
        limit = self._limits.get(instance, self._max_blocks)
        while limit is not None and len(self._lru[instance]) > limit:
            self._evict(instance)
        while self._total > self._max_total:
            self._evict(max(self._lru, key=lambda name: len(self._lru[name])))

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
