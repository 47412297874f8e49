"""What is not as a policy believes it."""

import pytest

from analysis.league.fleet import EngineFleet, engines
from analysis.league.perturbations import PERTURBATIONS
from analysis.league.simulate import run_policy
from replayer.virtual.arrivals import plan
from replayer.virtual.load import load_source
from tests.support.league import RULES
from tests.support.traces import SAMPLE


@pytest.mark.long
@pytest.mark.parametrize("name", PERTURBATIONS)
def test_every_perturbation_runs(name: str) -> None:
    source = load_source(SAMPLE)
    rules, fleet = PERTURBATIONS[name](RULES, EngineFleet(engines(2, 400_000, source.block_tokens)))
    planned = plan(source, rules)
    run = run_policy("always", planned, fleet, source.block_tokens)
    assert len(run.rows) == len(planned)
    assert run.drift == 0
