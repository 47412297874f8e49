"""What a source of instances tells, and how one is asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from proxy.config.values import InstanceSpec

MOST_FOUND = 1024
"""Most instances of one source."""


class DiscoveryError(Exception):
    """A source does not tell its instances; the text is the cause, in one line."""


@dataclass(frozen=True, slots=True)
class Found:
    """All that a source tells at one time.

    `leaving`: names of those that it tells too, and that are to get no new request.
    """

    instances: tuple[InstanceSpec, ...]
    leaving: frozenset[str] = frozenset()


Tell = Callable[[Found], Awaitable[None]]
"""Awaited each time that a source has told, or proven, its instances."""


class Source(Protocol):
    """A place where instances are found. Each wait in it has a limit of its own."""

    async def look(self) -> Found:
        """Ask once; raises DiscoveryError."""

    async def follow(self, tell: Tell) -> None:
        """Ask and go on as long as one connection, or one interval, lasts.

        Raises DiscoveryError. The caller calls it again.
        """
