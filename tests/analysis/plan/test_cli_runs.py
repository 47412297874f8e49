"""Which runs a command makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis.plan.cli import judge_of, run_plan
from analysis.plan.options import PlanOptions
from replayer.arguments import InputError
from tests.analysis.plan.test_traffic import row, written


@pytest.fixture
def asked(tmp_path: Path) -> PlanOptions:
    rows = [row(4000 * n, [2 * n, 2 * n + 1]) for n in range(8)]
    trace = written(tmp_path / "t.jsonl", *rows)
    return PlanOptions(
        loads=(str(trace),),
        policies=("static-2", "founding"),
        startups_s=(0.0, 5.0),
        seeds=2,
        jobs=1,
    )


def test_every_policy_meets_every_seed_and_delay(asked: PlanOptions) -> None:
    done: list[int] = []
    runs = run_plan(asked, lambda number, of: done.append(10 * number + of))
    assert done == [14, 24, 34, 44]
    found = [(run.policy, run.startup_s) for run in runs]
    assert found == [("static:2", 0.0), ("founding", 0.0), ("static:2", 5.0), ("founding", 5.0)] * 2
    assert all(run.attainment_ratio == 1.0 for run in runs)


def test_a_clairvoyant_brings_the_fixed_fleets_that_it_has_played(asked: PlanOptions) -> None:
    given = replace(asked, policies=("clairvoyant",), startups_s=(0.0,), seeds=1, most=2, effort=1)
    policies = [run.policy for run in run_plan(given, lambda *_: None)]
    assert policies[-3:] == ["unwarned", "static:1", "static:2"]
    assert set(policies[:-3]) == {"clairvoyant"}


def test_the_bounds_and_the_slo_are_those_that_are_asked_for(asked: PlanOptions) -> None:
    name = asked.loads[0]
    plain = judge_of(asked, name, 1).load
    assert (plain.max_replicas, plain.initial_replicas, plain.slo_ttft_s) == (10, 3, 2.0)
    load = judge_of(replace(asked, most=2, slo=(9.0, 0.5)), name, 1).load
    assert (load.min_replicas, load.max_replicas, load.initial_replicas) == (1, 2, 2)
    assert (load.slo_ttft_s, load.slo_itl_s) == (9.0, 0.5)


def test_a_prompt_that_no_engine_holds_is_told(asked: PlanOptions) -> None:
    with pytest.raises(InputError, match="--kv-tokens: must be at least 1029"):
        run_plan(replace(asked, kv_tokens=1000), lambda *_: None)
