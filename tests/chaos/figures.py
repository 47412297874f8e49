"""Figures of this session, printed beneath the tests' results."""

from __future__ import annotations

lines: list[str] = []


def say(name: str, text: str) -> None:
    """Note a figure."""
    lines.append(f"{name}: {text}")


def percentile(values: list[float], ratio: float) -> float:
    """The value that this ratio of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(ratio * len(ordered)))]
