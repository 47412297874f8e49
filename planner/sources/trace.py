"""The intervals of a trace: what a planner would have seen of its traffic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from planner.core.types import Traffic
from planner.sources.request_trace import Arrival, arrivals, is_request_trace
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
    names = {one.name for one in found}
    for one in found:
        if f"{one.name}.gz" in names:
            raise InputError(
                f"{one}: it is there as {one.name}.gz, too: its load would count twice"
            )
    return sorted(found)


def _relative(path: Path) -> str:
    return str(path.relative_to(path.anchor)) if path.anchor else str(path)


def windows(paths: Sequence[Path], interval_s: float) -> Iterator[Traffic]:
    """Every interval of each trace, the empty ones as well. Raises InputError, TraceError.

    Request traces of Dynamo have one clock, so all of them are one trace. A request without an
    arrival of its own, as in a session whose turns wait for one another, is not counted: when it
    would have come depends on the answer before it.
    """
    shards = [path for path in paths if is_request_trace(path)]
    for path in paths:
        if path not in shards:
            yield from _intervals(str(path), interval_s, _arrivals(path))
    if shards:
        yield from _intervals(str(shards[0]), interval_s, arrivals(shards))


def _arrivals(path: Path) -> Iterator[Arrival]:
    for request in read_trace(path):
        if request.arrival_s is not None:
            yield request.arrival_s, request.input_tokens, request.output_tokens


def _intervals(where: str, interval_s: float, told: Iterable[Arrival]) -> Iterator[Traffic]:
    """All intervals up to the last one with an arrival, in whatever order those come."""
    found: dict[int, _Interval] = {}
    for at_s, prompt, answer in told:
        due = int(at_s / interval_s)
        if due >= MOST_INTERVALS:
            raise InputError(f"{where}: over {MOST_INTERVALS} intervals of {interval_s:g} s")
        one = found.setdefault(due, _Interval())
        one.requests += 1
        one.prompts.add(prompt)
        one.answers.add(answer)
    for at in range(max(found, default=0) + 1):
        one = found.get(at) or _Interval()
        yield Traffic(interval_s, one.requests, one.prompts.value, one.answers.value)


@dataclass(slots=True)
class _Mean:
    """The mean of what was told; None before anything was."""

    total: float = 0.0
    count: int = 0

    def add(self, value: int | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(slots=True)
class _Interval:
    """What arrived in an interval."""

    requests: float = 0.0
    prompts: _Mean = field(default_factory=_Mean)
    answers: _Mean = field(default_factory=_Mean)
