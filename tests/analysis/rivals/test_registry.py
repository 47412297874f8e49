"""Every rival runs a fleet to its end; each rule does what its project publishes."""

import pytest

from analysis.league.fleet import EngineFleet, engines
from analysis.league.simulate import run_policy
from analysis.rivals.registry import BASELINE, RIVALS
from replayer.virtual.arrivals import Planned
from replayer.virtual.load import TraceTurn
from tests.support.scenes import BLOCK


def _planned() -> list[Planned]:
    planned = []
    for n in range(40):
        session, turn = n % 8, n // 8
        blocks = tuple(1000 * session + i for i in range(20 + 4 * turn))
        wait_for = (n - 8,) if turn else ()
        one = TraceTurn(f"s{session}", BLOCK * len(blocks) + 9, 30, 9, blocks, 0, (), 0.0, 0.0)
        planned.append(Planned(one, f"s{session}", 0.05 * n, 0.5, wait_for))
    return planned


@pytest.mark.long
@pytest.mark.parametrize("policy", RIVALS)
def test_every_rival_finishes_and_accounts_for_every_request(policy: str) -> None:
    fleet = EngineFleet(engines(3, 200_000, BLOCK))
    runs = [run_policy(policy, _planned(), fleet, BLOCK) for _ in range(2)]
    assert [row.outcome for row in runs[0].rows] == ["ok"] * 40
    assert runs[0].drift == 0
    assert runs[0].rows == runs[1].rows
    assert RIVALS[policy].source


def test_the_baseline_is_one_of_them() -> None:
    assert BASELINE in RIVALS
