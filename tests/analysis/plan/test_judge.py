"""Policies on a small load in virtual time: what each costs, and what it keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analysis.plan.judge import PLANNERS, Judge, Plant, fleet_of, record_of
from analysis.plan.measured import CLAIRVOYANT, UNWARNED
from replayer.engine.costs import StepCost
from replayer.engine.types import EngineOptions
from replayer.loads.load import Blocks, Load, Request
from replayer.virtual.requests import VirtualRow, VirtualRun
from replayer.virtual.scaling import Life, ScaledRun
from replayer.virtual.seen import Schedule
from tests.analysis.plan.runs_for_tests import record

ENGINE = EngineOptions(block_size=512, num_blocks=60, max_model_len=60 * 512)
SLOW = replace(ENGINE, step=StepCost(a0=0.05, a1=6e-4))
"""A prompt of 4,000 tokens takes it 2.4 s."""
PLANT = Plant(SLOW, prefill_tps=1500.0, gpus=2)


def small() -> Load:
    """A request every 10 s; in the third and fourth minute one every 2 s."""
    times_s = [10.0 * n for n in range(12)] + [120.0 + 2.0 * n for n in range(60)]
    times_s += [240.0 + 10.0 * n for n in range(12)]
    blocks = Blocks()
    requests = [Request(at_s, 4000, 20, blocks.take(4000)) for at_s in times_s]
    return Load(
        name="small",
        seed=1,
        requests=requests,
        end_s=360.0,
        slo_ttft_s=6.0,
        slo_itl_s=1.0,
        max_replicas=3,
        initial_replicas=1,
    )


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(small(), PLANT)


def test_a_fixed_fleet_is_played_once_and_paid_all_the_time(judge: Judge) -> None:
    one, three = judge.static(1, 0.0), judge.static(3, 0.0)
    assert one.run.attainment_ratio < 0.9 < three.run.attainment_ratio
    assert three.run.gpu_h == pytest.approx(2 * 3 * three.run.duration_s / 3600)
    again = judge.static(3, 30.0)
    assert again.records is three.records
    assert again.run == replace(three.run, startup_s=30.0)


@pytest.mark.long
def test_foresight_keeps_the_target_at_less(judge: Judge) -> None:
    runs = judge.search(30.0, effort=2, target_ratio=0.95).runs()
    (best,) = [run for run in runs if run.is_best]
    assert (best.policy, runs[-1].policy) == (CLAIRVOYANT, UNWARNED)
    assert best.attainment_ratio >= 0.95
    enough = [judge.static(n, 0.0).run for n in (1, 2, 3)]
    fixed = min(run.gpu_h for run in enough if run.attainment_ratio >= 0.95)
    assert best.gpu_h < fixed
    assert best.broken == 0


@pytest.mark.long
@pytest.mark.parametrize("name", PLANNERS)
def test_a_planner_cuts_nobody_and_is_equal_each_time(judge: Judge, name: str) -> None:
    found = judge.planner(name, 5.0)
    assert found.run == judge.planner(name, 5.0).run
    assert found.run.broken == 0
    assert found.ready[0] == (0.0, 1)
    assert all(one.ttft_s is not None for one in found.records)


def test_the_founding_planner_grows_and_loses_caches(judge: Judge) -> None:
    run = judge.planner("founding", 5.0).run
    assert run.started > 0
    assert run.changes >= run.started
    assert run.lost_tokens % 512 == 0


def test_an_order_that_comes_too_late_is_paid_all_the_same(judge: Judge) -> None:
    """The whole fleet is ordered in the last minute, and never there."""
    found = judge.play("late", Schedule([(330.0, 3)]), 900.0, 1)
    seconds = found.run.duration_s + 2 * (found.run.duration_s - 330.0)
    assert found.run.gpu_h == pytest.approx(2 * seconds / 3600)
    assert found.ready == [(0.0, 1)]


def test_work_is_that_of_the_steps() -> None:
    cost = StepCost(a0=0.048, a1=1e-4, a2=0.0, a3=1e-7, a4=0.0)
    plant = Plant(replace(ENGINE, step=cost), 1.0)
    # 100 ms of prefill; 100 tokens of (48 ms / 48 + 1e-7 s x 1,050 tokens of context)
    assert plant.work_s(record(0.0)) == pytest.approx(0.1 + 100 * (0.001 + 1.05e-4))


def test_a_failed_request_has_no_first_token() -> None:
    row = VirtualRow(3, "s", 1.0, 100, 11, 100, ttft_s=0.5, end_s=2.5, decode="e12")
    row.cached_tokens, row.external_tokens = 30, 20
    made = record_of(row)
    assert (made.ttft_s, made.itl_s, made.last_token_s) == (0.5, 0.1, 2.5)
    assert (made.engine, made.reused_tokens) == (12, 50)
    assert record_of(replace(row, outcome="timeout", decode="")).ttft_s is None
    assert record_of(replace(row, decode="")).engine == -1


def test_the_fleet_is_the_sum_over_its_instances() -> None:
    lives = [
        Life("e0", 0.0, 0.0),
        Life("e1", 0.0, 0.0, 10.0, 14.0, streams=2, broken=1, lost_tokens=5),
        Life("e2", 2.0, None, 10.0, 10.0),
        Life("e3", 4.0, 6.0, 20.0, None, lost_tokens=7),
    ]
    found = fleet_of(ScaledRun(VirtualRun([], makespan_s=30.0), lives, 4, 2), initial=2)
    assert found.gpu_s == pytest.approx(2 * (30 + 14 + 8 + 26))
    assert (found.started, found.changes, found.broken, found.lost_tokens) == (2, 4, 1, 12)
    assert [(one.at_s, one.engines) for one in found.drains] == [(10.0, {1, 2}), (20.0, {3})]
