"""How near the process is to its memory limit, and what it stops doing for that.

Three marks, after Envoy's overload manager: no more keep-alive, no more HEAVY requests, no more
requests at all. Each is left only some way below where it was entered, so that a use that swings
around a mark does not make every second client a victim.
"""

from __future__ import annotations

import math
from enum import IntEnum


class Level(IntEnum):
    """What is done about memory; each includes the ones before."""

    NORMAL = 0
    NO_KEEPALIVE = 1
    NO_HEAVY = 2
    NOTHING = 3


MARKS = {Level.NO_KEEPALIVE: 0.92, Level.NO_HEAVY: 0.95, Level.NOTHING: 0.98}
"""Part of the limit in use from which a level holds."""
MARGIN = 0.02
"""So much below its mark it is left."""


class Watermark:
    """The present level; `limit_bytes` None: there is no limit, and always NORMAL."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.level = Level.NORMAL
        self.giant_s = -math.inf
        """When the last prompt of megabytes came, which leaves much free memory behind."""

    def note_giant(self, now_s: float) -> None:
        """A prompt of megabytes has come; another one may follow, into the same memory."""
        self.giant_s = now_s

    def observe(self, used_bytes: int) -> Level:
        """Take in a measurement; returns the level from now on."""
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
