"""A command that starts and stops instances: a script around docker, systemd, or a cloud's client.

It is called as `COMMAND list`, which prints `name=host:port` per instance, `COMMAND start NAME` and
`COMMAND stop NAME`. Each returns soon: an instance starts behind it, and outlives the planner. A
name that runs already is started with no effect, and one that runs no more is stopped with none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from planner.config.components import Component
from planner.scalers.base import Applied, Decision, Fleet, Member, Scaler, victims
from planner.scalers.command import Command
from proxy.config.values import InstanceSpec


@dataclass(frozen=True, slots=True)
class _Seen:
    """A component at a step: what runs of it, and whom the proxies know."""

    component: Component
    target: int
    running: Mapping[str, InstanceSpec]
    members: Mapping[str, Member]

    def is_draining(self, name: str) -> bool:
        """Whether a proxy drains an instance of this name."""
        return name in self.members and self.members[name].is_draining


class ExecScaler(Scaler):
    """Calls the command until as many instances run as are wanted."""

    name = "exec"

    def __init__(self, command: Sequence[str]) -> None:
        self._command = Command(command)
        self._components: Sequence[Component] = ()
        self._joined: dict[str, str] = {}
        """Addresses of instances that all proxies have known: one that they know no more was taken
        out. One that runs elsewhere since then has not joined."""
        self._leaving: set[str] = set()
        """Instances that this planner drains, to stop them then. They are noted before they are
        drained: else a successor would take the drain for an operator's."""
        self._generation = ""

    async def validate(self, components: Sequence[Component]) -> None:
        """The command lists what runs."""
        self._components = components
        await self._command.instances()

    async def observe(self) -> Mapping[str, int]:
        """The instances that run and that nobody takes out."""
        running = await self._command.instances()
        return {
            one.name: sum(name not in self._leaving for name in one.own(running))
            for one in self._components
        }

    async def apply(self, decision: Decision, fleet: Fleet) -> Applied:
        """Stop what has drained, then start or drain as many as are too few or too many."""
        running = await self._command.instances()
        members = {one.name: one for of in self._components for one in fleet.members(of.name)}
        is_anew = self._generation != (now := fleet.generation())
        there = running.keys() | members.keys()
        self._generation, self._leaving = now, self._leaving & there
        self._joined = {
            name: url for name, url in self._joined.items() if name in there and not is_anew
        }
        waits: list[str] = []
        for one in self._components:
            if one.name in decision.targets:
                own = {name: running[name] for name in one.own(running)}
                known = {name: members[name] for name in one.own(members)}
                waits += await self._step(_Seen(one, decision.targets[one.name], own, known), fleet)
        return Applied("; ".join(waits))

    async def _step(self, seen: _Seen, fleet: Fleet) -> list[str]:
        """Who comes is seen to first: a drain that fails keeps nobody from coming."""
        self._joined |= {n: spec.url for n, spec in seen.running.items() if self._is_in(n, seen)}
        kept = [name for name in seen.running if self._is_kept(name, seen)]
        short = seen.target - len(kept)
        waits = await self._more(seen, short, fleet)
        # Those that no proxy knows yet have nothing to lose, and are not brought in before.
        unknown = [name for name in kept if name not in seen.members][: max(0, -short)]
        for name in unknown:
            await self._command.call("stop", name)
        for name in kept:
            if name not in unknown and not self._is_in(name, seen):
                await fleet.add(name, _address(seen.running[name]))
                waits.append(f"{name} joins")
        waits += await self._let_go(seen, fleet)
        known = [seen.members[name] for name in kept if name in seen.members]
        chosen = victims(known, max(0, -short - len(unknown)))
        self._leaving |= {one.name for one in chosen}
        return waits + [f"{one.name} drains" for one in chosen]

    def _is_same(self, name: str, seen: _Seen) -> bool:
        """Whether a member of this name is the instance that runs, however its host is written."""
        if (one := seen.members.get(name)) is None or name not in seen.running:
            return False
        url = seen.running[name].url
        return one.is_ready or url in (one.url, self._joined.get(name))

    def _is_in(self, name: str, seen: _Seen) -> bool:
        """Whether all proxies know the instance that runs."""
        return self._is_same(name, seen) and seen.members[name].is_everywhere

    def _is_kept(self, name: str, seen: _Seen) -> bool:
        """Whether it counts. Who was taken out by an operator, or drains by his hand, does not.

        Neither is it brought back nor stopped, and another one starts in its place.
        """
        has_joined = self._joined.get(name) == seen.running[name].url
        is_taken = has_joined and not self._is_in(name, seen)
        drains = self._is_same(name, seen) and seen.is_draining(name)
        return not (is_taken or drains or name in self._leaving)

    async def _more(self, seen: _Seen, short: int, fleet: Fleet) -> list[str]:
        """Bring back those that leave, as they are warm and hold their GPUs; start the others."""
        back = sorted(self._leaving & seen.running.keys() & seen.members.keys())[: max(0, short)]
        for name in back:
            one, spec = seen.members[name], seen.running[name]
            await fleet.add(name, _address(spec) if one.url == spec.url else one.url)
            self._leaving.discard(name)
        waits = [f"{name} comes back" for name in back]
        if (more := short - len(back)) > 0:
            await self._start(seen, more)
            waits.append(f"{more} of {seen.component.name} start")
        return waits

    async def _start(self, seen: _Seen, more: int) -> None:
        """Start instances by the first free names; what starts is listed at the next step."""
        taken = seen.running.keys() | self._leaving
        free = (name for n in count() if (name := _named(seen.component, n)) not in taken)
        for _ in range(more):
            await self._command.call("start", next(free))

    async def _let_go(self, seen: _Seen, fleet: Fleet) -> list[str]:
        """Drain those that leave, and stop those that have drained."""
        await self._remove_dead(seen, fleet)
        waits = []
        for name in sorted(self._leaving & seen.running.keys()):
            if await fleet.has_left(name):
                await self._command.call("stop", name)
                waits.append(f"{name} stops")
                continue
            if not seen.is_draining(name):
                await fleet.drain(name)
            waits.append(f"{name} drains")
        return waits

    async def _remove_dead(self, seen: _Seen, fleet: Fleet) -> None:
        """Members that run no more, or elsewhere: else their successors could not come in."""
        for name, one in seen.members.items():
            was_own = name in seen.running or name in self._joined
            if was_own and not (one.is_ready or one.is_draining or self._is_same(name, seen)):
                await fleet.drain(name)

    async def aclose(self) -> None:
        """Instances go on without the planner."""

    def notes(self) -> Mapping[str, Any]:
        """Who was known to the proxies, and who leaves."""
        return {
            "joined": dict(sorted(self._joined.items())),
            "leaving": sorted(self._leaving),
            "generation": self._generation,
        }

    def recall(self, notes: Mapping[str, Any]) -> None:
        """Who was known and leaving before."""
        self._joined = {str(name): str(url) for name, url in dict(notes.get("joined", {})).items()}
        self._leaving = {str(name) for name in notes.get("leaving", ())}
        self._generation = str(notes.get("generation", ""))


def _address(spec: InstanceSpec) -> str:
    """Its address with all that was told beside it, as an operator would give it to a proxy."""
    return str(replace(spec, name=spec.url.partition("://")[2]))


def _named(component: Component, number: int) -> str:
    """The name of an instance: the glob's own, with a number in place of its star."""
    head, _, tail = component.match.partition("*")
    return f"{head or component.name + '-'}{number}{tail}"
