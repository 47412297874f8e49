"""The planner's series: decisions in closed sets, figures of what is there."""

from __future__ import annotations

from pathlib import Path

from planner.telemetry.metrics import Metrics
from tests.planner.test_run import Stage


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"cache_planner_{name}", labels)


async def test_a_tick_is_shown(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.looks.start_ups_s = [3.0, 1.0, 2.0]
    stage.looks.absent = {"combined": 1}
    await stage.ticks(4)
    shown = stage.planner.metrics
    assert value(shown, "target_replicas", component="combined") == 2
    assert value(shown, "ready_replicas", component="combined") == 1
    assert value(shown, "pending_replicas", component="combined") == 1
    assert value(shown, "absent_replicas", component="combined") == 1
    assert value(shown, "ticks_total", outcome="apply") == 1
    assert value(shown, "observed", figure="isl_tokens") == 2000
    assert value(shown, "source_age_seconds", source="p") == 1.0
    assert value(shown, "start_up_seconds", quantile="0.5") == 2.0
    assert value(shown, "start_up_seconds", quantile="0.9") == 3.0
    assert value(shown, "advisory") == 0
    hours = value(shown, "gpu_hours_total")
    assert hours is not None
    assert 0 < hours < 1
    states = [
        value(shown, "load_decision", component="combined", decision=name)
        for name in ("scaling_in_progress", "scale_up")
    ]
    assert states == [1, 0], "one of a closed set"


async def test_who_has_left_has_no_series(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    await stage.ticks(3)
    shown = stage.planner.metrics
    assert value(shown, "estimated_ttft_seconds", upstream="e0") is not None
    stage.looks.ready = 0
    await stage.ticks(1)
    assert value(shown, "estimated_ttft_seconds", upstream="e0") is None
