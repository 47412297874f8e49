"""The proxy's request log joined to a run's rows, by the request id that was sent.

Proxy times are unix seconds; they are carried as differences, so the two clocks never mix.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import orjson

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


def read_log(path: Path, wanted: set[str]) -> dict[str, dict[str, Any]]:
    """Read the records of the wanted request ids; a half-written last line is passed over."""
    found: dict[str, dict[str, Any]] = {}
    if not path.exists():
        return found
    with path.open("rb") as file:
        for line in file:
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(record, dict) and record.get("request_id") in wanted:
                found[record["request_id"]] = record
    return found


def join_proxy_log(
    rows: Iterable[dict[str, Any]], path: Path, sleep: Callable[[float], None]
) -> int:
    """Add what the proxy recorded to each row; returns how many sent rows it did not record.

    The proxy writes its log behind the answers, so missing records are waited for, two seconds.
    """
    sent = {row["sent_as"]: row for row in rows if row.get("sent_as")}
    records = read_log(path, set(sent))
    for _step in range(WAIT_STEPS):
        if len(records) == len(sent):
            break
        sleep(WAIT_STEP_S)
        records = read_log(path, set(sent))
    for sent_as, record in records.items():
        sent[sent_as] |= {name: record[name] for name in CARRIED if record.get(name) is not None}
        sent[sent_as]["proxy_ttft_s"] = _difference(record, "t_proxy_recv", "t_first_token")
        sent[sent_as]["prefill_leg_s"] = _difference(record, "t_prefill_sent", "t_prefill_done")
    return len(sent) - len(records)


def _difference(record: dict[str, Any], start: str, end: str) -> float | None:
    started, ended = record.get(start), record.get(end)
    return None if started is None or ended is None else ended - started
