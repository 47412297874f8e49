"""A load's trace file: plain requests, and turns of sessions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.planner.trace_file import trace_format, write
from replayer.loads.load import Load, Request, Turn
from tests.analysis.plan.runs_for_tests import load


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_request_is_a_line_with_its_time_in_milliseconds(tmp_path: Path) -> None:
    made = load(0.25, 1.5)
    write(made, tmp_path / "deep" / "trace")
    first, second = lines(tmp_path / "deep" / "trace")
    assert first == {
        "timestamp": 250.0,
        "input_length": 1000,
        "output_length": 100,
        "hash_ids": [0, 1],
    }
    assert second["timestamp"] == 1500.0
    assert trace_format(made) == "mooncake"


def test_a_turn_waits_for_others(tmp_path: Path) -> None:
    turn = Turn("a1", "a", "a", (("a0", 2.5),))
    made = Load(name="x", seed=3, requests=[Request(7.0, 10, 2, [4], turn)], end_s=9.0)
    write(made, tmp_path / "trace")
    head, row = lines(tmp_path / "trace")
    assert trace_format(made) == head["schema"].removeprefix("dynamo.") == "agentic_mooncake"
    assert (row["request_id"], row["not_before_ms"], row["hash_ids"]) == ("a1", 7000.0, [4])
    (waits,) = row["dependencies"]
    assert (waits["request_id"], waits["delay_ms"]) == ("a0", 2500.0)
