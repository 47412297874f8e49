"""Runs in Dynamo's environment: `python -m bench.planner.worker JOB`, a line per run.

It plays all policies on one load. A line of its output is a run, or a policy left out, as JSON.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from analysis.plan.clairvoyant import Orders, Search, World
from analysis.plan.measured import CLAIRVOYANT, STATIC, Played, Run
from bench.planner.jobs import Job, LeftOut, line_of
from bench.planner.judge import Entry, Judge
from bench.planner.rules.policy import Schedule
from bench.planner.rules.rivals import RIVALS
from replayer import loads


def entries(policy: str) -> list[Entry]:
    """What one name stands for; raises ValueError, ImportError, AttributeError for a wrong one."""
    if policy in RIVALS:
        rival = RIVALS[policy]
        return [Entry(policy, rival.make, settings) for settings in rival.settings]
    module, name, settings = parts_of(policy)
    make = getattr(importlib.import_module(module), name)
    return [Entry(f"{module}:{name}", make, settings)]


def parts_of(policy: str) -> tuple[str, str, dict[str, Any]]:
    """Module, class and settings; raises ValueError where it has another form."""
    module, _, rest = policy.partition(":")
    name, _, settings = rest.partition(":")
    found = json.loads(settings or "{}")
    if not module or not name.isidentifier() or not isinstance(found, dict):
        raise ValueError(f"must be MODULE:CLASS or MODULE:CLASS:JSON, not {policy!r}")
    return module, name, found


class Worker:
    """Plays a job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        load = loads.make(job.load, job.seed, Path(job.traces) if job.traces else None)
        self._judge = Judge(load, job.engine, Path(job.trace), job.router)

    def results(self) -> Iterator[Run | LeftOut]:
        """Every run; one policy's fault does not stop the others."""
        for startup_s in self._job.startups_s:
            for policy in self._job.policies:
                try:
                    yield from self._runs(policy, startup_s)
                except ImportError as error:
                    yield LeftOut(policy, str(error), is_fault=policy not in RIVALS)
                except Exception as error:  # noqa: BLE001 - whatever a policy raises is its own
                    place = f"{policy} on {self._job.load}, start-up {startup_s:g} s"
                    yield LeftOut(place, f"{type(error).__name__}: {error}", is_fault=True)
                gc.collect()  # a report of 40,000 requests is large, and has cycles

    def _runs(self, policy: str, startup_s: float) -> Iterator[Run]:
        load = self._judge.load
        if policy == STATIC:
            for n in range(load.min_replicas, load.max_replicas + 1):
                yield self._judge.static(n, startup_s).run
        elif policy.startswith(f"{STATIC}:"):
            yield self._judge.static(int(policy.removeprefix(f"{STATIC}:")), startup_s).run
        elif policy == CLAIRVOYANT:
            yield from self._search(startup_s).runs()
        else:
            for entry in entries(policy):
                yield self._judge.play(entry, startup_s).run

    def _search(self, startup_s: float) -> Search:
        judge, load = self._judge, self._judge.load
        sizes = range(load.min_replicas, load.max_replicas + 1)
        fleets = {n: judge.static(n, startup_s) for n in sizes}

        def play(name: str, orders: Orders, initial: int) -> Played:
            entry = Entry(name, partial(Schedule, orders=orders), initial=initial)
            return judge.play(entry, startup_s)

        world = World(load, judge.engine.work_s, startup_s, play)
        return Search(world, fleets, self._job.effort)


def _own_output() -> TextIO:
    """Standard output for the lines alone: what else is printed goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def main(job: Path) -> int:
    """Play a job."""
    with _own_output() as out:
        for result in Worker(Job.read(job)).results():
            out.write(line_of(result) + "\n")
            out.flush()
    return 0


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # Dynamo's planner tells of every tick
    sys.exit(main(Path(sys.argv[1])))
