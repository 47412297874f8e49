"""Regret per seed, and over which policy's rollout it is counted."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from analysis.league.fleet import Scale
from analysis.regret.outcomes import RegretRun
from analysis.regret.summary import Regret, regret_ratios, standard_error


def run(mode: str, policy: str, objective_s: float) -> RegretRun:
    row: dict[str, Any] = {"regime": "fits", "mode": mode, "policy": policy}
    return cast(RegretRun, SimpleNamespace(row=row | {"objective_s": objective_s}))


def test_a_ratio_per_seed_and_none_for_the_oracle_itself() -> None:
    assert regret_ratios([12.0, 9.0], [10.0, 10.0]) == pytest.approx([0.2, -0.1])
    assert regret_ratios([10.0], [10.0]) == [0.0]
    with pytest.raises(ValueError, match="argument 2 is longer"):
        regret_ratios([1.0], [1.0, 2.0])


def test_runs_are_found_by_regime_mode_and_policy_in_the_order_of_seeds() -> None:
    runs = [run("watch", "a", 1.0), run("rollout", "a", 2.0), run("watch", "b", 3.0)]
    regret = Regret([Scale("fits", 1e6, 0.3, 1e5)], [*runs, run("watch", "a", 4.0)])
    assert regret.objectives("fits", "watch", "a") == [1.0, 4.0]
    assert regret.objectives("fits", "rollout", "a") == [2.0]
    assert regret.found("exceeds", "watch", "a") == []


def test_repetitions_say_what_chance_leaves_uncertain() -> None:
    # Per seed: a deviation of 1 around 10 over two runs, so 0.1 / sqrt(2) of the seed's mean.
    seed = [10.0 - 0.5**0.5, 10.0 + 0.5**0.5]
    assert standard_error([seed]) == pytest.approx(0.1 / 2**0.5)
    assert standard_error([seed] * 4) == pytest.approx(0.1 / 2**0.5 / 2)
    assert standard_error([seed, [10.0]]) is None
