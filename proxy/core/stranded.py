"""KV that may still be pinned although no lease speaks of it: hand-overs that broke.

Nobody can ask an engine what it has pinned. What a broken hand-over may have left behind counts
against the instance's room for further ones until the engine's own timeout has let go of it.
"""

from __future__ import annotations

from collections import deque


class Stranded:
    """Tokens per instance, each entry for `hold_s` seconds."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._entries: dict[str, deque[tuple[float, int]]] = {}

    def book(self, name: str, tokens: int, now_s: float) -> None:
        """So many tokens may be pinned on an instance from now on."""
        self._entries.setdefault(name, deque()).append((now_s + self._hold_s, tokens))

    def on(self, name: str, now_s: float) -> tuple[int, int]:
        """How many hand-overs, and their tokens, an instance may still hold."""
        entries = self._entries.get(name)
        if entries is None:
            return 0, 0
        while entries and entries[0][0] <= now_s:
            entries.popleft()
        if not entries:
            del self._entries[name]
        return len(entries), sum(tokens for _, tokens in entries)

    def forget(self, name: str) -> None:
        """Another process is there now, or nobody."""
        self._entries.pop(name, None)
