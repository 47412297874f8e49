"""Which KV blocks an engine holds: a paged pool with a prefix cache, by counts and hashes only.

The question decided here is which prefix of a prompt is already in memory and which cached
block must go when memory runs out. A block is either unused, anonymous (held by one request, its
content not addressable) or cached (addressed by the chained hash of all tokens up to its end). A
cached block nobody holds is idle: it still serves hits and is the first to be evicted, least
recently released first. There are no block numbers: where a block lies never matters to timing.

The rules are those of vLLM's V1 block pool: whole blocks only, a request's blocks are released
tail first (so roots outlive leaves), a block whose hash is already cached stays a private
duplicate, and eviction takes idle blocks only.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Holding:
    """The blocks that one request holds: `cached` in prompt order, plus anonymous ones."""

    cached: list[int] = field(default_factory=list)
    anonymous: int = 0

    @property
    def blocks(self) -> int:
        """All blocks held."""
        return len(self.cached) + self.anonymous


class BlockPool:
    """A fixed number of KV blocks. Invariant: unused + anonymous + cached == total."""

    __slots__ = ("_anonymous", "_idle", "_refs", "_unused", "evicted_blocks", "releases", "total")

    def __init__(self, total_blocks: int) -> None:
        self.total = total_blocks
        self._unused = total_blocks
        self._anonymous = 0
        self._refs: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.evicted_blocks = 0
        self.releases = 0
        """Counts releases: while it stands still, a refused allocation stays refused."""

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated now: unused ones and idle cached ones."""
        return self._unused + len(self._idle)

    @property
    def usage_ratio(self) -> float:
        """Held blocks over all blocks, 0..1 (idle cached blocks count as free, as in vLLM)."""
        return 1.0 - self.free_blocks / self.total

    def match(self, hashes: Sequence[int], limit: int) -> int:
        """Count the leading hashes that are cached, at most `limit`."""
        refs = self._refs
        hit = 0
        for value in hashes:
            if hit == limit or value not in refs:
                break
            hit += 1
        return hit

    def room_beside(self, hits: Sequence[int]) -> int:
        """Blocks that could be allocated once `hits` are held (idle hits stop being free)."""
        refs = self._refs
        return self.free_blocks - sum(1 for value in hits if refs[value] == 0)

    def hold(self, holding: Holding, hits: Sequence[int]) -> None:
        """Add cached blocks to a holding; each must be cached."""
        refs, idle = self._refs, self._idle
        for value in hits:
            count = refs[value]
            if count == 0:
                del idle[value]
            refs[value] = count + 1
        holding.cached.extend(hits)

    def allocate(self, holding: Holding, blocks: int) -> bool:
        """Add anonymous blocks, evicting idle cached ones as needed; False changes nothing."""
        if blocks > self._unused + len(self._idle):
            return False
        missing = blocks - self._unused
        if missing > 0:
            self._evict(missing)
        self._unused -= blocks
        self._anonymous += blocks
        holding.anonymous += blocks
        return True

    def publish(self, holding: Holding, value: int) -> bool:
        """Give one anonymous block its hash; False when a twin is cached (it stays private)."""
        if value in self._refs:
            return False
        self._refs[value] = 1
        holding.cached.append(value)
        holding.anonymous -= 1
        self._anonymous -= 1
        return True

    def release(self, holding: Holding) -> None:
        """Give everything back: cached blocks become idle tail first, the others unused."""
        refs, idle = self._refs, self._idle
        for value in reversed(holding.cached):
            count = refs[value] - 1
            refs[value] = count
            if count == 0:
                idle[value] = None
        self._unused += holding.anonymous
        self._anonymous -= holding.anonymous
        holding.cached = []
        holding.anonymous = 0
        self.releases += 1

    def check(self) -> None:
        """Raise when a block was lost or counted twice; for tests."""
        if self._unused + self._anonymous + len(self._refs) != self.total:
            raise ArithmeticError("blocks are not conserved")
        if min(self._unused, self._anonymous) < 0 or any(n < 0 for n in self._refs.values()):
            raise ArithmeticError("a negative count")
        if {value for value, count in self._refs.items() if count == 0} != set(self._idle):
            raise ArithmeticError("idle blocks and zero reference counts differ")

    def _evict(self, blocks: int) -> None:
        for _ in range(blocks):
            value, _none = self._idle.popitem(last=False)
            del self._refs[value]
        self._unused += blocks
        self.evicted_blocks += blocks
