"""The rollout oracle: branches are faithful, gaps are gaps, and the command says so."""

from dataclasses import replace

import pytest

from analysis.regret.regret import RegretError, RegretOptions, compute_regret
from analysis.regret.run import run_regret
from tests.support.regret import (
    SOURCE,
    TASK,
)
from tests.support.traces import SAMPLE


def test_the_worker_computes_what_this_process_computes() -> None:
    options = RegretOptions(SAMPLE, instances=2, policies=("cost",), seeds=1, decisions=2)
    with pytest.raises(RegretError, match="--futures"):
        compute_regret(replace(options, futures=0), lambda _n, _of: None)
    task = replace(TASK, decisions=2, horizon_s=10.0)
    assert run_regret(SOURCE, task).row == run_regret(SOURCE, task).row
