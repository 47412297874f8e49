"""Common parts of command lines: --version, errors in one line, types of numbers, JSON files."""

import argparse
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import orjson

from proxy import __version__

DIGITS = 12
"""Most digits of an integer on a command line."""
REPORTS_NEED = ("jinja2", "numpy", "pandas", "plotly", "rich", "scipy")
"""The packages of the extra `replay`, which an installation of the proxy alone does not have."""


class InputError(ValueError):
    """A user's input cannot be used; the text is one line for them."""


def missing_for_reports() -> str:
    """The packages to install for `replay` and `analyze`, in one line; empty if none."""
    missing = [name for name in REPORTS_NEED if find_spec(name) is None]
    if not missing:
        return ""
    command = "pip install -c constraints.txt '.[replay]'"
    return f"not installed: {', '.join(missing)}; run {command} in the project's folder"


class _Version(argparse.Action):
    """Prints the project's version, which is that of the proxy."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        sys.stdout.write(f"{parser.prog} {__version__}\n")
        parser.exit()


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser with --version, whose errors are one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_argument(
            "--version",
            action=_Version,
            nargs=0,
            default=argparse.SUPPRESS,
            help="print the version and exit",
        )

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str) -> float:
    """Read a number > 0."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be a number > 0, not {text!r}")
    return value


def not_negative(text: str) -> float:
    """Read a number >= 0."""
    value = number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be a number >= 0, not {text!r}")
    return value


def count(text: str) -> int:
    """Read an integer >= 0, of at most DIGITS digits."""
    return _integer(text, 0)


def positive_count(text: str) -> int:
    """Read an integer >= 1, of at most DIGITS digits."""
    return _integer(text, 1)


def _integer(text: str, least: int) -> int:
    if not text.isdecimal() or len(text) > DIGITS or int(text) < least:
        raise argparse.ArgumentTypeError(
            f"must be an integer >= {least} of at most {DIGITS} digits, not {text[:40]!r}"
        )
    return int(text)


def number(text: str) -> float:
    """Read a finite number."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise argparse.ArgumentTypeError(f"must be a finite number, not {text!r}")
    return value


def write_json(path: Path, document: Any) -> None:
    """Write an indented JSON file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole, or leave it as it is; raises OSError."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_bytes(content)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise


def names(text: str) -> tuple[str, ...]:
    """Read names joined by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
