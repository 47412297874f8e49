"""KV that engines share: which blocks are in the store, by their chained hashes.

Whatever an engine computes is written as soon as it is there, and any engine finds it
(MooncakeStore, Example, a shared LMCache). The least recently used blocks make room.
"""

from collections import OrderedDict
from collections.abc import Sequence

STORE_BLOCKS = 1 << 20


class SharedStore:
    """The blocks of all engines that were given this object."""

    def __init__(self, blocks: int = STORE_BLOCKS) -> None:
        self._most = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def write(self, hashes: Sequence[int]) -> None:
        """Keep these blocks."""
        for block in hashes:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def match(self, hashes: Sequence[int], limit: int) -> int:
        """Count the leading hashes that are here, at most `limit`."""
        found = 0
        while found < limit and found < len(hashes) and hashes[found] in self._blocks:
            found += 1
        return found
