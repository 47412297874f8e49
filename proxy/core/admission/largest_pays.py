"""One budget for bytes that are kept for peers; its largest holder pays.

A holder is one stream, request or connection, and belongs to an owner: an instance, a tenant, or a
client's address. Beyond the budget the largest holder of the owner that has most has to end.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Holder = TypeVar("Holder")
_EXACT_BITS = 4
"""Sizes that agree in so many leading bits count as equally large."""


class _Owned(Generic[Holder]):
    """The shares of one owner's holders. `by_size`: those of about one size, the newest last."""

    __slots__ = ("by_size", "bytes")

    def __init__(self) -> None:
        self.bytes = 0
        self.by_size: dict[int, dict[Holder, None]] = {}


def _leading(size: int) -> int:
    """A number that orders sizes by their leading bits."""
    bits = max(size.bit_length(), _EXACT_BITS)
    return bits << _EXACT_BITS | size >> (bits - _EXACT_BITS)


class LargestPays(Generic[Holder]):
    """The holders of a budget with their shares. No step looks at all holders.

    `ends_newest`: of an owner's largest ones, as equal as `_EXACT_BITS` say, the newest has to end;
    else the one whose size is unchanged for longest.
    """

    def __init__(self, max_bytes: int, *, ends_newest: bool = False) -> None:
        self.max_bytes = max_bytes
        self._ends_newest = ends_newest
        self.held_bytes = 0
        self._held: dict[Holder, tuple[str, int]] = {}
        self._owned: dict[str, _Owned[Holder]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, holder: Holder, owner: str, size: int) -> Holder | None:
        """A holder has so much now; returns the one that has to end, if there is too much."""
        self.drop(holder)
        self._held[holder] = (owner, size)
        self.held_bytes += size
        owned = self._owned.get(owner)
        if owned is None:
            owned = self._owned[owner] = _Owned()
        owned.bytes += size
        owned.by_size.setdefault(_leading(size), {})[holder] = None
        return self._largest() if self.held_bytes > self.max_bytes else None

    def drop(self, holder: Holder) -> None:
        """Remove a holder."""
        before = self._held.pop(holder, None)
        if before is None:
            return
        owner, size = before
        self.held_bytes -= size
        owned, leading = self._owned[owner], _leading(size)
        owned.bytes -= size
        del owned.by_size[leading][holder]
        if not owned.by_size[leading]:
            del owned.by_size[leading]
        if not owned.by_size:
            del self._owned[owner]

    def resize(self, holder: Holder, size: int) -> Holder | None:
        """The same for one that holds something already."""
        return self.hold(holder, self._held[holder][0], size)

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._held

    def size_of(self, holder: Holder) -> int:
        """Bytes that a holder is counted with."""
        return self._held[holder][1]

    def owner_of(self, holder: Holder) -> str | None:
        """Whose it is; None for one that holds nothing."""
        held = self._held.get(holder)
        return None if held is None else held[0]

    def owned_bytes(self, owner: str) -> int:
        """Bytes that an owner's holders have together."""
        owned = self._owned.get(owner)
        return 0 if owned is None else owned.bytes

    def _largest(self) -> Holder:
        owned = max(self._owned.values(), key=lambda each: each.bytes)
        largest = owned.by_size[max(owned.by_size)]
        return next(reversed(largest) if self._ends_newest else iter(largest))
