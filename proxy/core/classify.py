"""WARM, MEDIUM or HEAVY: how many new tokens a request brings to the instance it would run on."""

from __future__ import annotations

from enum import StrEnum


class Size(StrEnum):
    """The class before it is known where a HEAVY request will be computed."""

    WARM = "WARM"
    MEDIUM = "MEDIUM"
    HEAVY = "HEAVY"


def classify(new_tokens: int, warm_threshold: int, heavy_threshold: int) -> Size:
    """WARM below `warm_threshold` new tokens, HEAVY from `heavy_threshold` on."""
    if new_tokens >= heavy_threshold:
        return Size.HEAVY
    return Size.WARM if new_tokens < warm_threshold else Size.MEDIUM
