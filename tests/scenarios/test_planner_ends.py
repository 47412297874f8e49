"""The planner's process ends at every step of a scale-up and a scale-down, and another goes on.

All is real but the end itself: engines, the proxy, the command, the state file. The end is an
exception that nobody handles, at the n-th step of a kind, before it or behind it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from blockbuster import BlockBuster

from planner.config.options import PlannerOptions
from planner.core.types import COMPONENT
from planner.run import Clocks, Planner, capabilities_of, components_of
from planner.scalers.command import Command
from planner.scalers.exec import ExecScaler
from planner.scalers.state_file import Kept, StateFile
from planner.sources.engines import Engines
from planner.sources.live import Live
from planner.sources.proxy import Proxies
from replayer.simulator.host import SimEngine, SimFleet
from tests.support.harness import ServedProxy, chat, until

MOST, STREAMS, TOKENS = 3, 6, 160
SCRIPT = """#!/bin/sh
cd "$(dirname "$0")"
case $1 in
list) cat running/* 2>/dev/null; true;;
start) test -e running/$2 && echo $2 >> twice; cp ports/$2 running/$2;;
stop) rm -f running/$2;;
esac
"""
KNOWN = {
    "floors": {},
    "lasts": {"hit_ratio": 0.0, "accept_length": 1.0, "isl_tokens": 100.0, "osl_tokens": 100.0},
    "models": {COMPONENT: [[10.0 * n, 100.0 * n, 0.001 + 1e-5 * n] for n in range(8)]},
    "windows": [],
}
"""What a process before has learned: a fleet so idle that it is to shrink."""
DECIDED = [(0, {COMPONENT: 3}), (1, {COMPONENT: 2}), (2, {COMPONENT: 1})]
STEPS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "save": (StateFile, "save", lambda *_: True),
    "start": (Command, "call", lambda _, word, *__: word == "start"),
    "stop": (Command, "call", lambda _, word, *__: word == "stop"),
    "add": (Proxies, "add", lambda *_: True),
    "drain": (Proxies, "drain", lambda *_: True),
}
"""Steps that change something: of which class, by which method, and in which of its calls."""


class End(BaseException):
    """The process ends here."""


class Ends:
    """Counts the steps of a kind, and ends the process once, at the n-th of them."""

    def __init__(self, nth: int, *, behind: bool) -> None:
        self._nth, self._behind = nth, behind
        self._count = itertools.count()
        self._is_now = False

    def begins(self) -> None:
        """A step is about to be taken."""
        self._is_now = next(self._count) == self._nth
        if self._is_now and not self._behind:
            raise End

    def ended(self) -> None:
        """It was taken."""
        if self._is_now:
            raise End

    def watch(self, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
        """Have every step of a kind counted."""
        kind, name, is_one = STEPS[step]
        original = getattr(kind, name)

        def now(*given: Any) -> Any:
            self.begins()
            found = original(*given)
            self.ended()
            return found

        async def later(*given: Any) -> Any:
            if not is_one(*given):
                return await original(*given)
            self.begins()
            found = await original(*given)
            self.ended()
            return found

        monkeypatch.setattr(kind, name, now if step == "save" else later)


class Site:
    """Engines that a command starts and stops, a proxy before them, and one planner at a time."""

    def __init__(self, folder: Path, fleet: SimFleet, proxy: ServedProxy, http: Any) -> None:
        self.folder, self.fleet, self.proxy, self._http = folder, fleet, proxy, http
        self._now_s = itertools.count(1000)
        self.planner: Planner
        self.ends = 0

    async def begin(self) -> None:
        """A planner's process, from the state file on."""
        options = PlannerOptions(
            proxies=self.proxy.server.url,
            match="gpu-*",
            advisory="false",
            scaler="exec",
            scaler_command=str(self.folder / "fleet"),
            state_file=str(self.folder / "state"),
            strategy="founding",
            enable_throughput_scaling="false",
            load_adjustment_interval_seconds="1",
        )
        components = components_of(options)
        proxies = Proxies(self._http, options.proxies, None, components)
        of = {one: capabilities_of(options) for one in components}
        live = Live(proxies, Engines(self._http), of, 4.0, 1800.0)
        scaler = ExecScaler(options.scaler_command)
        clocks = Clocks(lambda: float(next(self._now_s)), lambda: 1.7e9)
        self.planner = Planner(options, live, proxies, scaler, clocks)
        self.planner.begin()
        await scaler.validate(components)

    async def go_on(self, step: Callable[[], Any]) -> None:
        """Take a step; where the process ends in it, another one begins."""
        try:
            found = step()
            if asyncio.iscoroutine(found):
                await found
        except End:
            self.ends += 1
            assert self.planner._state is not None
            self.planner._state.close()  # as the kernel does
            await self.begin()
        await self.follow()

    async def follow(self) -> None:
        """Engines run exactly while the command says so; one that is stopped is killed."""
        for n, engine in enumerate(self.fleet.engines):
            if (is_wanted := f"gpu-{n}" in self.running) != engine.running:
                await (started(engine) if is_wanted else engine.kill())

    async def until_there_are(self, count: int) -> None:
        """An operator asks for so many at least; tick until there are just so many."""
        while self.planner.floors[COMPONENT] != count:

            def ask() -> None:
                self.planner.floors[COMPONENT] = count
                self.planner.save()

            await self.go_on(ask)
        async with asyncio.timeout(60.0):
            while not self.has(count):
                await self.go_on(self.planner.tick)
                self.planner.floors[COMPONENT] = count  # an answer that never came is asked again

    @property
    def running(self) -> set[str]:
        return {path.name for path in (self.folder / "running").iterdir()}

    def has(self, count: int) -> bool:
        """Whether just so many run, are known, are up, and are the target."""
        members = self.proxy.router.known.fleet.members()
        up = {m.instance.name for m in members if m.health.is_up and not m.is_draining}
        decided = self.planner.decision
        targets = {} if decided is None else decided.targets
        return up == self.running and len(up) == len(members) == count == targets.get(COMPONENT)


async def started(engine: SimEngine) -> None:
    """Start an engine at its port, which a connection of another process may have for a moment."""
    for _ in range(100):
        try:
            return await engine.start()
        except OSError:
            await asyncio.sleep(0.1)
    return await engine.start()


@asynccontextmanager
async def sites(folder: Path) -> AsyncIterator[Site]:
    for name in ("ports", "running"):
        (folder / name).mkdir(parents=True)
    (folder / "fleet").write_text(SCRIPT)
    (folder / "fleet").chmod(0o755)
    file = StateFile(folder / "state")
    file.save(Kept(learned=KNOWN))
    file.close()
    async with SimFleet(MOST, speed=2.0, tick=0.0) as fleet:
        for n, engine in enumerate(fleet.engines):
            (folder / "ports" / f"gpu-{n}").write_text(f"gpu-{n}={engine.url}\n")
            await engine.kill()
        (folder / "running" / "gpu-0").write_bytes((folder / "ports" / "gpu-0").read_bytes())
        await fleet.engines[0].start()
        first = f"gpu-0={fleet.engines[0].url}"
        async with ServedProxy(folder / "log", [first]) as proxy, aiohttp.ClientSession() as http:
            await proxy.up()
            yield Site(folder, fleet, proxy, http)


async def played(folder: Path, ends: Ends, monkeypatch: pytest.MonkeyPatch, step: str) -> int:
    """One instance, three, and one again, while users stream; how often the process has ended."""
    kept: dict[int, Any] = {}
    async with sites(folder) as site:
        with monkeypatch.context() as patched:
            original = StateFile.save

            def save(self: StateFile, given: Kept) -> None:
                original(self, given)
                if (one := given.decision) is not None:
                    assert kept.setdefault(one.decision_id, one.targets) == one.targets

            patched.setattr(StateFile, "save", save)
            await site.begin()
            ends.watch(patched, step)
            await site.until_there_are(MOST)
            await site.proxy.up()
            bodies = [chat(f"user {n}", max_tokens=TOKENS) for n in range(STREAMS)]
            running = [asyncio.create_task(site.proxy.post(body)) for body in bodies]
            flying = site.proxy.server.state.in_flight
            await until(lambda: flying.count == STREAMS, "all stream")
            await site.until_there_are(1)
        for answer in await asyncio.gather(*running):
            assert answer.status == 200
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert b'"error"' not in answer.body
        await site.proxy.at_rest()
        assert sorted(kept.items()) == DECIDED, "none is lost, none is doubled"
        assert not (folder / "twice").exists(), "none is started while it runs"
        await site.planner.end()
        return site.ends


@pytest.mark.timeout(900)
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("step", STEPS)
async def test_nothing_is_lost_or_doubled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    blockbuster: BlockBuster,
    step: str,
    behind: bool,
) -> None:
    blockbuster.deactivate()  # a planner reads its state before it begins, with `proxy.config`
    for nth in itertools.count():
        ends = Ends(nth, behind=behind)
        if not await played(tmp_path / str(nth), ends, monkeypatch, step):
            break
    assert nth >= 2, "there were such steps"
