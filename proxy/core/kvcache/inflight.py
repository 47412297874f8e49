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
        self._prompts: dict[int, dict[str, dict[object, Prompt]]] = {}
        self._owners: dict[str, dict[object, tuple[int, int]]] = {}
        self._blocks: dict[str, int] = {}

    def instances(self) -> Sequence[str]:
        """Where something is being computed."""
        return list(self._owners)

    def __bool__(self) -> bool:
        return bool(self._owners)

    def blocks(self, instance: str) -> int:
        """Blocks that an instance will hold and does not yet."""
        return self._blocks.get(instance, 0)

    def enter(self, instance: str, key: object, hashes: Prompt, start: int) -> None:
        """`instance` begins with the blocks from `start` on."""
        self.leave(instance, key)
        if start >= len(hashes):
            return
        first, blocks = hashes[start], len(hashes) - start
        self._prompts.setdefault(first, {}).setdefault(instance, {})[key] = hashes
        self._owners.setdefault(instance, {})[key] = first, blocks
        self._blocks[instance] = self.blocks(instance) + blocks

    def leave(self, instance: str, key: object) -> bool:
        """They are there, or never will be; false when this was said before."""
        owners = self._owners.get(instance, {})
        if (entry := owners.pop(key, None)) is None:
            return False
        first, blocks = entry
        del self._prompts[first][instance][key]
        self._tidy(instance, first)
        self._blocks[instance] -= blocks
        if not owners:
            self.forget(instance)
        return True

    def _tidy(self, instance: str, first: int) -> None:
        begun = self._prompts[first]
        if not begun[instance]:
            del begun[instance]
        if not begun:
            del self._prompts[first]

    def forget(self, instance: str) -> None:
        """An instance restarted or left: nothing that it was computing will come."""
        for first in {first for first, _ in self._owners.pop(instance, {}).values()}:
            self._prompts[first][instance].clear()
            self._tidy(instance, first)
        self._blocks.pop(instance, None)

    def begun_at(self, hashes: Prompt, hit: int) -> Sequence[str]:
        """Who computes what follows on the first `hit` blocks of a prompt."""
        return list(self._prompts.get(hashes[hit], ())) if hit < len(hashes) else ()

    def reach(self, instance: str, hashes: Prompt, hit: int) -> int:
        """How far `hit` leading blocks will reach once what is in flight is there, in blocks."""
        while hit < len(hashes) and (sharing := self._prompts.get(hashes[hit], {}).get(instance)):
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
