"""What must hold after every fault, I1 to I10, and how often it was looked at."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.client import Got
from tests.support.harness import until
from tests.support.turns import turns

counted: Counter[str] = Counter()
"""Checks made in this session, by invariant."""
ALL = tuple(f"I{i}" for i in range(1, 11))
LAG_S = 0.25
"""The longest that one turn of the loop may compute."""
LOOK_S = 0.01
CLOSE_S = 10.0
"""Sockets and tasks may take so long to go, on a machine with much else to do."""
_BAD_WORDS = ("never retrieved", "Traceback (most recent", "never awaited", "Unclosed")
_AT_ZERO = (
    "ongoing_tokens",
    "ongoing_prefill_tokens",
    "ongoing_decode_tokens",
    "in_flight",
    "accounting_drift",
    "queued_requests",
)


def holds(name: str, truth: object, what: str) -> None:
    """Count one check of an invariant; AssertionError when it does not hold."""
    counted[name] += 1
    assert truth, f"{name}: {what}"


class LogCatcher(logging.Handler):
    """Keeps every line that anybody logs, with its traceback."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
        self.lines: list[str] = []
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if "/replayer/" in line and "/proxy/" not in line:
            return  # a simulated engine that was killed has its own sorrows
        self.lines.append(line)
        if record.levelno >= logging.ERROR or record.exc_info:
            self.errors.append(line)

    def __enter__(self) -> LogCatcher:
        root = logging.getLogger()
        self._level = root.level
        root.setLevel(logging.DEBUG)
        root.addHandler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        root = logging.getLogger()
        root.removeHandler(self)
        root.setLevel(self._level)


class LagProbe:
    """The longest turn of the loop, in seconds that its thread computed.

    The tests' own share is in it; `tests.support.turns` has the proxy's alone, and a tighter bound.
    """

    def __init__(self) -> None:
        self.turns_s: list[float] = []
        self._at_s = turns.computed_s

    def forgive(self) -> None:
        """What was computed since the last look was the test's own."""
        self._at_s = turns.computed_s

    @property
    def longest_s(self) -> float:
        return max(self.turns_s, default=0.0)

    async def run(self) -> None:
        self.forgive()
        while True:
            await asyncio.sleep(
                LOOK_S
            )  # how often is looked; what the loop computed since is measured
            now_s = turns.computed_s
            self.turns_s.append(now_s - self._at_s)
            self._at_s = now_s


class Residue:
    """File descriptors and tasks of this process, before and after."""

    def __init__(self) -> None:
        self.fds, self.tasks = _fds(), len(asyncio.all_tasks())

    async def is_back(self) -> bool:
        """Whether both are where they were, within 2; sockets need a few turns to close."""
        with contextlib.suppress(AssertionError):
            await until(self._is_near, limit_s=CLOSE_S)
        return self._is_near()

    def _is_near(self) -> bool:
        return abs(_fds() - self.fds) <= 2 and abs(len(asyncio.all_tasks()) - self.tasks) <= 2

    def __str__(self) -> str:
        tasks = len(asyncio.all_tasks())
        return f"{_fds()} fds (were {self.fds}), {tasks} tasks (were {self.tasks})"


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def samples(exposition: str) -> list[tuple[str, Mapping[str, str], float]]:
    """Every sample of a `/metrics` text, without the prefix."""
    return [
        (s.name.removeprefix("cache_proxy_"), s.labels, s.value)
        for family in text_string_to_metric_families(exposition)
        for s in family.samples
    ]


def not_zero(exposition: str) -> list[str]:
    """The gauges that should be zero when nothing is in flight, and are not (I1)."""
    found = samples(exposition)
    return [f"{name}{dict(labels)} = {v:g}" for name, labels, v in found if name in _AT_ZERO and v]


def outcomes(exposition: str) -> Counter[str]:
    """Requests by their outcome, as the metrics have it."""
    found: Counter[str] = Counter()
    for name, labels, value in samples(exposition):
        if name == "requests_total" and value:
            found[labels["outcome"]] += int(value)
    return found


def logged(records: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Requests by their outcome, as the log has it."""
    return Counter(str(record["outcome"]) for record in records)


def bad_lines(lines: Iterable[str]) -> list[str]:
    """Lines of a log that should not be there (I5)."""
    return [line for line in lines if any(word in line for word in _BAD_WORDS)]


def is_honest(got: Got) -> bool:
    """A good status that ended cleanly has all of its answer (I4)."""
    if got.status != 200 or not got.is_clean or not got.is_stream:
        return True
    return got.is_done


def says_when(got: Got) -> bool:
    """A 503 names the time to come again (I4 too: it is how an answer ends)."""
    return got.status != 503 or got.headers.get("retry-after", "").isdecimal()


def hits(canaries: Iterable[str], *texts: str) -> list[str]:
    """Secrets that are in an output (I7)."""
    return [c for c in canaries if any(c in text for text in texts)]
