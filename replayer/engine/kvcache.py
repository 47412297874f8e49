"""An engine's KV blocks: a paged pool with a prefix cache, by counts and hashes only.

Finds which prefix of a prompt is cached, and which cached block is evicted when memory runs out. A
block is either unused, anonymous (held by one request, its content not addressable) or cached
(addressed by the chained hash of all tokens up to its end). A cached block that no request holds is
idle: it still serves hits, and idle blocks are evicted in the order of their release. There are no
block numbers, since timing does not depend on where a block lies.

The rules are vLLM's (V1 block pool). Only whole blocks are cached. A request's blocks are released
tail first, so roots outlive leaves. A block whose hash is already cached stays a private duplicate.
Eviction takes idle blocks only.

`SharedStore` is KV that engines share (MooncakeStore, Example, a shared LMCache): what an engine
computes is written at once, and any engine finds it. The least recently used blocks are evicted.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

LISTED_MIN = 1000


@dataclass(slots=True)
class Holding:
    """The blocks that one request holds: `cached` in prompt order, plus anonymous ones."""

    cached: list[int] = field(default_factory=list)
    anonymous: int = 0

    @property
    def blocks(self) -> int:
        """All blocks held."""
        return len(self.cached) + self.anonymous


@dataclass(slots=True)
class CacheChange:
    """Blocks that became addressable, or that were evicted.

    `owner`: the request that computed them, None for an eviction. `start`: the place of the first
    of `values` among its blocks. `new`: those that were not addressable before.
    """

    values: Sequence[int]
    owner: object = None
    start: int = 0
    new: Collection[int] = ()


class BlockPool:
    """A fixed number of KV blocks. Invariant: unused + anonymous + cached == total.

    Hundreds of blocks of a prompt change at once and mostly in the same way, hence bulk operations.
    `_refs` maps a cached block to the number of its holders, or, if idle, to minus the number of
    the release that made it idle. `_released` lists the blocks that each release left idle, in
    order of eviction. An entry is valid while `_refs` still has that release's number for the
    block.
    """

    __slots__ = (
        "_anonymous",
        "_idle",
        "_listed",
        "_refs",
        "_released",
        "_unused",
        "evicted_blocks",
        "journal",
        "releases",
        "total",
    )

    def __init__(self, total_blocks: int) -> None:
        self.total = total_blocks
        self._unused = total_blocks
        self._anonymous = 0
        self._refs: dict[int, int] = {}
        self._idle = 0
        self._released: deque[tuple[int, list[int]]] = deque()
        self._listed = 0
        self.evicted_blocks = 0
        self.journal: list[CacheChange] | None = None
        """The changes in order, for a reader that empties it; None without one."""
        self.releases = 0
        """Number of releases so far: a refused allocation stays refused until the next release."""

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated now: unused ones and idle cached ones."""
        return self._unused + self._idle

    @property
    def cached_blocks(self) -> int:
        """Blocks that a prompt could hit, held or idle."""
        return len(self._refs)

    @property
    def usage_ratio(self) -> float:
        """Held blocks over all blocks, 0..1 (idle cached blocks count as free, as in vLLM)."""
        return 1.0 - self.free_blocks / self.total

    def match(self, hashes: Sequence[int], limit: int) -> int:
        """Count the leading hashes that are cached, at most `limit`."""
        return len(list(takewhile(self._refs.__contains__, islice(hashes, limit))))

    def room_beside(self, hits: Sequence[int]) -> int:
        """Blocks that could be allocated once `hits` are held (idle hits stop being free)."""
        return self.free_blocks - _count_idle(list(map(self._refs.__getitem__, hits)))

    def hold(self, holding: Holding, hits: Sequence[int]) -> None:
        """Add cached blocks to a holding; each must be cached."""
        refs = self._refs
        counts = list(map(refs.__getitem__, hits))
        idle = _count_idle(counts)
        # Requests may share the prompt's root; the blocks behind a shared root are mostly all idle.
        root = len(counts) - idle
        if idle and max(counts[root:]) >= 0:
            root = len(counts)
        refs.update(dict.fromkeys(hits[root:], 1))
        for value, count in zip(hits[:root], counts, strict=False):
            refs[value] = count + 1 if count > 0 else 1
        self._idle -= idle
        holding.cached.extend(hits)

    def allocate(self, holding: Holding, blocks: int) -> bool:
        """Add anonymous blocks, evicting idle cached ones as needed; False changes nothing."""
        if blocks > self._unused + self._idle:
            return False
        missing = blocks - self._unused
        if missing > 0:
            self._evict(missing)
        self._unused -= blocks
        self._anonymous += blocks
        holding.anonymous += blocks
        return True

    def publish(
        self, holding: Holding, values: Sequence[int], owner: object = None, start: int = 0
    ) -> int:
        """Give anonymous blocks their hashes, but not a hash that another block has already.

        Returns how many blocks got a hash. `owner` and `start`: see `CacheChange`.
        """
        refs = self._refs
        new = dict.fromkeys(values, 1)
        if not refs.keys().isdisjoint(values):
            new = {value: 1 for value in new if value not in refs}
        refs.update(new)
        if self.journal is not None and new:
            self.journal.append(CacheChange(values, owner, start, new.keys()))
        published = len(new)
        holding.cached.extend(new)
        holding.anonymous -= published
        self._anonymous -= published
        return published

    def release(self, holding: Holding) -> None:
        """Release all blocks: cached ones become idle, tail first, anonymous ones unused."""
        self.releases += 1
        refs, cached = self._refs, holding.cached
        counts = list(map(refs.__getitem__, cached))
        last = counts.count(1)
        # As in `hold`: a shared root comes first, mostly without shared blocks after it.
        root = len(counts) - last
        if 1 in counts[:root]:
            root = len(counts)
        left = cached[root:]
        left.reverse()
        idle = -self.releases
        refs.update(dict.fromkeys(left, idle))
        for value, count in zip(reversed(cached[:root]), reversed(counts[:root]), strict=True):
            refs[value] = count - 1 or idle
            if count == 1:
                left.append(value)
        if left:
            self._idle += last
            self._listed += last
            self._released.append((self.releases, left))
        self._unused += holding.anonymous
        self._anonymous -= holding.anonymous
        holding.cached = []
        holding.anonymous = 0
        if self._listed > 4 * self._idle + LISTED_MIN:
            self._drop_invalid()

    def check(self) -> None:
        """Raise ArithmeticError if a block was lost or counted twice; for tests."""
        if self._unused + self._anonymous + len(self._refs) != self.total:
            raise ArithmeticError("blocks are not conserved")
        if min(self._unused, self._anonymous) < 0 or 0 in self._refs.values():
            raise ArithmeticError("a negative count, or neither held nor idle")
        if _count_idle(list(self._refs.values())) != self._idle:
            raise ArithmeticError("idle blocks and their number differ")
        self._drop_invalid()
        listed = [value for _number, values in self._released for value in values]
        if sorted(listed) != sorted(value for value, count in self._refs.items() if count < 0):
            raise ArithmeticError("idle blocks and the order of their eviction differ")

    def _evict(self, blocks: int) -> None:
        refs, released, missing = self._refs, self._released, blocks
        while missing:
            number, values = released.popleft()
            self._listed -= len(values)
            idle = [value for value in values if refs.get(value) == -number]
            if len(idle) > missing:
                released.appendleft((number, idle[missing:]))
                self._listed += len(idle) - missing
                del idle[missing:]
            for value in idle:
                del refs[value]
            if self.journal is not None and idle:
                self.journal.append(CacheChange(idle))
            missing -= len(idle)
        self._idle -= blocks
        self._unused += blocks
        self.evicted_blocks += blocks

    def _drop_invalid(self) -> None:
        """Drop the invalid entries of `_released`."""
        refs, kept = self._refs, deque[tuple[int, list[int]]]()
        for number, values in self._released:
            idle = [value for value in values if refs.get(value) == -number]
            if idle:
                kept.append((number, idle))
        self._released, self._listed = kept, self._idle


def _count_idle(counts: Sequence[int]) -> int:
    return sum(map((0).__gt__, counts))


STORE_BLOCKS = 1 << 20


class SharedStore:
    """Blocks that all engines with this object share; the least recently used are evicted."""

    def __init__(self, blocks: int = STORE_BLOCKS) -> None:
        self._most = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def write(self, hashes: Sequence[int]) -> None:
        """Store blocks, as the most recently used ones."""
        for block in hashes:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def match(self, hashes: Sequence[int], limit: int) -> int:
        """Count the leading hashes that are stored, at most `limit`."""
        found = 0
        while found < limit and found < len(hashes) and hashes[found] in self._blocks:
            found += 1
        return found
