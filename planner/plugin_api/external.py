"""The plugins of other processes: who they are now, whether they live, what they say in a tick."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from planner.config.plugins import MOST_PLUGINS, PluginSpec
from planner.core.pipeline import (
    MOST_FAILURES,
    OFF_S,
    Ask,
    Failed,
    Heard,
    How,
    Outcome,
    Pipeline,
    Said,
    Steps,
)
from planner.core.types import Context, Stage

MOST_NAMED = 3
"""Parts without a meaning in a line of the log; the audit log has all."""
LEASE_S = 15.0
"""A plugin that has registered itself says so again within that time, or is gone."""
_log = logging.getLogger("planner")


class Caller(Protocol):
    """Calls one plugin; it raises nothing of its own, and takes no longer than the deadline."""

    async def describe(self) -> Failed | None:
        """Whether the plugin is there and speaks our protocol; why not."""
        ...

    async def ask(self, stage: Stage, context: Context) -> Said | Failed:
        """What it says of a tick."""
        ...

    async def aclose(self) -> None:
        """Call it no more."""
        ...


class RefusedError(Exception):
    """A plugin cannot register itself; the text is one line."""


@dataclass(slots=True)
class _Plugin:
    """A plugin: how it is called, and until when it is one."""

    spec: PluginSpec
    caller: Caller
    until_s: float = math.inf


class Externals:
    """The plugins of one planner. Only its loop changes them."""

    def __init__(self, pipeline: Pipeline, now_s: Callable[[], float]) -> None:
        self._pipeline, self._now_s = pipeline, now_s
        self._connect: Callable[[PluginSpec], Caller] | None = None
        self._plugins: dict[str, _Plugin] = {}
        self._gone: list[Caller] = []
        """A call of theirs may be under way: they are closed at the next tick."""
        self._silent: dict[str, str] = {}
        """Why plugins whose last answer counts in this tick may be dead."""
        self._told: dict[str, How] = {}
        """What of each plugin was said in the log."""
        self._odd: set[str] = set()
        """Plugins of which parts had no meaning, and that was said."""

    def begin(
        self, specs: Iterable[PluginSpec], connect: Callable[[PluginSpec], Caller] | None
    ) -> None:
        """Begin with these plugins. Without `connect` none is ever called."""
        self._connect = connect
        for spec in specs:
            self._add(spec, math.inf)

    def shown(self) -> list[dict[str, object]]:
        """Every plugin in plain words, without its token."""
        states = self.states()
        return [
            {
                "name": name,
                "stage": one.spec.stage,
                "address": one.spec.address,
                "priority": one.spec.priority,
                "registered": one.until_s < math.inf,
                "state": states[name],
            }
            for name, one in self._plugins.items()
        ]

    def states(self) -> dict[str, How]:
        """What came of each plugin last."""
        return {name: self._told.get(name, How.IDLE) for name in self._plugins}

    def register(self, spec: PluginSpec) -> None:
        """Take a plugin on for a while, or for a while longer. Raises RefusedError."""
        self._expire()
        until_s = self._now_s() + LEASE_S
        known = self._plugins.get(spec.name)
        if known is not None and known.until_s == math.inf:
            raise RefusedError(f"{spec.name}: a plugin of the configuration has that name")
        if known is not None and known.spec.address != spec.address:
            raise RefusedError(f"{spec.name}: a plugin at another address has that name")
        if known is None and len(self._plugins) >= MOST_PLUGINS:
            raise RefusedError(f"there are {MOST_PLUGINS} plugins already")
        if known is not None and known.spec == spec:
            known.until_s = until_s
            return
        if known is not None:
            self._remove(spec.name)
        self._add(spec, until_s)
        _log.info("plugin %s: registered at %s, stage %s", spec.name, spec.address, spec.stage)

    def unregister(self, name: str) -> bool:
        """Let a plugin go; whether it had registered itself."""
        known = self._plugins.get(name)
        if known is None or known.until_s == math.inf:
            return False
        self._remove(name)
        _log.info("plugin %s: gone", name)
        return True

    async def silent(self) -> list[str]:
        """Every plugin that does not answer, a line each."""
        callers = {name: one.caller for name, one in self._plugins.items()}
        found = await self._described(callers)
        return [f"plugin {name}: {failed.reason}" for name, failed in found.items()]

    async def decided(self, steps: Steps) -> Outcome:
        """Go through a tick; what its plugins say or why not is in the outcome."""
        await self._beat()
        outcome = await self._finished(steps)
        heard = tuple(self._completed(one, outcome) for one in outcome.heard)
        for one in heard:
            self._tell(one)
        return replace(outcome, heard=heard)

    async def aclose(self) -> None:
        """Call nobody any more."""
        for name in list(self._plugins):
            self._remove(name)
        await self._close_gone()

    def _add(self, spec: PluginSpec, until_s: float) -> None:
        assert self._connect is not None, "nobody calls plugins"
        self._plugins[spec.name] = _Plugin(spec, self._connect(spec), until_s)
        self._pipeline.add(spec.remote)

    def _remove(self, name: str) -> None:
        self._gone.append(self._plugins.pop(name).caller)
        self._pipeline.remove(name)
        self._told.pop(name, None)
        self._odd.discard(name)

    def _expire(self) -> None:
        now_s = self._now_s()
        for name in [name for name, one in self._plugins.items() if one.until_s < now_s]:
            self._remove(name)
            _log.warning("plugin %s: gone, it has not registered again for %g s", name, LEASE_S)

    async def _beat(self) -> None:
        """Let those go whose time is over, and ask whether those live whose last answer counts."""
        await self._close_gone()
        self._expire()
        now_s = self._now_s()
        callers = {name: self._plugins[name].caller for name in self._pipeline.holding(now_s)}
        found = await self._described(callers)
        self._silent = {name: failed.reason for name, failed in found.items()}
        for name in found:
            self._pipeline.failed(name, now_s)

    async def _close_gone(self) -> None:
        while self._gone:
            await self._gone.pop().aclose()

    async def _described(self, callers: dict[str, Caller]) -> dict[str, Failed]:
        async with asyncio.TaskGroup() as tasks:
            found = {name: tasks.create_task(one.describe()) for name, one in callers.items()}
        answers = {name: task.result() for name, task in found.items()}
        return {name: failed for name, failed in answers.items() if failed is not None}

    async def _finished(self, steps: Steps) -> Outcome:
        try:
            ask = next(steps)
            while True:
                ask = steps.send(await self._asked(ask))
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome

    async def _asked(self, ask: Ask) -> dict[str, Said | Failed]:
        async with asyncio.TaskGroup() as tasks:
            found = {
                one.name: tasks.create_task(
                    self._plugins[one.name].caller.ask(ask.stage, ask.context)
                )
                for one in ask.plugins
            }
        return {name: task.result() for name, task in found.items()}

    def _completed(self, heard: Heard, outcome: Outcome) -> Heard:
        """With what the stages made of it, and why it may be dead while its last answer counts."""
        dropped = (*heard.dropped, *outcome.dropped.get(heard.name, ()))
        failure = heard.failure or self._silent.get(heard.name, "")
        return replace(heard, dropped=dropped, failure=failure)

    def _tell(self, heard: Heard) -> None:
        """Say in the log what has changed."""
        before = self._told.get(heard.name, How.IDLE)
        how = How.FAILED if heard.failure and heard.how is not How.OFF else heard.how
        self._told[heard.name] = how
        if how is How.FAILED and how is not before:
            _log.warning("plugin %s: %s", heard.name, heard.failure)
        elif how is How.OFF and how is not before:
            _log.warning(
                "plugin %s: failed %d times, off for %g s", heard.name, MOST_FAILURES, OFF_S
            )
        elif how is How.ANSWERED and before in (How.FAILED, How.OFF):
            _log.info("plugin %s: is well again", heard.name)
        if heard.how is How.ANSWERED:
            self._tell_dropped(heard)

    def _tell_dropped(self, heard: Heard) -> None:
        if not heard.dropped:
            self._odd.discard(heard.name)
        elif heard.name not in self._odd:
            self._odd.add(heard.name)
            some = "; ".join(heard.dropped[:MOST_NAMED])
            _log.warning("plugin %s: without a meaning: %s", heard.name, some)
