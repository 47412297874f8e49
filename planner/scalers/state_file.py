"""The planner's state file: what a successor goes on with, after an end of any kind."""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from planner.scalers.base import Decision
from proxy.config.regular_files import read_regular

FORM = 1


class StateError(Exception):
    """The state file cannot be used; the text is one line."""


@dataclass(slots=True)
class Kept:
    """What is kept: the last decision, and what was learned and noted.

    `learned`: of the builtin plugins; `notes`: of the scaler; `floors`: set by an operator.
    `advisory`: the decision was not carried out.
    """

    decision: Decision | None = None
    learned: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    floors: dict[str, int] = field(default_factory=dict)
    advisory: bool = False


@dataclass(slots=True)
class _Stored:
    form: int
    kept: Kept


class StateFile:
    """One file of one planner. It is locked from here to the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateError(f"state_file {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise StateError(f"state_file {path}: {error.strerror}") from error
            raise StateError(f"state_file {path}: another planner holds it") from error

    def load(self) -> tuple[Kept, str]:
        """What the process before has kept, and why not, where it begins anew."""
        try:
            found = msgspec.json.decode(read_regular(self._path), type=_Stored)
        except FileNotFoundError:
            return Kept(), ""
        except OSError as error:
            raise StateError(f"state_file {self._path}: {error.strerror}") from error
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            return Kept(), f"state_file {self._path}: torn or of another form: {error}"
        if found.form != FORM:
            return Kept(), f"state_file {self._path}: of form {found.form}, not {FORM}"
        return found.kept, ""

    def save(self, kept: Kept) -> None:
        """Write it whole and durably, or leave it as it was. Raises StateError."""
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            with new.open("wb") as file:
                file.write(msgspec.json.encode(_Stored(FORM, kept)))
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            raise StateError(f"state_file {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Let another planner have it."""
        os.close(self._lock)
