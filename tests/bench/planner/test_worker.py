"""A worker: what names stand for, and one policy's fault among others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.plan.measured import Run
from bench.planner import worker
from bench.planner.jobs import Job, LeftOut
from bench.planner.judge import Entry
from bench.planner.rules.policy import Static
from tests.analysis.plan.runs_for_tests import run
from tests.bench.planner.runs_for_tests import ENGINE


def test_a_rival_s_name_is_all_its_settings() -> None:
    found = worker.entries("keda-inflight")
    assert [one.settings["running"] for one in found] == [16, 32, 64]
    assert {one.policy for one in found} == {"keda-inflight"}


def test_a_class_is_found_by_its_module() -> None:
    (entry,) = worker.entries('bench.planner.rules.policy:Static:{"replicas": 3}')
    assert entry.make is Static
    assert entry.settings == {"replicas": 3}
    assert entry.policy == "bench.planner.rules.policy:Static"


@pytest.mark.parametrize("text", ["", "module", "module:", ":Class", "m:C:[]", "m:C:{", "m:1"])
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        worker.parts_of(text)


class Fake:
    """A judge that knows no load."""

    load = type("load", (), {"min_replicas": 1, "max_replicas": 2})

    def static(self, n: int, startup_s: float) -> object:
        return type("played", (), {"run": run(f"static:{n}", 1.0, 0.9, startup_s=startup_s)})

    def play(self, entry: Entry, startup_s: float) -> object:
        raise ImportError("x") if entry.policy == "dynamo-latency" else ZeroDivisionError("no")


@pytest.mark.long
def test_one_fault_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "Judge", lambda *_: Fake())
    job = Job(
        load="step",
        seed=1,
        startups_s=(30.0,),
        policies=("hpa-kv", "dynamo-latency", "no_such_module:X", "static", "static:2"),
        router="kv_router",
        effort=4,
        trace=str(tmp_path / "trace"),
        traces=None,
        engine=ENGINE,
    )
    found = list(worker.Worker(job).results())
    left = [one for one in found if isinstance(one, LeftOut)]
    ran = [one.policy for one in found if isinstance(one, Run)]
    assert ran == ["static:1", "static:2", "static:2"]
    assert [one.is_fault for one in left] == [True, False, True]
    assert left[0].policy == "hpa-kv on step, start-up 30 s"
    assert left[0].why == "ZeroDivisionError: no"
    job.save(tmp_path / "job")
    assert json.loads((tmp_path / "job").read_text())["seed"] == 1
