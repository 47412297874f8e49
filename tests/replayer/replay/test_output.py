"""Results as rows: in the order of sending, with what was seen and nothing invented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from replayer.replay.client import ReplayOutcome, TimedExchange
from replayer.replay.options import parse_options
from replayer.replay.output import GAPS, rows_of, write_rows
from replayer.replay.run import Result
from replayer.trace.loaders import TraceRequest


def result(name: str, sent_s: float | None, ids: tuple[int, ...] = (1,)) -> Result:
    runs = tuple((one, 1) for one in ids)
    request = TraceRequest(name, None, 0, 0.0, 4 * len(ids), 1, runs, 4, 1)
    if sent_s is None:
        return Result(request, None, None, None)
    exchange = TimedExchange(sent_s=sent_s, end_s=sent_s + 1.0, outcome=ReplayOutcome.OK)
    for at_s, text in ((0.25, "a"), (0.5, "b"), (0.9, "c")):
        event = {"choices": [{"text": text}]}
        exchange.stream.feed(b"data: " + orjson.dumps(event) + b"\n", sent_s + at_s)
    exchange.headers = {"X-Cache-Proxy-Instance": "i0"}
    return Result(request, f"{name}.run", sent_s, exchange)


def rows(tmp_path: Path, results: list[Result], *more: str) -> list[dict[str, Any]]:
    options = parse_options([str(tmp_path / "t"), "--target", "h:1", *more])
    return rows_of(results, options)


def test_rows_are_in_the_order_of_sending_and_skipped_ones_last(tmp_path: Path) -> None:
    found = rows(tmp_path, [result("skipped", None), result("b", 2.0), result("a", 1.0)])
    assert [row["request_id"] for row in found] == ["a", "b", "skipped"]
    assert found[-1]["outcome"] is ReplayOutcome.SKIPPED
    assert "sent_s" not in found[-1]


def test_a_row_has_the_times_of_its_stream_and_where_it_ran(tmp_path: Path) -> None:
    [row] = rows(tmp_path, [result("a", 1.0)])
    times = [row[name] for name in ("sent_s", "first_token_s", "last_token_s", "end_s")]
    assert times == [1.0, 1.25, 1.9, 2.0]
    assert row["max_gap_s"] == pytest.approx(0.4)
    assert (row["instance"], row["route_class"]) == ("i0", None)
    assert "output_text" not in row
    assert rows(tmp_path, [result("a", 1.0)], "--save-text")[0]["output_text"] == "abc"


def test_hits_are_counted_in_the_order_of_sending(tmp_path: Path) -> None:
    found = rows(tmp_path, [result("late", 2.0, (1, 2)), result("early", 1.0, (1, 3))])
    assert [row["ideal_hit_tokens"] for row in found] == [0, 4]


def test_samples_are_for_the_summary_and_not_in_the_file(tmp_path: Path) -> None:
    found = rows(tmp_path, [result("a", 1.0)])
    assert len(found[0][GAPS]) == 2
    write_rows(tmp_path / "requests.jsonl", found)
    [line] = (tmp_path / "requests.jsonl").read_bytes().splitlines()
    assert orjson.loads(line).keys() == found[0].keys() - {GAPS}


def test_more_hits_than_the_ideal_are_held_against_what_was_under_way(tmp_path: Path) -> None:
    early, late = result("early", 1.0, (1, 2)), result("late", 1.1, (1, 3))
    for one in (early, late):
        assert one.exchange is not None
        one.exchange.stream.cached_tokens = 4
    first, second = rows(tmp_path, [early, late])
    assert (first["ideal_hit_tokens"], first["possible_hit_tokens"]) == (0, 4)
    assert (second["ideal_hit_tokens"], "possible_hit_tokens" in second) == (4, False)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"X-Cache-Proxy-Route": "WARM", "X-Cache-Proxy-Reason": "d_idle"}, "d_idle"),
        (
            {
                "X-Cache-Proxy-Route": "HEAVY_COLO",
                "X-Cache-Proxy-Reason": "home 41k of 43k cached; below_threshold",
            },
            "below_threshold",
        ),
        ({"X-Cache-Proxy-Reason": "queue_timeout; decode_blocks 3 of 3"}, None),
        ({}, None),
    ],
)
def test_the_offload_decision_is_the_last_word_of_the_reason(
    tmp_path: Path, headers: dict[str, str], reason: str | None
) -> None:
    one = result("a", 1.0)
    assert one.exchange is not None
    one.exchange.headers = headers
    [row] = rows(tmp_path, [one])
    assert row["offload_decision_reason"] == reason
    assert row["reason"] == headers.get("X-Cache-Proxy-Reason")
