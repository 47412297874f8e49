"""The engine: times from its constants, and the arguments with a start-up time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.analysis.plan.runs_for_tests import record
from tests.bench.planner.runs_for_tests import ENGINE, written


def test_times_follow_from_the_constants() -> None:
    assert ENGINE.prefill_s(2000) == pytest.approx(0.104)
    assert ENGINE.step_s(100_000) == pytest.approx(0.013)
    # 50 ms of prefill; 100 tokens of (10 ms / 48 + 3e-8 s x 1,050 tokens of context)
    assert ENGINE.work_s(record(0.0)) == pytest.approx(0.05 + 100 * (0.01 / 48 + 3.15e-5))


def test_an_engine_that_starts_at_once_has_no_start_up_time(tmp_path: Path) -> None:
    path = written(tmp_path / "engine.json", json.dumps({"engine": {"block_size": 64}}))
    engine = replace(ENGINE, arguments=str(path))
    assert engine.replay_arguments(0.0) == {"engine": {"block_size": 64}}
    assert engine.replay_arguments(30.0)["startup_time"] == 30.0
