"""What a planner shows of its ticks: packed snapshots, panels, metrics."""

from __future__ import annotations

from pathlib import Path

from planner.telemetry.recorder import Recorder
from planner.telemetry.report import POINTS, panels_of, report_html
from planner.telemetry.snapshot import Snapshot, TickOutcome, reason_of
from tests.planner.test_run import Stage


def test_only_the_last_snapshots_are_kept() -> None:
    recorder = Recorder(3)
    for n in range(5):
        recorder.add(Snapshot(n, float(n), TickOutcome.NO_DATA, 0.1, {}))
    assert [one["tick"] for one in recorder.every()] == [2, 3, 4]
    assert [one["tick"] for one in recorder.every(2)] == [2, 4]


async def test_panels_have_what_the_ticks_had(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    await stage.ticks(4)
    stage.looks.is_dead = True
    await stage.ticks(1)
    panels = {one["title"]: one for one in panels_of(list(stage.planner.recorder.every()))}
    assert len(panels) == 12
    traces = {one["name"]: one["y"] for one in panels["Replicas"]["traces"]}
    assert traces["combined: wanted"][-2:] == [2, 2]
    assert traces["combined: ready"] == [1, 1, 1, 1, None], "nothing was seen at the last tick"
    waiting = panels["Waiting prompts"]["traces"]
    assert [(one["name"], one["y"][0]) for one in waiting] == [("e0", 90_000.0)]
    targets = panels["Observed TTFT"]["traces"][1]
    assert (targets["name"], targets["y"]) == (
        "target",
        [*[stage.options.ttft_ms / 1000] * 4, None],
    )
    decisions = {one["name"]: one for one in panels["Decisions"]["traces"]}
    assert "scale_up" in decisions["load: combined"]["y"]
    assert decisions["load: combined"]["mode"] == "markers"


def test_a_report_without_ticks_and_of_very_many_is_a_page() -> None:
    recorder = Recorder()
    assert "no tick yet" in report_html(recorder)
    for n in range(2 * POINTS + 1):
        recorder.add(Snapshot(n, float(n), TickOutcome.NO_DATA, 0.1, {"</script>": n}))
    page = report_html(recorder)
    assert "1970-01-01 00:00:00 to 1970-01-01 01:06:39" in page
    assert "</script>: wanted" not in page, "a name ends no script"


def test_a_reason_names_loops_floors_and_limits() -> None:
    decided = {
        "load": {"combined": "no_change"},
        "throughput": {"combined": "set_lower_bound"},
        "floors": {"combined": 3},
        "limits": "gpu_budget_reconcile",
        "reserve": {},
        "needs": {},
    }
    assert reason_of(decided) == (
        "throughput of combined: set_lower_bound; lower bound: combined 3; gpu_budget_reconcile"
    )


def test_a_need_is_told_by_its_parts() -> None:
    decided = {"load": {}, "throughput": {}, "floors": {}, "limits": ""}
    needs = {"combined": {"level": 2.04, "reserve": 1.0, "backlog": 0.5}}
    assert reason_of({**decided, "reserve": {"combined": "scale"}, "needs": needs}) == (
        "combined needs 2.0 now, 1.0 in reserve, 0.5 for what waits"
    )
