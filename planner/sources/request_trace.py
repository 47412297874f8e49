"""Request traces of NVIDIA Dynamo (`dynamo.request.trace.v1`): when requests came, their lengths.

A file has a record per event, each as it is or as `event` of an envelope. Records of requests are
written when those end, so they are not in the order of arrival. All files have one clock, Unix
milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from replayer.trace.loaders import MOST_ROWS
from replayer.trace.rows import Row, TraceError, rows

SCHEMA = "dynamo.request.trace.v1"
Arrival = tuple[float, int | None, int | None]
"""Seconds, tokens of the prompt, tokens of the answer; None where they are not told."""


def is_request_trace(path: Path) -> bool:
    """Whether the first row is such a record; of what cannot be read other readers say why."""
    try:
        first = next(rows(path), None)
    except TraceError:
        return False
    return first is not None and _record(first).fields.get("schema") == SCHEMA


def arrivals(paths: Sequence[Path]) -> list[Arrival]:
    """The requests of all files, from the first arrival on. Raises TraceError."""
    found: list[Arrival] = []
    for path in paths:
        for arrival in _arrivals(path):
            found.append(arrival)
            if len(found) > MOST_ROWS:
                raise TraceError(f"{path}: more than {MOST_ROWS} requests: name fewer files")
    first_s = min((at_s for at_s, *_ in found), default=0.0)
    return [(at_s - first_s, prompt, answer) for at_s, prompt, answer in found]


def _arrivals(path: Path) -> Iterator[Arrival]:
    for row in rows(path):
        record = _record(row)
        if record.fields.get("schema") != SCHEMA:
            raise record.fail("schema", SCHEMA)
        if record.fields.get("event_type") == "request_end":
            yield _arrival(record)


def _record(row: Row) -> Row:
    """The record of a row, out of its envelope."""
    event = row.fields.get("event")
    return replace(row, fields=event) if isinstance(event, dict) else row


def _arrival(record: Row) -> Arrival:
    request = _inner(record, "request")
    came_ms = request.number("request_received_ms")
    if came_ms is None:
        ended_ms = record.number("event_time_unix_ms")
        if ended_ms is None:
            raise request.fail("request_received_ms", "a number >= 0 (milliseconds)")
        came_ms = max(0.0, ended_ms - (request.number("total_time_ms") or 0.0))
    prompt = request.integer("input_tokens", at_least=0)
    if prompt is None and request.name_of("replay"):
        prompt = _inner(request, "replay").integer("input_length", at_least=0)
    return came_ms / 1e3, prompt, request.integer("output_tokens", at_least=0)


def _inner(row: Row, name: str) -> Row:
    fields: Mapping[str, Any] | None = row.fields.get(name)
    if not isinstance(fields, dict):
        raise row.fail(name, "an object")
    return replace(row, fields=fields)
