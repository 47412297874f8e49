"""The pods behind an object: who goes where there are to be fewer, and who may go already.

Which pod goes is not the planner's to say, but can be foreseen, and for most objects be steered.
What was begun is written on the pods, so that a planner's successor goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from urllib.parse import urlsplit

from planner.scalers.base import Member, victims

COST = "controller.kubernetes.io/pod-deletion-cost"
"""By this annotation a ReplicaSet chooses among its pods that are ready."""
CHEAP = "-2147483648"
"""The least that a cost can be."""
LEAVES = "cache-planner/leaves"
"""The annotation of a pod that was chosen to go: its `Mark`."""
JOINED = "cache-planner/joined"
"""The annotation of a pod that the planner brought in: the instance's name."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What is written on a pod that goes: the instance, and its address to bring it back.

    `name` is empty where no proxy knew it, `url` where somebody else had drained it before.
    """

    name: str = ""
    url: str = ""

    @classmethod
    def read(cls, text: str) -> Mark:
        """A mark of the text that `str` gives."""
        return cls(*text.split()[:2])

    def __str__(self) -> str:
        return f"{self.name} {self.url}".strip()


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that has not begun to end. `ordinal`: its number in a StatefulSet."""

    name: str
    address: str
    is_ready: bool
    owner: str
    """The kind and the name of what made it."""
    created: str = ""
    ordinal: int | None = None
    mark: Mark | None = None
    is_cheap: bool = False
    has_joined: bool = False

    @classmethod
    def read(cls, pod: Mapping[str, Any]) -> Pod | None:
        """What the API says of a pod; None where it ends or has ended."""
        meta, status = pod["metadata"], pod.get("status") or {}
        if meta.get("deletionTimestamp") or status.get("phase") in ("Succeeded", "Failed"):
            return None
        notes = meta.get("annotations") or {}
        owners = meta.get("ownerReferences") or []
        makers = [f"{one['kind']}/{one['name']}" for one in owners if one.get("controller")]
        owner = next(iter(makers), "")
        tail = meta["name"].rpartition("-")[2]
        return cls(
            meta["name"],
            status.get("podIP", ""),
            any(
                one["type"] == "Ready" and one["status"] == "True"
                for one in status.get("conditions") or ()
            ),
            owner,
            meta.get("creationTimestamp", ""),
            int(tail) if owner.startswith("StatefulSet/") and tail.isdecimal() else None,
            Mark.read(notes[LEAVES]) if LEAVES in notes else None,
            notes.get(COST) == CHEAP,
            JOINED in notes,
        )

    def is_of(self, member: Member) -> bool:
        """Whether an instance runs in it: by its address, or by its name."""
        host = urlsplit(member.url).hostname or ""
        own = (self.name, self.address) if self.address else (self.name,)
        return member.name == self.name or host in own or host.split(".")[0] == self.name


@dataclass(frozen=True, slots=True)
class Seat:
    """A pod, and the instance in it if a proxy knows it. `has_left`: the marked one is gone."""

    pod: Pod
    member: Member | None = None
    has_left: bool = False

    @property
    def may_go(self) -> bool:
        """Whether nobody loses anything with it.

        One that is ready is marked first: what no proxy knew may have joined since the last look.
        """
        if self.pod.mark is not None:
            other = self.member is not None and self.member.name != self.pod.mark.name
            return self.has_left and not other
        return not self.pod.is_ready and not self.is_busy

    @property
    def is_busy(self) -> bool:
        """Whether a proxy sends it requests, or waits for some."""
        return self.member is not None and (self.member.is_ready or self.member.requests > 0)


def seated(pods: Iterable[Pod], members: Sequence[Member], left: Iterable[str]) -> list[Seat]:
    """Every pod with its instance. `left`: names of instances that no proxy knows any more."""
    gone = {"", *left}
    return [
        Seat(
            pod,
            next((one for one in members if pod.is_of(one)), None),
            pod.mark is not None and pod.mark.name in gone,
        )
        for pod in pods
    ]


def going(seats: Sequence[Seat], target: int, start: int = 0) -> list[Seat]:
    """The pods that go where `target` is set, in the order in which they do.

    A StatefulSet takes its highest ordinals; `start` is its first. Grove takes the newest of those
    that are ready. For any other the planner chooses, and says so by the cost.
    """
    if any(seat.pod.ordinal is not None for seat in seats):
        numbered = [(seat.pod.ordinal or 0, seat) for seat in seats]
        numbered.sort(key=lambda one: -one[0])
        return [seat for ordinal, seat in numbered if ordinal >= start + target]
    first = sorted((s for s in seats if not s.pod.is_ready), key=lambda s: s.may_go)
    ready = [seat for seat in seats if seat.pod.is_ready]
    order = first + (_newest(ready) if _is_of_grove(ready) else _least(ready))
    return order[: max(0, len(seats) - target)]


def allowed(seats: Sequence[Seat], gone: Sequence[Seat], target: int, start: int = 0) -> int:
    """The fewest replicas, down to `target`, with which only pods go that may."""
    stay = [seat for seat in gone if not seat.may_go]
    numbers = [seat.pod.ordinal for seat in stay if seat.pod.ordinal is not None]
    if numbers:
        return max(numbers) + 1 - start
    if not stay:
        return target
    return max(target, len(seats) - len(list(takewhile(lambda seat: seat.may_go, gone))))


def _is_of_grove(seats: Sequence[Seat]) -> bool:
    return any(seat.pod.owner.startswith("PodClique/") for seat in seats)


def _newest(seats: Iterable[Seat]) -> list[Seat]:
    return sorted(seats, key=lambda seat: seat.pod.created, reverse=True)


def _least(seats: Sequence[Seat]) -> list[Seat]:
    """Those that may go, those chosen before, those no proxy knows, and who has least to lose."""
    known = [seat.member for seat in seats if seat.member is not None]
    place = {member.name: at for at, member in enumerate(victims(known, len(known)), 1)}
    return sorted(
        seats,
        key=lambda s: (
            not s.may_go,
            s.pod.mark is None,
            place[s.member.name] if s.member else 0,
            s.pod.name,
        ),
    )
