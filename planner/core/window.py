"""Growth of counters between two readings, as Prometheus counts it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

Key = TypeVar("Key")


class Counters:
    """The last values of counters by their keys, of sources that come and go.

    A value below the last one is that of a process which has begun anew: all of it has grown since.
    What is read for the first time has not grown: it may have counted for days.
    """

    def __init__(self) -> None:
        self._last: dict[str, Mapping[str, float]] = {}

    def grown(self, source: str, values: Mapping[str, float]) -> dict[str, float]:
        """Growth of each counter of a source since its last reading; nothing at the first one."""
        known = self._last.get(source)
        told = {key: value for key, value in values.items() if math.isfinite(value)}
        self._last[source] = told
        if known is None:
            return {}
        return {key: _growth(known.get(key, 0.0), value) for key, value in told.items()}

    def forget(self, source: str) -> None:
        """A source has left, or has become another."""
        self._last.pop(source, None)


def _growth(before: float, now: float) -> float:
    return now - before if now >= before else now


def total(parts: list[dict[str, float]]) -> dict[str, float]:
    """The sums of several sources' growth."""
    sums: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            sums[key] = sums.get(key, 0.0) + value
    return sums


def mean(sums: Mapping[str, float], name: str) -> float | None:
    """The mean of a histogram's growth; None where it did not grow."""
    count = sums.get(f"{name}_count", 0.0)
    return sums.get(f"{name}_sum", 0.0) / count if count > 0 else None
