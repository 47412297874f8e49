"""Who is first of many, where each one's weight grows with time at its own rate.

Items belong to owners. The owner with the least rank goes first, and of it the least weight: rate
times age. No step looks at all items. Each pair's winner stands until the moment at which the other
overtakes it, so that only pairs whose moment has come are compared again.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar

Item = TypeVar("Item")


class _Line(Generic[Item]):
    """An item's weight over time, or that of an owner's first item.

    `number`: of equal ones the least goes first. `until_s`: then an owner may have another first.
    """

    __slots__ = ("inner", "item", "number", "rank", "rate", "since_s", "slot", "until_s")

    def __init__(self, item: Item, rate: float, since_s: float, number: int) -> None:
        self.item, self.rate, self.since_s, self.number = item, rate, since_s, number
        self.rank, self.slot, self.until_s = 0, 0, math.inf
        self.inner: _Tree[Item] | None = None

    def is_before(self, other: _Line[Item], now_s: float) -> bool:
        """Whether it goes before another one at this moment."""
        if self.rank != other.rank:
            return self.rank < other.rank
        mine, its = self.rate * (now_s - self.since_s), other.rate * (now_s - other.since_s)
        return mine < its if mine != its else self.number < other.number

    def overtaken_s(self, other: _Line[Item]) -> float:
        """When another one, which it is before, is before it."""
        faster = self.rate - other.rate
        if self.rank != other.rank or faster <= 0:
            return math.inf
        return self.since_s + other.rate * (self.since_s - other.since_s) / faster

    def take_first(self) -> None:
        """Take the weight of the first of its owner's."""
        inner = self.inner
        if inner is not None and (first := inner.won[1]) is not None:
            self.item, self.rate, self.since_s = first.item, first.rate, first.since_s
            self.number, self.until_s = first.number, inner.until_s[1]

    def look(self, now_s: float) -> None:
        """Bring it to this moment."""
        if self.inner is not None:
            self.inner.first(now_s)
            self.take_first()


class _Tree(Generic[Item]):
    """A tournament of lines: node 1 is the final, those of 2 n and 2 n + 1 meet in n."""

    def __init__(self) -> None:
        self.count, self._width = 0, 1
        self._now_s = 0.0
        self._free = [0]
        self.won: list[_Line[Item] | None] = [None, None]
        self.until_s = [math.inf, math.inf]
        """When the winner of a node, or of one under it, may be another one."""

    def add(self, line: _Line[Item]) -> None:
        if not self._free:
            self._widen()
        line.slot = self._free.pop()
        self.count += 1
        self._set(line.slot, line)

    def remove(self, line: _Line[Item]) -> None:
        self._free.append(line.slot)
        self.count -= 1
        self._set(line.slot, None)

    def changed(self, line: _Line[Item]) -> None:
        self._set(line.slot, line)

    def first(self, now_s: float) -> _Line[Item] | None:
        """The first at this moment."""
        if now_s < self._now_s:
            self.until_s = [-math.inf] * (2 * self._width)  # moments are known forwards only
        self._now_s = now_s
        self._look(1)
        return self.won[1]

    def _look(self, node: int) -> None:
        if self.until_s[node] > self._now_s:
            return
        if node < self._width:
            self._look(2 * node)
            self._look(2 * node + 1)
            self._meet(node)
            return
        line = self.won[node]
        if line is not None:
            line.look(self._now_s)
        self.until_s[node] = math.inf if line is None else line.until_s

    def _set(self, slot: int, line: _Line[Item] | None) -> None:
        node = self._width + slot
        self.won[node] = line
        self.until_s[node] = math.inf if line is None else line.until_s
        while node > 1:
            node >>= 1
            self._meet(node)

    def _meet(self, node: int) -> None:
        one, other = self.won[2 * node], self.won[2 * node + 1]
        until_s = min(self.until_s[2 * node], self.until_s[2 * node + 1])
        if one is None or other is None:
            self.won[node] = other if one is None else one
        elif one.is_before(other, self._now_s):
            self.won[node], until_s = one, min(until_s, one.overtaken_s(other))
        else:
            self.won[node], until_s = other, min(until_s, other.overtaken_s(one))
        self.until_s[node] = until_s

    def _widen(self) -> None:
        lines, until_s = self.won[self._width :], self.until_s[self._width :]
        self._free = list(range(2 * self._width - 1, self._width - 1, -1))
        self._width *= 2
        self.won = [None] * (2 * self._width)
        self.until_s = [math.inf] * (2 * self._width)
        for slot, line in enumerate(lines):
            self.won[self._width + slot] = line
            self.until_s[self._width + slot] = until_s[slot]
        for node in range(self._width - 1, 0, -1):
            self._meet(node)


class Order(Generic[Item]):
    """The items of all owners. Of equal ones the one that was added first goes first."""

    def __init__(self) -> None:
        self._lines: dict[Item, _Line[Item]] = {}
        self._owners: dict[str, _Line[Item]] = {}
        self._tree: _Tree[Item] = _Tree()
        self._number = 0

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, item: Item, owner: str, rank: int, rate: float, since_s: float) -> None:
        """Add an item of an owner with this rank from now on."""
        self._number += 1
        line = self._lines[item] = _Line(item, rate, since_s, self._number)
        owned = self._owners.get(owner)
        if owned is None or owned.inner is None:
            owned = self._owners[owner] = _Line(item, rate, since_s, self._number)
            owned.inner, owned.rank = _Tree(), rank
            owned.inner.add(line)
            self._tree.add(owned)
            return
        owned.inner.add(line)
        owned.rank = rank
        owned.take_first()
        self._tree.changed(owned)

    def reweigh(self, item: Item, owner: str, rate: float, since_s: float) -> None:
        """Set the weight of an item that is here."""
        line, owned = self._lines[item], self._owners[owner]
        line.rate, line.since_s = rate, since_s
        if owned.inner is not None:
            owned.inner.changed(line)
            owned.take_first()
            self._tree.changed(owned)

    def remove(self, item: Item, owner: str) -> None:
        """Remove an item, if it is here."""
        line = self._lines.pop(item, None)
        if line is None:
            return
        owned = self._owners[owner]
        if owned.inner is None:
            return
        owned.inner.remove(line)
        if owned.inner.count:
            owned.take_first()
            self._tree.changed(owned)
            return
        del self._owners[owner]
        self._tree.remove(owned)
        if not self._owners:
            self._tree = _Tree()

    def rank(self, owner: str, rank: int) -> None:
        """Set an owner's rank, if it has items here."""
        owned = self._owners.get(owner)
        if owned is not None and owned.rank != rank:
            owned.rank = rank
            self._tree.changed(owned)

    def first(self, now_s: float) -> Item | None:
        """The first item at this moment."""
        line = self._tree.first(now_s)
        return None if line is None else line.item
