"""A finished run read back from its folder: the summary, and the requests as a table."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pandas as pd

from analysis.metrics import METRICS, in_target_time

NEEDED_COLUMNS = ("request_id", "outcome", "sent_s", "end_s", "output_digest", "route_class")


class RunError(ValueError):
    """A folder that holds no readable run; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """`requests` has one row per request, with a column for each per-request metric.

    Its times are the target's own, see `analysis.metrics`.
    """

    name: str
    summary: dict[str, Any]
    requests: pd.DataFrame


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read `requests.jsonl`; raises RunError."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(orjson.loads(line))
        except orjson.JSONDecodeError as error:
            raise RunError(f"{path}:{number}: must be one JSON object ({error})") from None
    return rows


def read_summary(path: Path) -> dict[str, Any]:
    """Read `summary.json`; raises RunError."""
    try:
        summary = orjson.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise RunError(f"{path}: must be one JSON object ({error})") from None
    if not isinstance(summary, dict):
        raise RunError(f"{path}: must be one JSON object")
    return summary


def load_run(folder: Path) -> LoadedRun:
    """Read a run from the folder that `replay --out` wrote; raises RunError."""
    summary = read_summary(folder / "summary.json")
    rows = read_rows(folder / "requests.jsonl")
    return LoadedRun(str(folder), summary, table(rows, summary.get("time_scale", 1.0)))


def table(measured: list[dict[str, Any]], time_scale: float = 1.0) -> pd.DataFrame:
    """Make the table of requests from rows as measured; a metric without a sample is NaN."""
    rows = in_target_time(measured, time_scale)
    frame = pd.DataFrame(rows)
    for column in NEEDED_COLUMNS:
        if column not in frame:
            frame[column] = None
    for tag, metric in METRICS.items():
        samples = (metric.samples(row) for row in rows)
        frame[tag] = [value[0] if len(value) == 1 else float("nan") for value in samples]
    return frame
