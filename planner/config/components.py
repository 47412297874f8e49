"""What scales as one: a component's instances, by their names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from planner.core.types import COMPONENT


@dataclass(frozen=True, slots=True)
class Component:
    """One kind of instance. `match`: a glob over the names that the proxy knows.

    `min_endpoint`, `max_endpoint`: fewest and most replicas.
    """

    name: str = COMPONENT
    match: str = "*"
    gpus_per_replica: int = 1
    min_endpoint: int = 1
    max_endpoint: int = 8

    def own(self, names: Iterable[str]) -> list[str]:
        """Those of the names that are its instances."""
        return [name for name in names if fnmatchcase(name, self.match)]
