"""Turns between owners that wait for the same thing; each owner's items keep their order.

An owner is a tenant, or a client's address.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """The waiting items of all owners."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Item, None]] = {}
        """Of each owner the oldest first; the owner that had its turn last comes last."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, owner: str, item: Item) -> None:
        """Let it wait behind the others of its owner."""
        self._waiting.setdefault(owner, {})[item] = None

    def remove(self, owner: str, item: Item) -> None:
        """It waits no longer, if it did."""
        items = self._waiting.get(owner, {})
        items.pop(item, None)
        if not items:
            self._waiting.pop(owner, None)

    def next(self) -> Item:
        """Take the oldest of the owner whose turn it is; something must wait."""
        owner = next(iter(self._waiting))
        items = self._waiting.pop(owner)
        item = next(iter(items))
        del items[item]
        if items:
            self._waiting[owner] = items
        return item
