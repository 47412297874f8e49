"""The process's memory level, and the refusals at each level.

Three marks, after Envoy's overload manager: no more keep-alive, no more HEAVY requests, no more
requests at all. A level ends only MARGIN below the mark at which it began (hysteresis), so that
memory use around a mark does not refuse every second client.
"""

from __future__ import annotations

import math
from enum import IntEnum


class Level(IntEnum):
    """Refusals for lack of memory; each level includes the earlier ones."""

    NORMAL = 0
    NO_KEEPALIVE = 1
    NO_HEAVY = 2
    NOTHING = 3


MARKS = {Level.NO_KEEPALIVE: 0.92, Level.NO_HEAVY: 0.95, Level.NOTHING: 0.98}
"""Share of the memory limit in use at which a level begins."""
MARGIN = 0.02
"""A level ends when the use is below its mark minus this."""


class Watermark:
    """The present memory level; `limit_bytes` None: no limit, so always NORMAL."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.level = Level.NORMAL
        self.giant_s = -math.inf
        """When the last prompt of megabytes came; the allocator keeps its freed memory."""

    def note_giant(self, now_s: float) -> None:
        """Note a prompt of megabytes: its memory is kept for a while, since more may follow."""
        self.giant_s = now_s

    def observe(self, used_bytes: int) -> Level:
        """Set the memory in use; returns the level from now on."""
        self.used_bytes = used_bytes
        if not self.limit_bytes:
            return self.level
        used = used_bytes / self.limit_bytes
        entered = max(
            (level for level, mark in MARKS.items() if used >= mark), default=Level.NORMAL
        )
        held = [level for level, mark in MARKS.items() if used >= mark - MARGIN]
        kept = min(self.level, max(held, default=Level.NORMAL))
        self.level = max(entered, kept)
        return self.level
