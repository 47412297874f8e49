"""`replay validate`: whether a trace can be replayed whole, and what stands in the way."""

import argparse
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from rich.console import Console

from replayer.arguments import positive_count
from replayer.replay.schedule import check_order
from replayer.survey.figures import Sessions, spread
from replayer.terminal import Working
from replayer.trace.loaders import TooMuchError, TraceRequest, Watch, read_trace
from replayer.trace.rows import TraceError

SHOWN = 5
"""Lines or problems of a kind; the others are counted."""
MOST_REFUSED = 100_000
EXIT_NOT_WHOLE = 2


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own options."""
    parser.add_argument(
        "--max-model-len",
        dest="most_tokens",
        type=positive_count,
        metavar="TOKENS",
        help="the engines' longest prompt with its output; longer ones are problems",
    )


@dataclass(slots=True)
class Lines:
    """The numbers of some lines: the first few, and how many there are."""

    first: list[int] = field(default_factory=list)
    total: int = 0

    def add(self, line: int) -> None:
        """Note a line."""
        self.total += 1
        if len(self.first) < SHOWN:
            self.first.append(line)

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.first))
        more = self.total - len(self.first)
        return f"line{'s' * (self.total > 1)} {shown}" + (f" and {more:,} more" if more else "")


@dataclass(slots=True)
class Findings(Watch):
    """What a trace's file has; it is read on after a row that cannot be replayed."""

    most_tokens: int | None = None
    format: str = ""
    refusals: list[str] = field(default_factory=list)
    refused_rows: int = 0
    changes: dict[str, Lines] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    first_s: float = float("inf")
    last_s: float = 0.0
    sessions: Sessions = field(default_factory=Sessions)
    undated: Lines = field(default_factory=Lines)
    too_long: Lines = field(default_factory=Lines)
    unmeasured: Lines = field(default_factory=Lines)
    waiting: list[TraceRequest] = field(default_factory=list)

    def detected(self, name: str, line: int, fields: Collection[str]) -> None:
        """Note the format and what told it."""
        self.format = f"{name}, as line {line} has {', '.join(fields)}"

    def refused(self, error: TraceError) -> None:
        """Note a problem; the next row is read, unless there are far too many."""
        self.refused_rows += 1
        if self.refused_rows > MOST_REFUSED:
            raise TooMuchError(f"more than {MOST_REFUSED:,} problems: no more is read")
        if len(self.refusals) < SHOWN:
            self.refusals.append(str(error))

    def changed(self, line: int, what: str) -> None:
        """Note a row that is not replayed as it is written."""
        self.changes.setdefault(what, Lines()).add(line)

    def add(self, request: TraceRequest) -> None:
        """Count a request."""
        self.sessions.add(request)
        self.outputs.append(request.output_tokens)
        if request.input_tokens is None:
            self.unmeasured.add(request.line)
        else:
            self.inputs.append(request.input_tokens)
            if self.most_tokens and request.input_tokens + request.output_tokens > self.most_tokens:
                self.too_long.add(request.line)
        if request.arrival_s is not None:
            self.first_s = min(self.first_s, request.arrival_s)
            self.last_s = max(self.last_s, request.arrival_s)
        elif not request.wait_for:
            self.undated.add(request.line)
        if request.wait_for:
            self.waiting.append(replace(request, runs=(), messages=None, prompt=None, extra={}))

    def problems(self) -> Iterator[str]:
        """Say why the trace cannot be replayed whole, in one line each."""
        yield from self.refusals
        if self.refused_rows > len(self.refusals):
            yield f"{self.refused_rows - len(self.refusals):,} more problems of this kind"
        if self.too_long.total:
            yield (
                f"prompt and output exceed --max-model-len {self.most_tokens:,}: {self.too_long}"
            )

    def notes(self) -> Iterator[str]:
        """Say which rows are not replayed as they are written."""
        for what, lines in self.changes.items():
            yield f"{what}: {lines}"
        if self.undated.total:
            yield f"no timestamp and nothing to wait for, due at once: {self.undated}"
        if self.unmeasured.total and self.most_tokens:
            yield f"literal prompts whose tokens nobody has counted: {self.unmeasured}"


def run(options: argparse.Namespace, console: Console) -> int:
    """Read the trace and print what was found; 0 if it can be replayed whole."""
    found = Findings(options.most_tokens, f"{options.format}, as given by --format")
    try:
        with Working("validate") as working:
            read = read_trace(options.trace, options.format, found)
            for request in working.over(read, "requests read"):
                found.add(request)
            check_order(found.waiting)
    except TraceError as error:
        if not found.outputs and not found.refusals:
            raise
        found.refusals.append(str(error))
        found.refused_rows += 1
    problems = list(found.problems())
    for line in (*_summary(found), *(f"problem: {one}" for one in problems)):
        console.print(line, soft_wrap=True, highlight=False)
    return EXIT_NOT_WHOLE if problems else 0


def _summary(found: Findings) -> Iterator[str]:
    yield f"format: {found.format}"
    yield f"rows: {len(found.outputs):,} that can be replayed"
    if found.first_s <= found.last_s:
        yield f"time: {found.first_s:,.3f} to {found.last_s:,.3f} s"
    else:
        yield "time: no row has a timestamp"
    turns = spread(list(found.sessions.turns.values()), 50, 90)
    named = f"{len(found.sessions.turns):,}, of {_of(turns)} turns"
    yield f"sessions: {named if found.sessions.several else 'none of several turns'}"
    yield f"prompts: {_of(spread(found.inputs, 50, 90))} tokens"
    yield f"outputs: {_of(spread(found.outputs, 50, 90))} tokens"
    for note in found.notes():
        yield f"note: {note}"


def _of(figures: dict[str, float]) -> str:
    """Figures in one line."""
    return ", ".join(f"{name} {one:,}" for name, one in figures.items()) or "unknown"
