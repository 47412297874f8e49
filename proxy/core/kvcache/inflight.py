"""Prefixes that are being computed: siblings of a request see them before its first token.

A request that is placed will leave its prompt's blocks on the instance that computes it. Until then
they are listed here under their first missing block. A sibling's walk over the cached blocks ends
at the same block, so one lookup finds every prompt that may extend its hit. Chained hashes that are
equal at one block are equal before it. Nothing is copied: entering, leaving and looking cost the
same for every length of prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core.kvcache.engine_cache import EngineCache

Prompt = Sequence[int]


class Inflight:
    """Missing blocks of prompts, per cache. `key` is the owner's, and must be hashable.

    An owner leaves when its request ends, also where the cache is lost by then.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, dict[EngineCache, dict[object, Prompt]]] = {}

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def enter(self, cache: EngineCache, key: object, hashes: Prompt, start: int) -> None:
        """An engine begins to compute a prompt's blocks from `start` on."""
        self.leave(cache, key)
        if start >= len(hashes):
            return
        first, blocks = hashes[start], len(hashes) - start
        self._prompts.setdefault(first, {}).setdefault(cache, {})[key] = hashes
        cache.computing[key] = first, blocks
        cache.computing_blocks += blocks

    def leave(self, cache: EngineCache, key: object) -> bool:
        """The blocks are computed, or never will be; false if that was noted before."""
        if (entry := cache.computing.pop(key, None)) is None:
            return False
        first, blocks = entry
        cache.computing_blocks -= blocks
        begun = self._prompts[first]
        del begun[cache][key]
        if not begun[cache]:
            del begun[cache]
        if not begun:
            del self._prompts[first]
        return True

    def begun_at(self, hashes: Prompt, hit: int) -> list[EngineCache]:
        """The prompts being computed that continue the first `hit` blocks of a prompt."""
        begun = self._prompts.get(hashes[hit], {}) if hit < len(hashes) else {}
        return [cache for cache in begun if not cache.is_lost]

    def reach(self, cache: EngineCache, hashes: Prompt, hit: int) -> int:
        """Leading blocks that will be cached once the prompts in flight are computed."""
        while hit < len(hashes) and (sharing := self._prompts.get(hashes[hit], {}).get(cache)):
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
