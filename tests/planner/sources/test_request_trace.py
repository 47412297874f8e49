"""Request traces of Dynamo are traffic by the arrival of requests, over all files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.types import Traffic
from planner.sources.request_trace import SCHEMA, arrivals, is_request_trace
from planner.sources.trace import windows
from replayer.trace.rows import TraceError

CAME_MS = 1_790_000_000_000


def ended(after_ms: int, prompt: int | None, answer: int | None, **more: Any) -> dict[str, Any]:
    request = {"request_id": "r", "request_received_ms": CAME_MS + after_ms}
    request |= {"input_tokens": prompt, "output_tokens": answer} | more
    record = {"schema": SCHEMA, "event_type": "request_end"}
    return record | {"event_time_unix_ms": CAME_MS + after_ms + 900, "request": request}


def written(path: Path, records: list[Any]) -> Path:
    text = "".join(f"{json.dumps(record)}\n" for record in records).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_records_in_the_order_of_their_ends_are_intervals_of_arrivals(tmp_path: Path) -> None:
    tool = {"schema": SCHEMA, "event_type": "tool_end", "event_time_unix_ms": 1, "tool": {}}
    one = written(tmp_path / "t.000001.jsonl", [ended(25_000, 300, 30), tool, ended(0, 100, 10)])
    envelope = {"timestamp": 1, "event": ended(9_000, 200, None)}
    two = written(tmp_path / "t.000002.jsonl.gz", [envelope])
    assert list(windows([one, two], 10.0)) == [
        Traffic(10.0, 2, 150.0, 10.0),
        Traffic(10.0, 0),
        Traffic(10.0, 1, 300.0, 30.0),
    ]


def test_an_arrival_and_a_length_may_be_told_in_other_places(tmp_path: Path) -> None:
    late = ended(
        0, None, 5, request_received_ms=None, total_time_ms=400, replay={"input_length": 7}
    )
    found = arrivals([written(tmp_path / "a.jsonl", [ended(0, 1, 1), late])])
    assert found == [(0.0, 1, 1), (pytest.approx(0.5), 7, 5)]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"schema": "other"}, f"a.jsonl:2: schema: must be {SCHEMA}, not"),
        (
            {"schema": SCHEMA, "event_type": "request_end"},
            "request: must be an object, not missing",
        ),
        (ended(0, -1, 1), "input_tokens: must be an integer >= 0"),
        (ended(0, 1, 1, request_received_ms="x"), "request_received_ms: must be a number >= 0"),
        (ended(0, None, 1, replay=3), "replay: must be an object"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, record: Any, said: str) -> None:
    path = written(tmp_path / "a.jsonl", [ended(0, 1, 1), record])
    with pytest.raises(TraceError, match=said):
        list(windows([path], 10.0))


def test_other_files_are_none(tmp_path: Path) -> None:
    assert not is_request_trace(written(tmp_path / "a.jsonl", [{"timestamp": 0}]))
    assert not is_request_trace(written(tmp_path / "b.jsonl", []))
    assert not is_request_trace(tmp_path / "c.jsonl")


VALUES = (
    st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.just({"input_length": 1})
)


@given(
    st.dictionaries(
        st.sampled_from(["request_received_ms", "input_tokens", "output_tokens", "replay"]), VALUES
    ),
    st.dictionaries(st.sampled_from(["event_type", "event_time_unix_ms", "event"]), VALUES),
)
def test_any_record_is_an_arrival_or_refused(
    tmp_path_factory: pytest.TempPathFactory, request_has: Any, record_has: Any
) -> None:
    record = ended(0, 1, 1, **request_has) | record_has
    path = written(tmp_path_factory.mktemp("trace") / "a.jsonl", [ended(0, 1, 1), record])
    try:
        found = arrivals([path])
    except TraceError as error:
        assert str(error).startswith(f"{path}:2: ")  # noqa: PT017 - most records are refused
    else:
        assert min(at_s for at_s, *_ in found) == 0.0
