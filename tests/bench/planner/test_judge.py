"""The recorder between replay and policy; what is played once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.planner.judge import Entry, Judge, Recorder
from bench.planner.rules.policy import Rule, Static, View
from tests.analysis.plan.runs_for_tests import load
from tests.bench.planner.runs_for_tests import (
    CONTEXT,
    ENGINE,
    engine_row,
    snapshot,
    written,
)


class Two(Rule):
    """Wants two engines; counts who closes it."""

    closed = 0

    def replicas(self, view: View) -> int:
        return 2

    def close(self) -> None:
        Two.closed += 1


def test_the_recorder_changes_nothing_and_counts_changes() -> None:
    recorder = Recorder(Two(CONTEXT))
    assert recorder.initial_tick_ms() == 15_000
    one, two = engine_row(0), engine_row(1)
    assert recorder.on_tick(snapshot(one))["target_decode"] == 2
    assert recorder.on_tick(snapshot(one, starting=1))["target_decode"] is None
    recorder.on_tick(snapshot(one, two))
    assert recorder.changes == 1
    assert recorder.ready == [(15.0, 1), (45.0, 2)]


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """A judge whose replay is one tick."""

    def replay(self: Judge, recorder: Recorder, context: object, initial: int) -> object:
        recorder.on_tick(snapshot(*(engine_row(at) for at in range(initial))))
        summary = {"decode_worker_seconds": 3600.0 * initial, "duration_ms": 3_600_000.0}
        return SimpleNamespace(summary=summary, per_request=[], lifecycle_operations=[])

    monkeypatch.setattr(Judge, "_replay", replay)
    path = written(tmp_path / "engine.json", json.dumps({}))
    engine = replace(ENGINE, arguments=str(path))
    return Judge(load(0.0), engine, tmp_path / "trace", "kv_router")


def test_a_policy_is_played_and_closed(judge: Judge) -> None:
    before = Two.closed
    played = judge.play(Entry("two", Two, {}), 30.0)
    assert (played.run.policy, played.run.startup_s, played.run.changes) == ("two", 30.0, 1)
    assert played.run.gpu_h == 3.0  # the load's own number
    assert Two.closed == before + 1


def test_a_fixed_fleet_is_played_once(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    first = judge.static(5, 30.0)
    monkeypatch.setattr(judge, "play", None)
    again = judge.static(5, 120.0)
    assert (first.run.policy, first.run.gpu_h, first.run.settings) == ("static:5", 5.0, "{}")
    assert again.run == replace(first.run, startup_s=120.0)
    assert issubclass(Static, Rule)
