"""The command `report`: the page of a planner that is over, from its audit log."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
from rich.console import Console

from planner.telemetry.recorder import Recorder
from planner.telemetry.report import report_html
from replayer.arguments import InputError, replace_file
from replayer.terminal import printable

MOST_LINE = 4 << 20
"""Bytes of a line; one of a thousand instances has half a million."""


class _Engine(msgspec.Struct):
    name: str


class _Seen(msgspec.Struct):
    engines: dict[str, list[_Engine]]


class _Line(msgspec.Struct):
    """What the page cannot do without; figures that a line lacks are gaps."""

    at: Annotated[float, msgspec.Meta(ge=0, le=2.5e11)]
    targets: dict[str, int]
    seen: _Seen | None = None


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", type=Path, metavar="FILE", help="what --audit-log has written")
    parser.add_argument("--out", type=Path, default=Path("planner.html"), metavar="FILE",
        help="page to write (default: %(default)s)")  # fmt: skip


def run(given: argparse.Namespace, console: Console) -> int:
    """Write the page. Raises InputError."""
    recorder = read_audit(given.file)
    try:
        replace_file(given.out, report_html(recorder).encode())
    except OSError as error:
        raise InputError(f"--out {given.out}: {error.strerror}") from error
    console.print(printable(f"{len(recorder)} lines of {given.file}: {given.out}"), markup=False)
    return 0


def read_audit(path: Path) -> Recorder:
    """The last lines of an audit log. Raises InputError, which names the line."""
    recorder = Recorder()
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: it is no regular file")
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_LINE + 1), b""), 1):
                recorder.add(_checked(line, f"{path}:{number}"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    if not len(recorder):
        raise InputError(f"{path}: there is no line in it")
    return recorder


def _checked(line: bytes, where: str) -> dict[str, Any]:
    if len(line) > MOST_LINE:
        raise InputError(f"{where}: a line of an audit log has at most {MOST_LINE} bytes")
    try:
        document: dict[str, Any] = orjson.loads(line)
        msgspec.convert(document, _Line)
    except (ValueError, RecursionError) as error:
        text = printable(str(error))[:120]
        raise InputError(f"{where}: not a line of an audit log: {text}") from None
    return document
