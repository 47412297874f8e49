"""The environments that a run needs: Dynamo for the engines, and each rival that comes from PyPI.

They are made where they are missing or of other versions. pip's own configuration says where
packages come from; what cannot be had ends the command.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

DYNAMO = "dynamo"
REQUIREMENTS = Path(__file__).parent / "requirements-dynamo.txt"
"""All that the engines need, with versions. pip does not follow dependencies from there: those of
ai-dynamo itself name GPU libraries that a simulated engine does not use."""
SAID_LINES = 12


class RoutingError(Exception):
    """The comparison cannot be run, or cannot go on; the text is for the user."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment by name, and pip's arguments that fill it."""

    name: str
    arguments: tuple[str, ...]
    fingerprint: str
    """Another one means that the environment is made anew."""


def dynamo() -> Environment:
    """The environment of the engines."""
    return Environment(DYNAMO, ("--no-deps", "-r", str(REQUIREMENTS)), REQUIREMENTS.read_text())


def of_package(requirement: str) -> Environment:
    """The environment of one package of PyPI with its dependencies."""
    return Environment(requirement.partition("==")[0], (requirement,), requirement)


def make(wanted: Iterable[Environment], venvs: Path, say: Callable[[str], None]) -> None:
    """Make what is not there yet; raises RoutingError if one cannot be made."""
    for environment in wanted:
        folder = venvs / environment.name
        stamp = folder / ".installed"
        if stamp.is_file() and stamp.read_text() == environment.fingerprint:
            continue
        say(f"installing {environment.name} into {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet"]
        _run([*pip, "--disable-pip-version-check", "install", *environment.arguments])
        stamp.write_text(environment.fingerprint)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise _failed(command, str(error.strerror)) from None
    if done.returncode:
        raise _failed(command, done.stdout + done.stderr)


def _failed(command: list[str], output: str) -> RoutingError:
    said = "\n".join(output.strip().splitlines()[-SAID_LINES:])
    return RoutingError(f"cannot install; this failed: {' '.join(command)}\n{said}")
