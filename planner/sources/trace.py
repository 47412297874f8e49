"""The intervals of a trace: what a planner would have seen of its traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from planner.core.types import Traffic
from replayer.arguments import InputError
from replayer.trace.loaders import read_trace

MOST_INTERVALS = 100_000
"""Of one trace: 200 days of 180 s."""


def files(text: str) -> list[Path]:
    """The files of a path, a folder or a glob, in the order of their names. Raises InputError."""
    path = Path(text)
    if path.is_dir():
        found = [one for one in path.iterdir() if one.is_file()]
    elif any(sign in text for sign in "*?["):
        found = [one for one in Path(path.anchor or ".").glob(_relative(path)) if one.is_file()]
    else:
        found = [path]
    if not found:
        raise InputError(f"{text}: there is no such file")
    return sorted(found)


def _relative(path: Path) -> str:
    return str(path.relative_to(path.anchor)) if path.anchor else str(path)


def windows(paths: Sequence[Path], interval_s: float) -> Iterator[Traffic]:
    """Every interval of each trace, the empty ones as well. Raises TraceError, OSError.

    A request without an arrival of its own, as in a session whose turns wait for one another, is
    not counted: when it would have come depends on the answer before it.
    """
    for path in paths:
        at, counts = 0, [0.0, 0.0, 0.0]
        for request in read_trace(path):
            if request.arrival_s is None:
                continue
            due = int(request.arrival_s / interval_s)
            if due >= MOST_INTERVALS:
                raise InputError(f"{path}: over {MOST_INTERVALS} intervals of {interval_s:g} s")
            while at < due:
                yield _window(interval_s, *counts)
                at, counts = at + 1, [0.0, 0.0, 0.0]
            counts[0] += 1
            counts[1] += request.input_tokens or 0
            counts[2] += request.output_tokens
        yield _window(interval_s, *counts)


def _window(interval_s: float, requests: float, prompts: float, answers: float) -> Traffic:
    if not requests:
        return Traffic(interval_s, 0.0)
    return Traffic(interval_s, requests, prompts / requests, answers / requests)
