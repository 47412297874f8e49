"""Which instance holds which prefix: an approximation by what was routed there.

One dict maps a chained block hash to a bitmask of instances, so one walk over a prompt's blocks
gives the hit length of every instance at once. A chained hash stands for its whole prefix, hence
an instance's hit ends at the first block that it lacks.

Bounded twice: `max_blocks` per instance (what an engine can hold) and `max_bytes` overall; the
least recently used block leaves first. Blocks of one prompt are touched tail first, so the root,
which the most prompts share, stays longest (vLLM frees in the same order).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BYTES_PER_BLOCK = 240
"""Memory of one block on one instance: an entry of an OrderedDict, an entry and an int of a dict
(tests/core/test_prefix.py measures it with tracemalloc)."""


class PrefixIndex:
    """Block hashes -> instances. Instances are known by name; at most 512 at a time."""

    def __init__(self, max_bytes: int, max_blocks: int | None = None) -> None:
        self._max_total = max(1, max_bytes // BYTES_PER_BLOCK)
        self._max_blocks = max_blocks
        self._masks: dict[int, int] = {}
        self._bits: dict[str, int] = {}
        self._lru: dict[str, OrderedDict[int, None]] = {}
        self._total = 0

    @property
    def total_blocks(self) -> int:
        """Blocks over all instances; one block on two instances counts twice."""
        return self._total

    def blocks(self, instance: str) -> int:
        """Blocks believed to be on one instance."""
        return len(self._lru.get(instance, ()))

    def hits(self, hashes: Sequence[int]) -> dict[str, int]:
        """Leading blocks of the prompt that each known instance holds, in blocks."""
        hit = dict.fromkeys(self._bits, 0)
        names = {1 << bit: name for name, bit in self._bits.items()}
        alive = sum(names)
        count = 0
        for block in hashes:
            still = alive & self._masks.get(block, 0)
            if still != alive:
                self._settle(hit, names, alive & ~still, count)
                alive = still
                if not alive:
                    return hit
            count += 1
        self._settle(hit, names, alive, count)
        return hit

    @staticmethod
    def _settle(hit: dict[str, int], names: dict[int, str], mask: int, count: int) -> None:
        while mask:
            low = mask & -mask
            hit[names[low]] = count
            mask ^= low

    def insert(self, instance: str, hashes: Sequence[int]) -> None:
        """Note that `instance` now holds this prompt's blocks."""
        if instance not in self._bits:
            self._bits[instance] = self._free_bit()
            self._lru[instance] = OrderedDict()
        lru, bit = self._lru[instance], 1 << self._bits[instance]
        for block in reversed(hashes):
            if block in lru:
                lru.move_to_end(block)
            else:
                lru[block] = None
                self._masks[block] = self._masks.get(block, 0) | bit
                self._total += 1
        self._shrink(instance)

    def forget(self, instance: str) -> None:
        """Drop everything known of an instance that restarted or left."""
        while self._lru.get(instance):
            self._evict(instance)
        self._lru.pop(instance, None)
        self._bits.pop(instance, None)

    def _free_bit(self) -> int:
        taken = set(self._bits.values())
        return next(bit for bit in range(len(taken) + 1) if bit not in taken)

    def _shrink(self, instance: str) -> None:
        while self._max_blocks is not None and len(self._lru[instance]) > self._max_blocks:
            self._evict(instance)
        while self._total > self._max_total:
            self._evict(max(self._lru, key=lambda name: len(self._lru[name])))

    def _evict(self, instance: str) -> None:
        block, _ = self._lru[instance].popitem(last=False)
        mask = self._masks[block] & ~(1 << self._bits[instance])
        if mask:
            self._masks[block] = mask
        else:
            del self._masks[block]
        self._total -= 1
