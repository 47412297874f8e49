"""Decisions in a file, for whatever watches it: Ansible, a cron job, a GitOps repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
import orjson

from planner.config.components import Component
from planner.scalers.base import Applied, Decision, Failure, Fleet, Scaler, ScalerError
from proxy.config.regular_files import read_regular
from replayer.arguments import replace_file


class _Written(msgspec.Struct):
    """What of a decision a planner that begins goes by."""

    targets: dict[str, Annotated[int, msgspec.Meta(ge=0, le=10**5)]]


class FileScaler(Scaler):
    """Writes the last decision, whole, as JSON; who carries it out tells nobody."""

    name = "file"

    def __init__(self, path: Path) -> None:
        self._path = path

    async def validate(self, components: Sequence[Component]) -> None:
        """The folder is there and can be written to."""
        try:
            probe = self._path.with_name(f"{self._path.name}.probe")
            probe.touch()
            probe.unlink()
        except OSError as error:
            text = f"decision_file {self._path}: {error.strerror}"
            raise ScalerError(Failure.FAILED, text) from error

    async def observe(self) -> Mapping[str, int]:
        """What was written last; nothing where that is no decision."""
        try:
            return msgspec.json.decode(read_regular(self._path), type=_Written).targets
        except (OSError, msgspec.MsgspecError):
            return {}

    async def apply(self, decision: Decision, fleet: Fleet) -> Applied:
        """Write it."""
        try:
            replace_file(self._path, orjson.dumps(asdict(decision)) + b"\n")
        except OSError as error:
            text = f"decision_file {self._path}: {error.strerror}"
            raise ScalerError(Failure.FAILED, text) from error
        return Applied()

    async def aclose(self) -> None:
        """Nothing is open."""
