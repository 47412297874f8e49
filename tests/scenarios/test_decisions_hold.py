"""Claims of docs/benchmarks/ in small: fixed seeds, sample trace, four engines, virtual time.

Nothing here depends on the machine: equal code gives equal figures. A change of the policy that
loses one of these has to show in the league what it wins instead.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from analysis.league.fleet import EngineFleet, engines
from analysis.league.perturbations import PERTURBATIONS
from analysis.league.simulate import Task, run_task
from replayer.virtual.arrivals import LoadRules
from replayer.virtual.load import load_source
from tests.support.traces import SAMPLE

pytestmark = pytest.mark.figures

SOURCE = load_source(SAMPLE)
SEEDS = 4
MORE_SEEDS, SHORTER_S = 6, 200.0
"""Of perturbed fleets, which differ more from seed to seed; as much load in all."""
RIVALS = ("session-sticky", "smetric", "llm-d-scorers", "cache-aware", "dynamo-isl-or-load")
FITS, EXCEEDS = 1_000_000, 150_000
RATE = 0.3
"""Session starts/s: the smaller KV is past its knee, the larger one well in use."""


@cache
def row(
    policy: str, kv_tokens: int, perturb: str = "none", seeds: int = SEEDS, horizon_s: float = 300.0
) -> dict[str, float]:
    """Means over the seeds."""
    one = engines(4, kv_tokens, SOURCE.block_tokens)
    usual = EngineFleet(one, 60.0, SOURCE.longest_tokens, migration_limit=2)
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        rules = LoadRules(RATE, horizon_s, seed, 60.0)
        rules, fleet = PERTURBATIONS[perturb](rules, replace(usual))
        rows.append(run_task(SOURCE, Task(policy, 1.0, "given", perturb, rules, fleet)))
    return {
        "goodput": float(np.mean([one["goodput_ratio"] for one in rows])),
        "ttft_p90": float(np.mean([one["ttft_s"]["p90"] for one in rows])),
        "tpot_p90": float(np.mean([one["tpot_s"]["p90"] for one in rows])),
        "failures": sum(one["failures"] for one in rows),
    }


@pytest.mark.parametrize("kv_tokens", [FITS, EXCEEDS])
def test_the_default_is_first_or_near_it_whether_the_working_set_fits_or_not(
    kv_tokens: int,
) -> None:
    ours = row("cost", kv_tokens)
    others = [row(policy, kv_tokens) for policy in RIVALS]
    assert ours["failures"] == 0
    assert ours["goodput"] >= 0.98 * max(other["goodput"] for other in others)
    assert ours["ttft_p90"] <= 1.05 * min(other["ttft_p90"] for other in others)
    # Within half of the target it may be above the baseline's: there it buys first tokens.
    assert ours["tpot_p90"] <= max(row("session-sticky", kv_tokens)["tpot_p90"], 0.025)


@pytest.mark.parametrize("perturb", [name for name in PERTURBATIONS if name != "none"])
def test_the_default_survives_what_is_not_as_it_should_be(perturb: str) -> None:
    ours, baseline = (
        row(policy, FITS, perturb, MORE_SEEDS, SHORTER_S) for policy in ("cost", "session-sticky")
    )
    assert ours["failures"] == 0
    assert ours["goodput"] >= 0.95 * baseline["goodput"]
    assert ours["ttft_p90"] <= 1.1 * baseline["ttft_p90"]
