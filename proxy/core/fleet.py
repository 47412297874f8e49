"""The instances that are known, and which of them may be chosen."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from proxy.core.health import Health
from proxy.core.types import Instance


@dataclass(slots=True)
class Member:
    """An instance in the fleet. `incarnation` counts its returns; `models` is None until asked."""

    instance: Instance
    health: Health = field(default_factory=Health)
    incarnation: int = 0
    is_draining: bool = False
    models: frozenset[str] | None = None
    last_placed: int = 0


class Fleet:
    """Members by name, in the order of their coming."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._placements = 0

    def __len__(self) -> int:
        return len(self._members)

    def add(self, instance: Instance) -> None:
        """Bring an instance in."""
        self._members[instance.name] = Member(instance)

    def remove(self, name: str) -> None:
        """Take an instance out, if it is there."""
        self._members.pop(name, None)

    def get(self, name: str) -> Member | None:
        """One member, or None."""
        return self._members.get(name)

    def members(self) -> list[Member]:
        """All of them."""
        return list(self._members.values())

    def up(self) -> list[Member]:
        """Those that live."""
        return [member for member in self._members.values() if member.health.is_up]

    def is_up(self, name: str) -> bool:
        """Whether an instance is in the fleet and lives."""
        member = self._members.get(name)
        return member is not None and member.health.is_up

    def serving(self, model: str, exclude: Collection[str] = ()) -> list[Member]:
        """Those that may be chosen for a model; for a model nobody serves, all that may be chosen.

        The engine's own 404 is the right answer to an unknown model, and only it can tell. While
        those that serve a model are away, the others would deny that there is such a model.
        """
        fit = [
            m
            for m in self._members.values()
            if m.health.is_up
            and not m.is_draining
            and (m.models is None or model in m.models)
            and m.instance.name not in exclude
        ]
        if fit or any(model in (m.models or ()) for m in self._members.values()):
            return fit
        return [m for m in self.up() if not m.is_draining and m.instance.name not in exclude]

    def observe_models(self, name: str, models: Iterable[str]) -> None:
        """Take in the models that an instance serves."""
        if (member := self._members.get(name)) is not None:
            member.models = frozenset(models)

    def models(self) -> set[str]:
        """Every model known to be served by someone."""
        return {model for member in self._members.values() for model in member.models or ()}

    def placed(self, name: str) -> None:
        """Note a placement, for the rotation among equals."""
        self._placements += 1
        self._members[name].last_placed = self._placements
