"""The prefix cache of an engine by its KV events: exact while they are complete.

An engine names each of its blocks by a hash over all tokens up to the block's end, and publishes
what it stores and what it evicts. `PublishedBlocks` is the resulting set for one data-parallel rank
of one engine. The engine's hashes say nothing about a client's prompt by themselves, but the events
have the token ids of each block. From these a block gets a key, made as the units of a prompt are
for which the client sent token ids (`RequestFacts.units`): such a prompt is found exactly. One of
text is found by where an earlier one with the same messages ended (`links`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from proxy.core.kvcache.links import Chains, Lost, Said
from proxy.core.types import UNIT_TOKENS, RequestFacts

MOST_LORAS: Final = 1024
SWEPT_PER_BLOCK: Final = 4
"""Entries of lost tables that are freed for each new block: never fewer than it adds."""
MOST_STEPS: Final = 1024
"""Blocks that a chain is walked back where it only may help."""
MOST_BACK: Final = 8192
"""Blocks that it is walked back at all, for each answer: a few ms. Behind a longer message the
approximate index counts."""


class Stored:
    """Blocks that an engine now has, consecutive in a prompt, the first of them behind `parent`.

    `hashes`: the engine's names of the blocks; `parent`: the name of the block before them, None
    where they begin a prompt. `block_tokens`: tokens per block. `ids`: the token ids, 4 bytes each,
    of as many leading blocks as hold nothing but text; empty where that is unknown. `salt`, `lora`:
    what else the hashes depend on, `salt` in a prompt's first block only; `mark`: a digest of
    `lora`, 0 for none. `group`: the KV cache group, and `is_full` whether it keeps all tokens (no
    sliding window). `session`: the session's name as the engine was told it.
    """

    __slots__ = (
        "block_tokens",
        "group",
        "hashes",
        "ids",
        "is_full",
        "lora",
        "mark",
        "parent",
        "salt",
        "session",
    )

    def __init__(
        self,
        hashes: list[int],
        parent: int | None,
        block_tokens: int,
        ids: bytes = b"",
        salt: str = "",
        lora: str = "",
        mark: int = 0,
        group: int | None = None,
        is_full: bool = True,
        session: str = "",
    ) -> None:
        self.hashes, self.parent, self.block_tokens = hashes, parent, block_tokens
        self.ids, self.salt, self.lora, self.mark = ids, salt, lora, mark
        self.group, self.is_full = group, is_full
        self.session = session


class Removed:
    """Blocks that an engine has evicted; see `Stored` for the fields."""

    __slots__ = ("group", "hashes")

    def __init__(self, hashes: list[int], group: int | None = None) -> None:
        self.hashes, self.group = hashes, group


class Cleared:
    """The engine has dropped all blocks."""

    __slots__ = ()


CacheEvent: TypeAlias = Stored | Removed | Cleared


class Block:
    """One published block.

    `before`: the name of the block before it, None for a prompt's first. `depth`: blocks from the
    prompt's beginning to its end, 0 while unknown. `copies`: how often the engine holds it.
    `children`: blocks in the set that follow it directly. `key`: of its content and all before it;
    None while unknown.
    """

    __slots__ = ("before", "children", "copies", "depth", "key")

    def __init__(self, before: int | None, depth: int, key: int | None) -> None:
        self.before, self.depth, self.key = before, depth, key
        self.copies = 1
        self.children = 0


class PublishedBlocks:
    """The blocks that one rank of the instance `name` holds, by its events since `renew`.

    `is_live`: whether it is known what the rank holds; `is_connected`: whether its events come.
    `is_whole`: whether all events since the engine's start, or since it was empty, are in it; else
    it may hold more than is known here. `is_over`: the set was given up, as it was too large.
    `block_tokens`: 0 until the first block. `copies`: physical blocks, as an engine may hold one
    more than once. `full_blocks`: the most of them when one was evicted, 0 before the first.
    `walked`: blocks that `above` has walked back.

    Of the batches: `batches` so far, `gaps` in their numbers, `lost_gaps` that could not be closed,
    `restarts` of the engine, `malformed` ones. The last came at `heard_s`, `lag_s` after it was
    made. `fault`: why none come, None while they do.
    """

    __slots__ = (
        "_blocks",
        "_group",
        "_keys",
        "_orphans",
        "batches",
        "block_tokens",
        "chains",
        "copies",
        "fault",
        "full_blocks",
        "gaps",
        "heard_s",
        "is_connected",
        "is_live",
        "is_over",
        "is_whole",
        "lag_s",
        "loras",
        "lost_gaps",
        "malformed",
        "name",
        "removed_blocks",
        "restarts",
        "skipped_events",
        "stored_blocks",
        "walked",
    )

    def __init__(self, name: str = "", said: Said | None = None, lost: Lost | None = None) -> None:
        self.name = name
        self.chains = Chains(name, said, lost)
        self._blocks: dict[int, Block] = {}
        self._keys: dict[int, int] = {}
        self._orphans: dict[int, int] = {}
        self._group: int | None = None
        self.block_tokens = 0
        self.copies = self.full_blocks = 0
        self.is_live = self.is_connected = False
        self.is_whole = False
        self.is_over = False
        self.loras: dict[str, int] = {}
        self.stored_blocks = 0
        self.removed_blocks = 0
        self.walked = 0
        self.skipped_events = 0
        self.batches = self.gaps = self.lost_gaps = self.restarts = self.malformed = 0
        self.heard_s: float | None = None
        self.lag_s: float | None = None
        self.fault: str | None = None

    def __len__(self) -> int:
        """Number of different blocks."""
        return len(self._blocks)

    def __contains__(self, name: int) -> bool:
        """Whether the engine holds a block."""
        return name in self._blocks

    @property
    def has_orphans(self) -> bool:
        """Whether a block is there without the one before it: the engine cannot hit it."""
        return bool(self._orphans)

    def renew(self, *, is_whole: bool) -> None:
        """Forget all blocks. `is_whole`: the engine has none either."""
        self._drop_all()
        self._group, self.block_tokens, self.full_blocks = None, 0, 0
        self.loras = {}
        self.is_whole, self.is_over = is_whole, False

    def give_up(self) -> None:
        """Forget all blocks and take no more: they are too many."""
        self.renew(is_whole=False)
        self.is_over = True

    def _drop_all(self) -> None:
        lost = self.chains.lost
        lost.take(self._blocks)
        lost.take(self._keys)
        lost.take(self._orphans)
        self._blocks, self._keys, self._orphans = {}, {}, {}
        self.chains.clear()
        self.copies = 0

    def key_of(self, name: int) -> int | None:
        """The key of a block; None where it is unknown, or the block is not there."""
        block = self._blocks.get(name)
        return None if block is None else block.key

    def block(self, name: int) -> Block | None:
        """A block by its name; None where it is not there."""
        return self._blocks.get(name)

    def apply(self, event: CacheEvent, keys: Sequence[int] = ()) -> None:
        """Take in one event. `keys`: of as many of its leading blocks as have a known one."""
        if isinstance(event, Stored):
            self._store(event, keys)
        elif isinstance(event, Removed):
            if self._is_other(event.group, is_full=False):
                self.skipped_events += 1
            else:
                for name in event.hashes:
                    self._remove(name)
        else:
            self._drop_all()
            self.is_whole = not self.is_over

    def _is_other(self, group: int | None, *, is_full: bool) -> bool:
        """Whether an event is of another KV cache group than the one that decides on hits.

        That is the first one that keeps all tokens; groups with a window forget earlier.
        """
        if group is None:
            return False
        if self._group is None and is_full:
            self._group = group
        return group != self._group

    def _counts(self, event: Stored) -> bool:
        """Whether blocks are of the KV cache group that decides, and of its size."""
        if not self.block_tokens and event.is_full:
            self.block_tokens = event.block_tokens
        if event.lora and len(self.loras) < MOST_LORAS:
            self.loras[event.lora] = event.mark
        is_other = self._is_other(event.group, is_full=event.is_full)
        return not is_other and event.block_tokens == self.block_tokens and bool(event.hashes)

    def _store(self, event: Stored, keys: Sequence[int]) -> None:
        if self.is_over:
            return
        if not self._counts(event):
            self.skipped_events += 1
            return
        before, depth = event.parent, 0
        is_rooted = before is None
        if before is not None and (above := self._blocks.get(before)) is not None:
            depth = above.depth
            is_rooted = depth > 0
        for at, name in enumerate(event.hashes):
            depth += 1
            block = self._blocks.get(name)
            if block is None:
                key = keys[at] if at < len(keys) else None
                self._enter(name, Block(before, depth if is_rooted else 0, key))
            else:
                block.copies += 1
            before = name
        self.chains.lost.sweep(SWEPT_PER_BLOCK * len(event.hashes))
        session, t_s = event.session, self.heard_s or 0.0
        self.chains.grew(event.parent, event.hashes, session, t_s, event.ids)
        self.copies += len(event.hashes)
        self.stored_blocks += len(event.hashes)

    def _enter(self, name: int, block: Block) -> None:
        self._blocks[name] = block
        block.children = self._orphans.pop(name, 0)
        if block.key is not None:
            self._keys[block.key] = name
        if block.before is not None:
            self._count_child(block.before, 1)

    def _count_child(self, before: int, change: int) -> None:
        above = self._blocks.get(before)
        if above is not None:
            above.children += change
            return
        count = self._orphans.get(before, 0) + change
        if count:
            self._orphans[before] = count
        else:
            self._orphans.pop(before, None)

    def _remove(self, name: int) -> None:
        block = self._blocks.get(name)
        if block is None:
            return  # stored before the first event that was seen, or of a group that is left out
        self.full_blocks = max(self.full_blocks, self.copies)
        self.copies -= 1
        self.removed_blocks += 1
        block.copies -= 1
        if block.copies:
            return
        del self._blocks[name]
        if block.key is not None and self._keys.get(block.key) == name:
            del self._keys[block.key]
        before = block.before
        if before is not None:
            self._count_child(before, -1)
        if block.children:
            self._orphans[name] = block.children
        above = None if before is None else self._blocks.get(before)
        self.chains.evicted(name, None if above is None else before, above.depth if above else 0)

    def ends_of(self, since_s: float, session: str, least: int, whole: int, most: int) -> list[int]:
        """The ends of chains that a request may have left, which was placed at `since_s`.

        `whole`: blocks of its prompt and answer. If no chain has that length, those of `least` to
        `most` blocks: the last one may still be on its way.
        """
        depths: dict[int, int] = {}
        for name in self.chains.tails(since_s, session):
            block = self._blocks.get(name)
            if block is not None and max(1, least) <= block.depth <= most:
                depths[name] = block.depth
        return [name for name, depth in depths.items() if depth == whole] or list(depths)

    def above(self, name: int, depth: int) -> int | None:
        """The block of a chain that is so deep; None if it is not there, or MOST_BACK further."""
        block = self._blocks.get(name)
        back = 0 if block is None else block.depth - depth
        if back > MOST_BACK:
            return None
        if back > 0 and depth > 0:
            self.walked += back
        while block is not None and block.depth > depth > 0:
            if block.before is None:
                return None
            name, below = block.before, block.depth
            block = self._blocks.get(name)
            if block is not None and block.depth != below - 1:
                return None  # the publisher contradicts itself, and might lead in a circle
        return name if block is not None and block.depth == depth else None

    def goes_on(self, name: int, depth: int) -> bool:
        """Whether the chain up to a block goes on behind it, or has another branch behind `depth`.

        Not looked for where that is further than MOST_STEPS back.
        """
        block = self._blocks.get(name)
        if block is None or block.children or not 0 < block.depth - depth <= MOST_STEPS:
            return block is not None and block.children > 0
        above = self.above(name, depth)
        return above is not None and self._blocks[above].children > 1

    def depth_of(self, name: int) -> int:
        """Depth of a block; 0 if it is absent or its depth unknown."""
        block = self._blocks.get(name)
        return 0 if block is None else block.depth

    def held_of_ids(self, facts: RequestFacts) -> int | None:
        """Tokens of a prompt of token ids that the engine has cached; None where that is unknown.

        An engine computes at least one token of each prompt.
        """
        size = self.block_tokens
        if size % UNIT_TOKENS or not size:
            return 0 if self.is_whole and not size else None
        per_block, units = size // UNIT_TOKENS, facts.units
        mark = self.loras.get(facts.model, 0)
        most = min(len(units) // per_block, (facts.prompt_tokens - 1) // size)
        held = self._leading(units, per_block, mark, most) * size
        return held if held or self.is_whole else None

    def end_of_ids(self, facts: RequestFacts, held: int) -> int:
        """The name of the block that `held` tokens of a prompt of token ids end with."""
        unit = facts.units[held // UNIT_TOKENS - 1]
        return self._keys[unit ^ self.loras.get(facts.model, 0)]

    def _leading(self, units: Sequence[int], per_block: int, mark: int, most: int) -> int:
        """Leading blocks of a chain of units that are there, at most `most`."""
        keys = self._keys
        if self._orphans:
            for at in range(most):
                if units[(at + 1) * per_block - 1] ^ mark not in keys:
                    return at
            return most
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if units[middle * per_block - 1] ^ mark in keys:
                low = middle
            else:
                high = middle - 1
        return low
