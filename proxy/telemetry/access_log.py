"""The access log: one short line per request of a client, as text or JSON, on stdout or in a file.

The request log has every field of a request; this one is for eyes, and for what collects stdout.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import orjson

from proxy.core.placement.alternatives import PastChecks
from proxy.protocol.headers import why_placed
from proxy.telemetry.log import printable, printable_json
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.request_log import RecordLog

_ERROR_CHARS = 200
_PLAIN = re.compile(r"[^\s\"=]+")
"""A value that needs no quotes."""


def fields(record: RequestRecord) -> dict[str, object]:
    """A line's fields in their order; None is unknown."""
    prompt = record.isl_tokens if record.prompt_tokens is None else record.prompt_tokens
    return {
        "time": _time(record.t_done),
        "tenant": record.tenant,
        "model": record.model,
        "path": record.endpoint,
        "instance": record.decode_instance,
        "route": record.route_class,
        "reason": _reason(record),
        "status": record.status,
        "outcome": record.outcome,
        "prompt_tokens": prompt,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.osl_tokens,
        "ttft_s": _seconds(record.ttft_s()),
        "duration_s": _seconds(record.e2e_s()),
        "retries": record.retries,
        "id": record.request_id,
        "error": record.error[:_ERROR_CHARS] if record.error else None,
    }


def as_json(record: RequestRecord) -> bytes:
    """The fields as one JSON object; raises TypeError for a value that JSON does not have."""
    return printable_json(orjson.dumps(fields(record)))


def as_text(record: RequestRecord) -> bytes:
    """The time, then `name=value` for each known field; a value with blanks is a JSON string."""
    time, *rest = fields(record).items()
    words = [f"{name}={_word(value)}" for name, value in rest if value is not None]
    return " ".join([str(time[1] or "-"), *words]).encode(errors="backslashreplace")


class AccessLog(RecordLog):
    """Records as short lines; without a path every call is a no-op."""

    def __init__(self, path: Path | None, on_drop: Callable[[], None], *, is_json: bool) -> None:
        """Raises OSError when the file cannot be opened."""
        super().__init__("access log", path, as_json if is_json else as_text, on_drop)


def _reason(record: RequestRecord) -> str | None:
    """Reason of the placement or refusal, as in `X-Cache-Proxy-Reason`."""
    if isinstance(record.candidates, PastChecks):
        return record.candidates.why
    if record.place is None or record.offload_decision_reason is None:
        return record.error if record.outcome == "rejected" else None
    tokens = record.hit_tokens or 0, record.isl_tokens or 0
    return why_placed(record.place, *tokens, record.offload_decision_reason)


def _time(unix_s: float | None) -> str | None:
    if unix_s is None:
        return None
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z"


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _word(value: object) -> str:
    text = printable(str(value))
    if _PLAIN.fullmatch(text):
        return text
    return orjson.dumps(text).decode()
