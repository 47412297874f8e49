"""The rollout oracle: branches are faithful, gaps are gaps, and the command says so."""

from dataclasses import replace

import pytest

from analysis.regret.regret import RegretError, RegretOptions, compute_regret, run_regret, sample
from tests.support.regret import (
    SOURCE,
    TASK,
)
from tests.support.traces import SAMPLE


@pytest.mark.long
def test_the_worker_computes_what_this_process_computes() -> None:
    options = RegretOptions(SAMPLE, instances=2, policies=("cost",), seeds=1, decisions=2)
    with pytest.raises(RegretError, match="--futures"):
        compute_regret(replace(options, futures=0), lambda _n, _of: None)
    task = replace(TASK, decisions=2, horizon_s=10.0)
    assert run_regret(SOURCE, task).row == run_regret(SOURCE, task).row


def test_a_sample_depends_on_the_seed_alone() -> None:
    assert sample(3, 5, 0) == frozenset(range(3))
    assert len(sample(100, 10, 1)) == 10
    assert sample(100, 10, 1) == sample(100, 10, 1) != sample(100, 10, 2)
