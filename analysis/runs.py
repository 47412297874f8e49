"""A finished run read back: its summary, its requests as a table, joined with the proxy's log.

The join is by the request id that was sent. Only differences of the proxy's times, unix seconds,
are used, so the clocks of client and proxy never mix. The log alone makes rows too.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pandas as pd

from analysis.bench.phases import phases_of, time_of
from analysis.bench.result_forms import FACTS, RESULTS, FormError, check, check_row
from analysis.measures import METRICS, in_target_time, is_number
from replayer.arguments import InputError

Summarise = Callable[[Mapping[str, Any], list[dict[str, Any]]], dict[str, Any]]
NUMBERS_OF_ROWS = ("_tokens", "_length", "_s", "attempts", "retries")
LISTS_OF_ROWS = ("itl_s", "retry_waits_s")
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
    rows = []
    for number, line in enumerate(_bytes(path).splitlines(), start=1):
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise RunError(f"{path}:{number}: must be one JSON object ({error})") from None
        if why := _why_no_row(row):
            raise RunError(f"{path}:{number}: must be the row of a request: {why}")
        rows.append(row)
    return rows


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None


def read_summary(path: Path) -> dict[str, Any]:
    """Read `summary.json`; raises RunError."""
    try:
        summary = orjson.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise RunError(f"{path}: must be one JSON object ({error})") from None
    try:
        check(summary, FACTS)
        if not is_cut(summary):
            check(summary, RESULTS)
    except FormError as error:
        raise RunError(f"{path}: {error}") from None
    return dict(summary)


def whole_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Read the rows of a run that was cut, and count the lines that are not complete rows."""
    lines = _bytes(path).splitlines()
    rows = [row for row in map(_row, lines) if row is not None]
    return sorted(rows, key=lambda row: row.get("sent_s") or 0.0), len(lines) - len(rows)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return None if _why_no_row(row) else row


def _why_no_row(row: Any) -> str | None:
    """Why a line is not a request's row, with numbers as numbers; None if it is one."""
    try:
        check_row(row)
    except FormError as error:
        return str(error)
    return next(
        (
            f"{name}: must be a number"
            for name, value in row.items()
            if name.endswith(NUMBERS_OF_ROWS)
            and not all(one is None or is_number(one) for one in _numbers_of(name, value))
        ),
        None,
    )


def _numbers_of(name: str, value: Any) -> Iterable[Any]:
    """Return the members of the fields that have several numbers, else the value itself."""
    if name == "phases_s" and isinstance(value, dict):
        return value.values()
    return value if name in LISTS_OF_ROWS and isinstance(value, list) else (value,)


def is_cut(summary: Mapping[str, Any]) -> bool:
    """Whether a summary is that of a run which did not come to its end: it has only its facts."""
    return not isinstance(summary.get("requests"), dict)


def load_run(folder: Path, summarise: Summarise) -> LoadedRun:
    """Read a run from the folder that `replay --out` wrote; raises RunError.

    `summarise` makes the summary of one that was killed, of the rows that it has left.
    """
    summary, rows = read_run(folder, summarise)
    return LoadedRun(str(folder), summary, table(rows, summary.get("time_scale", 1.0)))


def read_run(folder: Path, summarise: Summarise) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read a run's summary and its rows; raises RunError."""
    summary, path = read_summary(folder / "summary.json"), folder / "requests.jsonl"
    if not is_cut(summary):
        return summary, read_rows(path)
    rows, skipped = whole_rows(path)
    return summarise(summary | {"rows_skipped": skipped}, rows), rows


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
    "predicted_prefill_s",
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
    """Read the last record of each wanted request id; lines that are no record are skipped.

    The proxy may still be writing the last line.
    """
    return {name: record for name, record in log_records(path) if record and name in wanted}


def log_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line's request id and record; both empty where it is no record of a request."""
    with path.open("rb") as file:
        for line in file:
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                record = None
            name = record.get("request_id") if isinstance(record, dict) else None
            yield (name, record) if isinstance(name, str) and name else ("", {})


def rows_of_log(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Make rows, as in `requests.jsonl`, of the proxy's log alone; raises RunError.

    Times count from the first receipt. Returns also the number of lines that are not complete
    records.
    """
    try:
        found = [_row_of_log(record) for _name, record in log_records(path)]
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    rows = sorted((row for row in found if row is not None), key=lambda row: row["sent_s"])
    if not rows:
        raise RunError(f"{path}: has no record of the proxy's request log")
    origin_s = rows[0]["sent_s"]
    for row in rows:
        row |= {name: row[name] - origin_s for name in MOMENTS if row[name] is not None}
    return rows, len(found) - len(rows)


MOMENTS = ("sent_s", "first_token_s", "end_s")
OF_LOG = ("request_id", "session_id", "turn", "status", "error", "prompt_tokens", "cached_tokens")
NUMBERS = frozenset(("turn", "status", "retries"))  # and all fields in tokens or seconds


def _is_whole(record: dict[str, Any]) -> bool:
    """Whether a record has an end, and values of the types that the proxy writes."""
    fields = (*OF_LOG, *CARRIED, "osl_tokens", "outcome")
    known = {name: record[name] for name in fields if record.get(name) is not None}
    numbers = {name for name in known if name in NUMBERS or name.endswith(("_tokens", "_s"))}
    return "outcome" in known and all(
        is_number(value) if name in numbers else isinstance(value, str)
        for name, value in known.items()
    )


def _row_of_log(record: dict[str, Any]) -> dict[str, Any] | None:
    """Make the row of a whole record, its moments in unix seconds; `sent_s`: when it came."""
    if not _is_whole(record) or (carried := _carried(record))["phases_s"] is None:
        return None
    row = {name: record.get(name) for name in OF_LOG} | carried
    return row | {
        "outcome": record["outcome"],
        "sent_s": record["t_proxy_recv"],
        "first_token_s": time_of(record, "t_first_token"),
        "end_s": record["t_done"],
        "completion_tokens": record.get("osl_tokens"),
    }


def _carried(record: dict[str, Any]) -> dict[str, Any]:
    """Return what a row has of the proxy's record: the known CARRIED, and durations."""
    return {name: record[name] for name in CARRIED if record.get(name) is not None} | {
        "proxy_ttft_s": _difference(record, "t_proxy_recv", "t_first_token"),
        "prefill_leg_s": _difference(record, "t_prefill_sent", "t_prefill_done"),
        "phases_s": phases_of(record),
    }


def join_proxy_log(
    rows: Iterable[dict[str, Any]], path: Path, sleep: Callable[[float], None]
) -> Join:
    """Add the proxy's record to each row.

    The proxy writes its log after the answers: waits up to two seconds for missing records. A
    request that was sent again has a record for each attempt; the last one counts.
    """
    sent = {row["sent_as"]: row for row in rows if row.get("sent_as")}
    attempts = {name: row.get("attempts", 1) for name, row in sent.items()}
    records, whole, problem = _try_log(path, attempts)
    for _step in range(WAIT_STEPS):
        if whole:
            break
        sleep(WAIT_STEP_S)
        records, whole, problem = _try_log(path, attempts)
    for sent_as, record in records.items():
        sent[sent_as] |= _carried(record)
    return Join(len(sent) - len(records), problem)


def _try_log(
    path: Path, attempts: Mapping[str, int]
) -> tuple[dict[str, dict[str, Any]], bool, str | None]:
    """Return each request's last record, and whether there is one for every attempt."""
    seen: Counter[str] = Counter()
    last: dict[str, dict[str, Any]] = {}
    try:
        for name, record in log_records(path):
            if name in attempts:
                seen[name] += 1
                last[name] = record
    except OSError as error:
        return {}, False, f"the proxy's log {path} cannot be read: {error.strerror}"
    return last, all(seen[name] >= number for name, number in attempts.items()), None


def _difference(record: dict[str, Any], start: str, end: str) -> float | None:
    started, ended = time_of(record, start), time_of(record, end)
    return None if started is None or ended is None else ended - started
