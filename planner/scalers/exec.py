"""A command that starts and stops instances: a script around docker, systemd, or a cloud's client.

It is called as `COMMAND list`, which prints `name=host:port` per instance, `COMMAND start NAME` and
`COMMAND stop NAME`. Each returns soon: an instance starts behind it, and outlives the planner. A
name that runs already is started with no effect, and one that runs no more is stopped with none.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from tempfile import TemporaryFile
from typing import IO, Any

from planner.config.components import Component
from planner.scalers.base import (
    Applied,
    Decision,
    Failure,
    Fleet,
    Member,
    Scaler,
    ScalerError,
    victims,
)
from proxy.config.values import InstanceSpec

COMMAND_S = 15.0
"""Time for one call of the command, within a tick."""
MOST_OUTPUT = 1 << 16


class ExecScaler(Scaler):
    """Calls the command until as many instances run as are wanted."""

    name = "exec"

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._components: Sequence[Component] = ()
        self._joined: set[str] = set()
        """Instances that the proxies have known: one that they know no more was taken out."""
        self._leaving: set[str] = set()
        """Instances that this planner drains, to stop them then. They are noted before they are
        drained: else a successor would take the drain for an operator's."""
        self._generation = ""

    async def validate(self, components: Sequence[Component]) -> None:
        """The command lists what runs."""
        self._components = components
        await self._list()

    async def observe(self) -> Mapping[str, int]:
        """The instances that run and that nobody takes out."""
        running = await self._list()
        return {
            one.name: sum(name not in self._leaving for name in one.own(running))
            for one in self._components
        }

    async def apply(self, decision: Decision, fleet: Fleet) -> Applied:
        """Stop what has drained, then start or drain as many as are too few or too many."""
        running = await self._list()
        self._leaving &= running.keys()
        if self._generation != (now := fleet.generation()):
            self._joined, self._generation = set(), now
        self._joined &= running.keys()
        waits: list[str] = []
        for one in self._components:
            if one.name in decision.targets:
                waits += await self._step(one, running, decision.targets[one.name], fleet)
        return Applied("; ".join(waits))

    async def _step(
        self, component: Component, running: Mapping[str, str], target: int, fleet: Fleet
    ) -> list[str]:
        members = {one.name: one for one in fleet.members(component.name)}
        own = component.own(running)
        self._joined |= members.keys() & running.keys()
        for name in sorted(self._leaving & set(own)):
            if name not in members:
                await self._call("stop", name)
                own.remove(name)
            elif not members[name].is_draining:
                await fleet.drain(name)
        # Who was taken out by an operator, or drains by his hand, is there no more: neither is it
        # brought back nor stopped, and another one starts in its place.
        taken = [name for name in own if name in self._joined and name not in members]
        kept = [
            name
            for name in own
            if name not in taken
            and name not in self._leaving
            and not (name in members and members[name].is_draining)
        ]
        if len(kept) < target:
            await self._start(component, running, target - len(kept))
        for name in [name for name in kept if name not in members][: max(0, target)]:
            await fleet.add(name, running[name])
        await self._take(kept, members, len(kept) - target)
        waits = [f"{name} drains" for name in sorted(self._leaving & set(own))]
        if len(kept) < target:
            waits.append(f"{target - len(kept)} of {component.name} start")
        return waits

    async def _start(self, component: Component, running: Mapping[str, str], more: int) -> None:
        """Start instances by the first free names; what starts is listed at the next step."""
        free = (name for n in count() if (name := _named(component, n)) not in running)
        for _ in range(more):
            await self._call("start", next(free))

    async def _take(self, kept: Sequence[str], members: Mapping[str, Member], fewer: int) -> None:
        """Those that no proxy knows yet have nothing to lose; others are to drain."""
        unknown = [name for name in kept if name not in members][: max(0, fewer)]
        for name in unknown:
            await self._call("stop", name)
        known = [members[name] for name in kept if name in members]
        chosen = victims(known, max(0, fewer - len(unknown)))
        self._leaving |= {one.name for one in chosen}

    async def _list(self) -> dict[str, str]:
        """The instances that run: their addresses by their names."""
        found: dict[str, str] = {}
        for line in (await self._call("list")).splitlines():
            if not line.strip():
                continue
            try:
                spec = InstanceSpec.parse(line.strip())
            except ValueError as error:
                text = f"{self._command[0]} list: {line[:80]!r}: {error}"
                raise ScalerError(Failure.FAILED, text) from error
            found[spec.name] = spec.url
        return found

    async def _call(self, *words: str) -> str:
        """What the command prints. It is killed, with all that it has started, at its deadline."""
        shown = " ".join((self._command[0], *words))
        # Files, not pipes: what the command starts may keep its output open, and is not waited for.
        with TemporaryFile() as out, TemporaryFile() as err:
            status = await self._run(words, shown, out, err)
            if status:
                last = _text(err).strip().rpartition("\n")[2][:200]
                raise ScalerError(Failure.FAILED, f"{shown}: exit status {status}: {last}")
            return _text(out)

    async def _run(self, words: Sequence[str], shown: str, out: IO[bytes], err: IO[bytes]) -> int:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except OSError as error:
            raise ScalerError(Failure.FAILED, f"{shown}: {error.strerror}") from error
        try:
            async with asyncio.timeout(COMMAND_S):
                return await process.wait()
        except TimeoutError:
            raise ScalerError(Failure.TIMEOUT, f"{shown}: not over in {COMMAND_S:g} s") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    async def aclose(self) -> None:
        """Instances go on without the planner."""

    def notes(self) -> Mapping[str, Any]:
        """Who was known to the proxies, and who leaves."""
        return {
            "joined": sorted(self._joined),
            "leaving": sorted(self._leaving),
            "generation": self._generation,
        }

    def recall(self, notes: Mapping[str, Any]) -> None:
        """Who was known and leaving before."""
        self._joined = {str(name) for name in notes.get("joined", ())}
        self._leaving = {str(name) for name in notes.get("leaving", ())}
        self._generation = str(notes.get("generation", ""))


def _text(file: IO[bytes]) -> str:
    """The beginning of it, as far as it is printable."""
    file.seek(0)
    text = file.read(MOST_OUTPUT).decode(errors="replace")
    return "".join(c for c in text if c.isprintable() or c == "\n")


def _named(component: Component, number: int) -> str:
    """The name of an instance: the glob's own, with a number in place of its star."""
    head, _, tail = component.match.partition("*")
    return f"{head or component.name + '-'}{number}{tail}"
