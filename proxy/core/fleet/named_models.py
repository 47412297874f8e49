"""Which of the served models metrics name: a bounded number of each instance, whatever it lists.

An engine may list other models at each reading. Prometheus would keep all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from typing import Final

from proxy.core.fleet.members import Member

MOST: Final = 64
"""Models of one instance that are named within `HELD_S`."""
HELD_S: Final = 3600.0
"""A model that an instance no longer lists keeps its place among its models for so long."""
OTHERS: Final = "(others)"
"""The name of all the others."""


class NamedModels:
    """The named models, by instance."""

    __slots__ = ("_listed_s",)

    def __init__(self) -> None:
        self._listed_s: dict[str, dict[str, float]] = {}
        """When each of them was listed last."""

    def of(self, members: Iterable[Member], now_s: float) -> set[str]:
        """The models of these members that have names; what is no adapter comes first."""
        found: dict[str, dict[str, float]] = {}
        for member in members:
            models = member.models or frozenset()
            before = self._listed_s.get(member.instance.name, {})
            named = {m: s for m, s in before.items() if now_s - s < HELD_S or m in models}
            if (free := MOST - len(named)) > 0:
                new = [(m in member.bases, m) for m in models if m not in named]
                named |= {m: now_s for _, m in nsmallest(free, new)}
            found[member.instance.name] = named | {m: now_s for m in named if m in models}
        self._listed_s = found
        return {model for named in found.values() for model in named}
