"""The one clock: monotonic for durations and decisions, anchored once to unix time for the log."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """`now_s()` never jumps; `unix(now_s)` says when that was."""

    def __init__(self) -> None:
        self._offset_s = time.time_ns() / 1e9 - time.monotonic()
        self.now_s: Callable[[], float] = time.monotonic
        """Monotonic seconds."""

    def unix(self, now_s: float) -> float:
        """Unix seconds of a monotonic moment."""
        return self._offset_s + now_s

    def unix_now(self) -> float:
        """Unix seconds now."""
        return self._offset_s + time.monotonic()
