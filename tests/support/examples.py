"""How many examples a property gets: all in CI, a part of them where somebody waits."""

from hypothesis import settings

USUAL = 100
"""Hypothesis' own number, which the profile `ci` leaves as it is."""


def examples(count: int) -> int:
    """So many, or the part of them that a quicker profile asks for."""
    return max(1, count * min(settings().max_examples, USUAL) // USUAL)
