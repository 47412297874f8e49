"""Free KV of an instance: what is usable of its cache, and how fast ending streams give KV back."""

from __future__ import annotations

from collections import deque
from typing import ClassVar, Final

KV_USABLE_RATIO: Final = 0.95
KV_TURNOVER_S: Final = 20.0
"""Until streams have ended on an instance: it is taken to free its whole cache in this time."""


class ReleaseRate:
    """KV tokens per second that ending streams give back on one instance, over the last minute."""

    WINDOW_S: ClassVar[float] = 60.0
    WINDOW_STREAMS: ClassVar[int] = 1024

    def __init__(self) -> None:
        self._ended: deque[tuple[float, int]] = deque()
        self._tokens = 0
        self.count = 0

    def add(self, tokens: int, now_s: float) -> None:
        """A stream that held this many tokens has ended."""
        self._ended.append((now_s, tokens))
        self._tokens += tokens
        self.count += 1
        if len(self._ended) > self.WINDOW_STREAMS:
            self._leave()

    def tokens_per_s(self, now_s: float) -> float | None:
        """The rate in tokens per second; None while no stream has ended within the window."""
        while self._ended and now_s - self._ended[0][0] > self.WINDOW_S:
            self._leave()
        if not self._tokens:
            return None
        return self._tokens / max(1.0, now_s - self._ended[0][0])

    def _leave(self) -> None:
        self._tokens -= self._ended.popleft()[1]
