"""One budget for incomplete bytes of all peers; its largest holder pays.

A holder is one stream or connection, and belongs to an owner: an instance. Beyond the budget the
largest holder of the owner that has most has to end.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Holder = TypeVar("Holder")


class LargestPays(Generic[Holder]):
    """The holders of a budget with their shares."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._held: dict[Holder, tuple[str, int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, holder: Holder, owner: str, size: int) -> Holder | None:
        """Set a holder's share; returns the holder to end if the budget is exceeded."""
        before = self._held.get(holder)
        self.held_bytes += size - (before[1] if before is not None else 0)
        self._held[holder] = (owner, size)
        return self._largest() if self.held_bytes > self.max_bytes else None

    def drop(self, holder: Holder) -> None:
        """Remove a holder."""
        before = self._held.pop(holder, None)
        if before is not None:
            self.held_bytes -= before[1]

    def _largest(self) -> Holder | None:
        owned: dict[str, int] = {}
        for owner, size in self._held.values():
            owned[owner] = owned.get(owner, 0) + size
        largest: Holder | None = None
        most = (0, -1)
        for holder, (owner, size) in self._held.items():
            if (owned[owner], size) > most:
                largest, most = holder, (owned[owner], size)
        return largest
