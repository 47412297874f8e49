"""What an engine reports of itself, and whether its reports still follow what it does.

A report that stays the same to the last byte, although the engine has given answers since, or
although it says that its cache is in use, is frozen: every step of a running engine changes some
counter. Such a report's load is ignored, and the proxy's own counters decide alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One report, summed (usage: the highest) over data-parallel ranks. None: not reported."""

    kv_used_ratio: float | None = None
    kv_total_tokens: int | None = None
    requests_running: int | None = None
    requests_waiting: int | None = None
    hit_ratio: float | None = None
    external_tokens: float | None = None
    external_hit_ratio: float | None = None
    start_s: float | None = None
    """When the process started, unix seconds."""


@dataclass(frozen=True, slots=True)
class EngineKv:
    """KV cache as the engine reports it: size in tokens and the share in use, 0..1."""

    total_tokens: int | None = None
    used_ratio: float | None = None


FROZEN_S, ANSWERS = 60.0, 8
"""For so long it must stay the same, while so many answers are given: some may come in between a
report's being made and read."""
IN_USE_S = 600.0
"""Or for so long, with the cache in use: what a broken hand-over has left pinned is for 480 s, and
nothing else need move meanwhile."""


class ReportHistory:
    """Of one instance: its last report that was new, when that was, and what it had answered."""

    __slots__ = ("_answers", "_mark", "_since_s", "is_frozen")

    def __init__(self) -> None:
        self._mark: int | None = None
        self._since_s = 0.0
        self._answers = 0
        self.is_frozen = False

    def observe(self, mark: int, now_s: float, *, answers: int, is_in_use: bool) -> bool:
        """Take in a report; whether it is a frozen one.

        `mark`: equal for equal reports. `answers`: given by the instance so far, never less than
        before. `is_in_use`: its cache, by this report.
        """
        if self._mark != mark:
            self._mark, self._since_s, self._answers = mark, now_s, answers
            self.is_frozen = False
            return False
        same_s = now_s - self._since_s
        has_worked = same_s >= FROZEN_S and answers - self._answers >= ANSWERS
        if has_worked or (is_in_use and same_s >= IN_USE_S):
            self.is_frozen = True
        return self.is_frozen
