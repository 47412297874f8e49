"""An experiment as a definition, and the processes that compute its tasks."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rich.console import Console

from analysis.bench.options import declare, read
from analysis.bench.tables import TABLE_WIDTH, say
from replayer.arguments import write_json
from replayer.terminal import Terminal

Options = TypeVar("Options")
Task = TypeVar("Task")
Row = TypeVar("Row")
State = TypeVar("State")
GC_OBJECTS = 200_000
CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """What an experiment leaves when its tables are printed: its file, and its last lines.

    `figures` writes the pages and returns their paths; `status` is the command's exit status.
    """

    document: Any
    sentences: Sequence[str] = ()
    figures: Callable[[], Sequence[str]] = tuple
    status: int = 0


@dataclass(frozen=True, slots=True)
class Experiment(Generic[Options]):
    """A command of `analyze`: its options, and what computes and prints it.

    The options' field `json` is the file of the rows. `usual` gives defaults that depend on what
    was asked. `text` describes the command, where its name does not.
    """

    options: type[Options]
    perform: Callable[[Options, Console], Result]
    width: int = TABLE_WIDTH
    usual: Callable[[argparse.Namespace], dict[str, Any]] = lambda _given: {}
    text: str | None = None

    def declare(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""
        parser.description = self.text
        declare(parser, self.options)

    def run(self, given: argparse.Namespace, console: Console) -> int:
        """Compute, print and write the results; returns the exit status."""
        options = read(self.options, given, **self.usual(given))
        wide = Terminal(width=max(console.width, self.width))
        result = self.perform(options, wide)
        written = []
        path: Path | None = vars(given).get("json")
        if path is not None:
            write_json(path, result.document)
            written.append(str(path))
        for one in (*written, *result.figures()):
            wide.print(f"written: {one}", soft_wrap=True, markup=False)
        for line in result.sentences:
            say(wide, line)
        return result.status


class Compute(Protocol):
    """Computes tasks side by side; yields their rows in the order of the tasks."""

    def __call__(
        self, function: Callable[[Any, Task], Row], tasks: Iterable[Task], /
    ) -> Iterator[Row]:
        """Call the function with the workers' state and each task."""


_state: Any = None


def _start(load: Callable[[Any], Any], options: Any, parent: int) -> None:
    global _state  # noqa: PLW0603 - a worker process reads its trace once
    _exit_with(parent)
    _state = load(options)
    # A run makes few cycles, and many objects that live to its end: saves a tenth of the time.
    gc.freeze()
    gc.set_threshold(GC_OBJECTS, 50, 100)


def _exit_with(parent: int) -> None:
    """Exit within a second of the parent's end, even if that was killed. Forks have no timer."""

    def check(*_signal: object) -> None:
        if os.getppid() != parent:
            os._exit(1)

    signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, CHECK_S, CHECK_S)


def _compute(job: tuple[Callable[[Any, Any], Any], Any]) -> Any:
    function, task = job
    return function(_state, task)


@contextmanager
def workers(
    jobs: int,
    load: Callable[[Options], State],
    options: Options,
    here: State,
    *,
    apart: bool = False,
) -> Iterator[Compute]:
    """Start processes that share nothing but `load(options)`, which each does for itself.

    One job is done in this process, with the state `here`. Rows do not depend on the number.
    `apart`: each task in a new process, even with one job. Tasks that fork need it: the time of a
    fork grows with the mapped memory, and this process may have loaded pandas and plotly.
    """
    # A worker outlives a parent that a signal kills, but not a parent that exits.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if jobs == 1 and not apart:
        yield lambda function, tasks: (function(here, task) for task in tasks)
        return
    # Spawned, not forked: workers share nothing of this process but the arguments.
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, _start, (load, options, os.getpid()), 1 if apart else None) as pool:
        yield lambda function, tasks: pool.imap(_compute, [(function, one) for one in tasks], 1)


def rows_of(found: Iterable[Row], of: int, progress: Callable[[int, int], None]) -> list[Row]:
    """Collect the rows of so many tasks, and tell of each."""
    rows: list[Row] = []
    for row in found:
        rows.append(row)
        progress(len(rows), of)
    return rows
