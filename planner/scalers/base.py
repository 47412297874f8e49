"""The contract of a scaler, and of the fleet that it looks at.

Targets are absolute, and a decision is applied at each tick until it is done. So nothing is lost or
doubled where either side ends between two steps: the next call reads what there is, and goes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from planner.config.components import Component


class Failure(StrEnum):
    """Why an orchestrator did not do it: the label `error` of a metric."""

    FORBIDDEN = "forbidden"
    MISSING = "missing"
    CONFLICT = "conflict"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    FAILED = "failed"


class ScalerError(Exception):
    """An orchestrator did not do it. The text is one line that names what, where and why."""

    def __init__(self, failure: Failure, text: str) -> None:
        super().__init__(text)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Decision:
    """Replicas of every component. `decision_id`: 0, 1, 2; `issued_at`: seconds of the epoch."""

    decision_id: int
    targets: Mapping[str, int]
    issued_at: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Applied:
    """How far a decision is. `waits_for`: what is still missing, in a few words; empty: done."""

    waits_for: str = ""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do; new instances may still be starting."""
        return not self.waits_for


@dataclass(frozen=True, slots=True)
class Member:
    """An instance as the proxy knows it.

    `is_ready`: up, proven and not draining. `requests`: those it works on. `held_tokens`: KV and
    running tokens that users lose with it. `is_everywhere`: every proxy knows it.
    """

    name: str
    url: str
    is_ready: bool
    is_draining: bool = False
    requests: int = 0
    held_tokens: int = 0
    is_everywhere: bool = True


class Fleet(Protocol):
    """The instances behind the proxies, and how one comes in or leaves."""

    def members(self, component: str) -> Sequence[Member]:
        """A component's instances at the last look, in the order of their names."""
        ...

    async def drain(self, name: str) -> None:
        """Give an instance no new requests; it is gone once its last one is over."""
        ...

    async def has_left(self, name: str) -> bool:
        """Whether no proxy knows an instance any more."""
        ...

    async def add(self, name: str, url: str) -> None:
        """Bring an instance in."""
        ...

    def generation(self) -> str:
        """Another text once a proxy has begun anew, and has forgotten whom it was told of."""
        ...


class Scaler(ABC):
    """An orchestrator. Every method raises `ScalerError`; its caller gives each call a deadline."""

    name: ClassVar[str]

    @abstractmethod
    async def validate(self, components: Sequence[Component]) -> None:
        """Check once at the start that decisions can be carried out."""

    async def observe(self) -> Mapping[str, int]:
        """Replicas that are wanted now, by component, while nothing was decided yet.

        Without those that it does not know: there the proxies' instances count.
        """
        return {}

    @abstractmethod
    async def apply(self, decision: Decision, fleet: Fleet) -> Applied:
        """Go a step towards the targets; never wait here for an instance to start or to drain."""

    @abstractmethod
    async def aclose(self) -> None:
        """End what it has open."""

    def notes(self) -> Mapping[str, Any]:
        """What it has to know after a restart, as JSON has it; kept in the state file."""
        return {}

    def recall(self, notes: Mapping[str, Any]) -> None:
        """Take the notes of the process before; ValueError where they are of another form."""
        if notes:
            raise ValueError(f"the scaler {self.name} has no notes")


def victims(members: Sequence[Member], count: int) -> list[Member]:
    """Whom to take away: one that leaves already, one that is not up, one with least to lose."""
    return sorted(
        members,
        key=lambda one: (not one.is_draining, one.is_ready, one.requests > 0, one.held_tokens),
    )[:count]
