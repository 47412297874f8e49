"""What the builtin plugins have learned, as JSON has it, for the process after this one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from planner.core.builtin import Builtin
from planner.core.observe import MOST_ACCEPTED
from planner.core.perf.regression import MOST_TOKENS, Line
from planner.core.propose.reserve import MOST_REPLICAS
from planner.core.state import Floor, LastValue
from planner.core.types import Traffic

LASTS = {
    "hit_ratio": (0.0, 1.0),
    "accept_length": (1.0, 1.0 + MOST_ACCEPTED),
    "isl_tokens": (0.0, MOST_TOKENS),
    "osl_tokens": (0.0, MOST_TOKENS),
}
"""The figures of which the last value is kept, and what each can be."""


def remembered(builtin: Builtin) -> dict[str, Any]:
    """Floors, last values, observations of the models, windows of traffic, errors of forecasts.

    The clock is not that of the next process, so the age of the newest begins anew.
    """
    state = builtin.state
    return {
        "floors": {name: floor.replicas for name, floor in state.floors.items()},
        "lasts": {name: getattr(state, name).value for name in LASTS},
        "models": {
            name: [[*one.inputs, one.seconds, one.source] for one in model.observations.rows()]
            for name, model in state.models.items()
        },
        "windows": [asdict(window) for window in builtin.predict.windows],
        "errors": builtin.reserve.errors(),
    }


def recall(builtin: Builtin, memory: Mapping[str, Any], now_s: float) -> None:
    """Take over what was remembered. Raises ValueError where it has another form."""
    try:
        state, least = builtin.state, builtin.rules.min_observations
        windows = [_window(**window) for window in memory["windows"]]
        floors = {name: Floor(int(count), 0) for name, count in memory["floors"].items()}
        lasts = {name: _last(name, memory["lasts"][name], now_s) for name in LASTS}
        models = {
            name: _taught(state.fresh(least), rows) for name, rows in memory["models"].items()
        }
        errors = {
            name: [_error(age_s, error) for age_s, error in rows]
            for name, rows in memory.get("errors", {}).items()
        }
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"what was learned has another form: {error}") from error
    state.floors, state.models = floors, models
    for name, value in lasts.items():
        setattr(state, name, value)
    builtin.predict.recall(windows)
    builtin.reserve.recall(errors)


def _window(**told: float | None) -> Traffic:
    figures = {name: value if value is None else float(value) for name, value in told.items()}
    if any(not 0.0 <= value < math.inf for value in figures.values() if value is not None):
        raise ValueError("a window of traffic has impossible figures")
    return Traffic(**figures)  # type: ignore[arg-type]  # None where Traffic has it


def _error(age_s: float, error: float) -> tuple[float, float]:
    """Raises ValueError for one that no forecast can have missed by."""
    if not (0.0 <= float(age_s) < math.inf and abs(float(error)) <= MOST_REPLICAS):
        raise ValueError("an error of a forecast is impossible")
    return float(age_s), float(error)


def _last(name: str, value: float | None, now_s: float) -> LastValue:
    """Raises ValueError for a value that the figure cannot have."""
    least, most = LASTS[name]
    if value is not None and not least <= float(value) <= most:
        raise ValueError(f"{name}: {least:g} to {most:g}")
    return LastValue(None if value is None else float(value), now_s)


def _taught(line: Line, rows: list[list[Any]]) -> Line:
    """Rows of a version before name nobody who has told them."""
    for prefill, decode, seconds, *source in rows:
        told_by = str(source[0]) if source else ""
        line.observe((float(prefill), float(decode)), float(seconds), told_by)
    return line
