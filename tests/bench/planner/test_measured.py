"""Figures of a run, from the records of its requests and the report on its fleet."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.planner.measured import Drain, Fleet, Name, Record, Result, measured, out_of_slo
from tests.bench.planner.runs_for_tests import RUN, load, record, run, written

FLEET = Fleet(gpu_s=7200.0, duration_s=3600.0, started=2, drains=(), changes=3)


def row(**rest: Any) -> dict[str, Any]:
    plain = {"terminal_status": "completed", "arrival_time_ms": 1500.0, "ttft_ms": 250.0}
    plain |= {"itl_ms": None, "last_token_ms": 1750.0, "input_length": 9, "output_length": 1}
    return plain | {"reused_input_tokens": 4, "decode_worker_idx": 2} | rest


def test_a_record_is_in_seconds_and_what_failed_has_no_first_token() -> None:
    made = Record.of(row())
    assert (made.arrival_s, made.ttft_s, made.itl_s, made.engine) == (1.5, 0.25, None, 2)
    assert Record.of(row(terminal_status="aborted")).ttft_s is None


def test_both_limits_are_kept_or_the_slo_is_not() -> None:
    made = load(0.0)
    assert record(0.0).keeps_slo(made)
    assert not record(0.0, ttft_s=2.1).keeps_slo(made)
    assert not replace(record(0.0), itl_s=0.051).keeps_slo(made)
    assert replace(record(0.0), itl_s=None).keeps_slo(made)
    unfinished = record(0.0, ttft_s=None)
    assert not unfinished.keeps_itl(made)


def test_requests_without_a_record_count_as_missed() -> None:
    made = load(0.0, 1.0, 2.0, 3.0)
    found = measured(Name("p", {"b": 1, "a": 2}, 30.0), made, [record(0.0), record(1.0)], FLEET)
    assert (found.requests, found.attainment_ratio) == (4, 0.5)
    assert (found.gpu_h, found.replicas, found.good_per_gpu_h) == (2.0, 2.0, 1.0)
    assert found.settings == '{"a": 2, "b": 1}'


def test_a_bin_is_out_of_the_slo_below_nine_of_ten() -> None:
    nine_of_ten = [record(at, ttft_s=9.0 if at == 3 else 0.1) for at in range(10)]
    eight_of_ten = [record(20.0 + at, ttft_s=9.0 if at in (3, 4) else 0.1) for at in range(10)]
    made = load(0.0, rises_s=(5.0, 25.0))
    assert out_of_slo(made, nine_of_ten + eight_of_ten) == [20.0]
    found = measured(Name("p", {}, 0.0), made, nine_of_ten + eight_of_ten, FLEET)
    assert (found.out_s, found.out_after_rises_s) == (10.0, 10.0)


def test_a_drain_meets_what_its_engines_have() -> None:
    drain = Drain(10.0, {1})
    assert drain.meets(record(8.0, engine=1))
    assert not drain.meets(record(8.0, engine=2))
    assert not drain.meets(record(4.0, engine=1))  # had ended before
    assert not drain.meets(record(11.0, engine=1))  # came later
    assert drain.meets(replace(record(4.0, engine=1), last_token_s=None))
    fleet = replace(FLEET, drains=[drain])
    missed = [record(8.0, engine=1), record(8.0, ttft_s=5.0, engine=1)]
    found = measured(Name("p", {}, 0.0), load(8.0, 8.0), missed, fleet)
    assert (found.on_drain, found.lost_on_drain) == (2, 1)


def test_the_fleet_is_read_from_the_report() -> None:
    steps = [("worker_starting", 3), ("worker_starting", 4), ("worker_draining", 1)]
    operations = [
        {
            "at_ms": 2000.0,
            "transitions": [{"transition": name, "worker_id": one} for name, one in steps],
        },
        {"at_ms": 9000.0, "transitions": []},
    ]
    fleet = Fleet.of({"decode_worker_seconds": 90.0, "duration_ms": 30_000.0}, operations, 2)
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
