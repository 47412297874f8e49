"""Whether an engine's reports still follow what it does.

A report that stays the same to the last byte, although the engine has given answers since, or
although it says that its cache is in use, is a picture: every step of a living engine moves some
counter. What it says of its load then counts no more, and our own counters decide alone.
"""

from __future__ import annotations

FROZEN_S = 60.0
"""For so long it must stay the same: an engine may rest, or be busy with one giant prompt."""
ANSWERS = 8
"""Or so many answers: a report may be read between two of them."""


class Reports:
    """Of each instance: its last report that was new, when that was, and what it had answered."""

    def __init__(self) -> None:
        self._new: dict[str, tuple[int, float, int]] = {}
        self.frozen: set[str] = set()

    def observe(
        self, instance: str, mark: int, now_s: float, *, answers: int, is_in_use: bool
    ) -> bool:
        """Take in a report; whether it is a frozen one.

        `mark`: equal for equal reports. `answers`: given by the instance so far, never less than
        before. `is_in_use`: its cache, by this report.
        """
        seen, since_s, before = self._new.get(instance, (None, now_s, answers))
        if seen != mark:
            self._new[instance] = mark, now_s, answers
            self.frozen.discard(instance)
        elif now_s - since_s >= FROZEN_S and (is_in_use or answers - before >= ANSWERS):
            self.frozen.add(instance)
        return instance in self.frozen

    def forget(self, instance: str) -> None:
        """It restarted or left."""
        self._new.pop(instance, None)
        self.frozen.discard(instance)
