"""What the builtin plugins have learned, as JSON has it, for the process after this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from planner.core.builtin import Builtin
from planner.core.perf.regression import Line
from planner.core.state import Floor, LastValue
from planner.core.types import Traffic

LASTS = ("hit_ratio", "accept_length", "isl_tokens", "osl_tokens")


def remembered(builtin: Builtin) -> dict[str, Any]:
    """Floors, last values, observations of the models, windows of traffic, errors of forecasts.

    The clock is not that of the next process, so the age of the newest begins anew.
    """
    state = builtin.state
    return {
        "floors": {name: floor.replicas for name, floor in state.floors.items()},
        "lasts": {name: getattr(state, name).value for name in LASTS},
        "models": {
            name: [[*inputs, seconds] for inputs, seconds in model.observations.rows()]
            for name, model in state.models.items()
        },
        "windows": [asdict(window) for window in builtin.predict.windows],
        "errors": builtin.reserve.errors(),
    }


def recall(builtin: Builtin, memory: Mapping[str, Any], now_s: float) -> None:
    """Take over what was remembered. Raises ValueError where it has another form."""
    try:
        state, least = builtin.state, builtin.rules.min_observations
        windows = [Traffic(**window) for window in memory["windows"]]
        floors = {name: Floor(int(count), 0) for name, count in memory["floors"].items()}
        lasts = {name: _last(memory["lasts"][name], now_s) for name in LASTS}
        models = {
            name: _taught(state.fresh(least), rows) for name, rows in memory["models"].items()
        }
        errors = {
            name: [(float(age_s), float(error)) for age_s, error in rows]
            for name, rows in memory.get("errors", {}).items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"what was learned has another form: {error}") from error
    state.floors, state.models = floors, models
    for name, value in lasts.items():
        setattr(state, name, value)
    builtin.predict.recall(windows)
    builtin.reserve.recall(errors)


def _last(value: float | None, now_s: float) -> LastValue:
    return LastValue(None if value is None else float(value), now_s)


def _taught(line: Line, rows: list[list[float]]) -> Line:
    for prefill, decode, seconds in rows:
        line.observe((float(prefill), float(decode)), float(seconds))
    return line
