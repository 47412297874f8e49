"""A finished run read back: its summary, its requests as a table, joined with the proxy's log.

The join is by the request id that was sent. Only differences of the proxy's times, unix seconds,
are used, so the clocks of client and proxy never mix.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pandas as pd

from analysis.measures import METRICS, in_target_time
from replayer.arguments import InputError

NEEDED_COLUMNS = ("request_id", "outcome", "sent_s", "end_s", "output_digest", "route_class")


class RunError(InputError):
    """The folder has no readable run; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """`requests` has one row per request, with a column for each per-request metric.

    Its times are in the target's time, see `analysis.measures`.
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


CARRIED = (
    "route_class",
    "offload_decision_reason",
    "policy",
    "prefill_instance",
    "decode_instance",
    "isl_tokens",
    "hit_tokens",
    "new_tokens",
    "predicted_ttft_s",
    "predicted_transfer_s",
    "retries",
    "fallback",
)
WAIT_STEPS = 40
WAIT_STEP_S = 0.05


class Join(NamedTuple):
    """Number of sent requests missing in the log, and why the log was not read (None: it was)."""

    missing: int
    problem: str | None = None


def read_log(path: Path, wanted: set[str]) -> dict[str, dict[str, Any]]:
    """Read the records of the wanted request ids; lines that are not JSON are skipped.

    The proxy may still be writing the last line.
    """
    found: dict[str, dict[str, Any]] = {}
    with path.open("rb") as file:
        for line in file:
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            name = record.get("request_id") if isinstance(record, dict) else None
            if isinstance(name, str) and name in wanted:
                found[record["request_id"]] = record
    return found


def join_proxy_log(
    rows: Iterable[dict[str, Any]], path: Path, sleep: Callable[[float], None]
) -> Join:
    """Add the proxy's record to each row.

    The proxy writes its log after the answers: waits up to two seconds for missing records.
    """
    sent = {row["sent_as"]: row for row in rows if row.get("sent_as")}
    records, problem = _try_log(path, set(sent))
    for _step in range(WAIT_STEPS):
        if len(records) == len(sent):
            break
        sleep(WAIT_STEP_S)
        records, problem = _try_log(path, set(sent))
    for sent_as, record in records.items():
        sent[sent_as] |= {name: record[name] for name in CARRIED if record.get(name) is not None}
        sent[sent_as]["proxy_ttft_s"] = _difference(record, "t_proxy_recv", "t_first_token")
        sent[sent_as]["prefill_leg_s"] = _difference(record, "t_prefill_sent", "t_prefill_done")
    return Join(len(sent) - len(records), problem)


def _try_log(path: Path, wanted: set[str]) -> tuple[dict[str, dict[str, Any]], str | None]:
    try:
        return read_log(path, wanted), None
    except OSError as error:
        return {}, f"the proxy's log {path} cannot be read: {error.strerror}"


def _difference(record: dict[str, Any], start: str, end: str) -> float | None:
    started, ended = record.get(start), record.get(end)
    return None if started is None or ended is None else ended - started
