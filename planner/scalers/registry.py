"""Every scaler, by its name in the options."""

from __future__ import annotations

from collections.abc import Callable

from planner.config.options import PlannerOptions
from planner.scalers.base import Scaler
from planner.scalers.exec import ExecScaler
from planner.scalers.file import FileScaler
from planner.scalers.noop import NoopScaler
from planner.scalers.virtual import VirtualScaler


def _file(options: PlannerOptions) -> Scaler:
    assert options.decision_file is not None, "the options have been checked"
    return FileScaler(options.decision_file)


SCALERS: dict[str, Callable[[PlannerOptions], Scaler]] = {
    "noop": lambda options: NoopScaler(),
    "file": _file,
    "exec": lambda options: ExecScaler(options.scaler_command),
    "virtual": lambda options: VirtualScaler(),
}
