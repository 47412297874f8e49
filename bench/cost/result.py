"""What a run leaves: every window, who took part in which version, and on what machine."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from bench.measuring.window import Window


@dataclass(frozen=True, slots=True)
class SessionTable:
    """The proxy's memory with that many sessions in its table."""

    sessions: int
    pss_bytes: int
    pss_empty_bytes: int


@dataclass(slots=True)
class Result:
    """One run, complete or not."""

    date: str
    machine: str
    rounds: int
    versions: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    session_table: SessionTable | None = None
    faults: list[str] = field(default_factory=list)

    @classmethod
    def begin(cls, rounds: int) -> Result:
        """An empty result of today on this machine."""
        return cls(datetime.now(UTC).date().isoformat(), machine_class(), rounds)

    def add(self, window: Window) -> None:
        """Take a window in; what is wrong with it fails the run."""
        self.windows.append(window)
        place = f"{window.peer}, {window.scenario}, round {window.round}"
        self.faults += [f"{place}: {fault}" for fault in window.faults]

    def of(self, peer: str, scenario: str) -> list[Window]:
        """A peer's valid windows of one scenario: the calm ones if there are any."""
        valid = [w for w in self.windows if w.peer == peer and w.scenario == scenario and w.counts]
        return [w for w in valid if not w.is_noisy] or valid

    def save(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps(self, option=orjson.OPT_INDENT_2))

    @classmethod
    def merged(cls, results: Sequence[Result]) -> Result:
        """Several runs as one with all their rounds: the date and machine are the last one's."""
        whole = cls(results[-1].date, results[-1].machine, 0)
        for result in results:
            whole.windows += [replace(w, round=w.round + whole.rounds) for w in result.windows]
            whole.rounds += result.rounds
            whole.versions |= result.versions
            whole.left_out |= result.left_out
            whole.session_table = result.session_table or whole.session_table
            whole.faults += result.faults
        return whole

    @classmethod
    def load(cls, path: Path) -> Result:
        """An earlier run."""
        told: dict[str, Any] = orjson.loads(path.read_bytes())
        table = told.pop("session_table")
        windows = [
            Window(**window | {"faults": tuple(window["faults"])}) for window in told.pop("windows")
        ]
        return cls(
            **told,
            windows=windows,
            session_table=SessionTable(**table) if table else None,
        )


def machine_class() -> str:
    """What kind of machine this is; nothing that tells which one."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    kernel = ".".join(platform.release().split(".")[:2])
    cpus = len(os.sched_getaffinity(0))
    name = model[1].strip() if model else platform.machine()
    return f"{cpus} CPUs ({name}), Linux {kernel}, Python {platform.python_version()}"
