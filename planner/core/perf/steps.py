"""Times of a prompt from the time of a step: chunks, and the largest batch that keeps a target."""

from __future__ import annotations

import math
from collections.abc import Callable

Prefill = Callable[[float], float]
"""Seconds of a step that computes so many tokens of prompts."""


def chunked(tokens: float, budget: float, step: Prefill) -> float:
    """Seconds to compute so many tokens in steps of `budget` at most."""
    if tokens <= 0:
        return 0.0
    whole = math.ceil(tokens / budget) - 1
    return whole * step(budget) + step(tokens - whole * budget)


def largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest number from `low` to `high` that holds; `low` - 1 if none does.

    Whatever holds also holds for all smaller ones.
    """
    while low <= high:
        middle = (low + high) // 2
        if holds(middle):
            low = middle + 1
        else:
            high = middle - 1
    return high
