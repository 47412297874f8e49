"""Prefixes that are being computed: siblings of a request see them before its first token.

A request that is placed will leave its prompt's blocks on the instance that computes it. Until
then they are entered here, under the first block that was missing: a sibling's walk over the blocks
that are there ends at the same one, so one lookup finds every prompt that may carry it further, and
a chained hash that agrees at one place agrees before it. Nothing is copied: entering, leaving and
looking cost the same for every length of prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

Prompt = Sequence[int]


class Inflight:
    """Missing blocks of prompts, per instance. `key` is the owner's, and must be hashable."""

    def __init__(self) -> None:
        self._prompts: dict[str, dict[int, dict[object, Prompt]]] = {}
        self._owners: dict[str, dict[object, tuple[int, int]]] = {}
        self._blocks: dict[str, int] = {}

    def instances(self) -> Sequence[str]:
        """Where something is being computed."""
        return list(self._owners)

    def blocks(self, instance: str) -> int:
        """Blocks that an instance will hold and does not yet."""
        return self._blocks.get(instance, 0)

    def enter(self, instance: str, key: object, hashes: Prompt, start: int) -> None:
        """`instance` begins with the blocks from `start` on."""
        self.leave(instance, key)
        if start >= len(hashes):
            return
        first, blocks = hashes[start], len(hashes) - start
        self._prompts.setdefault(instance, {}).setdefault(first, {})[key] = hashes
        self._owners.setdefault(instance, {})[key] = first, blocks
        self._blocks[instance] = self.blocks(instance) + blocks

    def leave(self, instance: str, key: object) -> bool:
        """They are there, or never will be; false when this was said before."""
        owners = self._owners.get(instance, {})
        if (entry := owners.pop(key, None)) is None:
            return False
        first, blocks = entry
        sharing = self._prompts[instance][first]
        del sharing[key]
        if not sharing:
            del self._prompts[instance][first]
        self._blocks[instance] -= blocks
        if not owners:
            self.forget(instance)
        return True

    def forget(self, instance: str) -> None:
        """An instance restarted or left: nothing that it was computing will come."""
        for table in (self._prompts, self._owners, self._blocks):
            table.pop(instance, None)

    def reach(self, instance: str, hashes: Prompt, hit: int) -> int:
        """How far `hit` leading blocks will reach once what is in flight is there, in blocks."""
        prompts = self._prompts.get(instance, {})
        while hit < len(hashes) and (sharing := prompts.get(hashes[hit])):
            hit = max(_common(hashes, other, hit) for other in sharing.values())
        return hit


def _common(one: Prompt, other: Prompt, low: int) -> int:
    """Length of the common prefix of two prompts that agree at `low`."""
    high = min(len(one), len(other))
    low += 1
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
