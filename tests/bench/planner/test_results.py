"""Dynamo's report, and result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.plan.measured import Drain
from bench.planner.results import Result, fleet_of, record_of
from tests.analysis.plan.runs_for_tests import RUN, run
from tests.bench.planner.runs_for_tests import written


def row(**rest: Any) -> dict[str, Any]:
    plain = {"terminal_status": "completed", "arrival_time_ms": 1500.0, "ttft_ms": 250.0}
    plain |= {"itl_ms": None, "last_token_ms": 1750.0, "input_length": 9, "output_length": 1}
    return plain | {"reused_input_tokens": 4, "decode_worker_idx": 2} | rest


def test_a_record_is_in_seconds_and_what_failed_has_no_first_token() -> None:
    made = record_of(row())
    assert (made.arrival_s, made.ttft_s, made.itl_s, made.engine) == (1.5, 0.25, None, 2)
    assert record_of(row(terminal_status="aborted")).ttft_s is None


def test_the_fleet_is_read_from_the_report() -> None:
    steps = [("worker_starting", 3), ("worker_starting", 4), ("worker_draining", 1)]
    operations = [
        {
            "at_ms": 2000.0,
            "transitions": [{"transition": name, "worker_id": one} for name, one in steps],
        },
        {"at_ms": 9000.0, "transitions": []},
    ]
    fleet = fleet_of({"decode_worker_seconds": 90.0, "duration_ms": 30_000.0}, operations, 2)
    assert (fleet.gpu_s, fleet.duration_s, fleet.started, fleet.changes) == (90.0, 30.0, 2, 2)
    assert fleet.drains == [Drain(2.0, frozenset({1}))]


def test_results_are_read_again_and_taken_together(tmp_path: Path) -> None:
    Result([RUN], {"dynamo-latency": "no aisimulate", "agentic": "no file"}).save(tmp_path / "a")
    Result([run("dynamo-latency", 1.0, 0.5)], {}).save(tmp_path / "b")
    both = Result.load([tmp_path / "a", tmp_path / "b"])
    assert both.runs == [RUN, run("dynamo-latency", 1.0, 0.5)]
    assert both.left_out == {"agentic": "no file"}
    other = written(tmp_path / "c", json.dumps({"runs": [{"load": "x"}]}))
    with pytest.raises(ValueError, match="c: not a result"):
        Result.load([other])
