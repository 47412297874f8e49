"""The registry of policies: one name, one signature."""

import pytest

from proxy.core.placement.cost import by_cost
from proxy.core.placement.policies import POLICIES
from proxy.core.placement.rules import OFFLOAD_RULES
from tests.support.scenes import candidate, scene_of


def test_every_rule_and_the_cost_policy_can_be_named() -> None:
    assert POLICIES.keys() == {"cost", *OFFLOAD_RULES}
    assert POLICIES["cost"] is by_cost


@pytest.mark.parametrize("name", POLICIES)
def test_each_chooses_among_the_free_instances(name: str) -> None:
    view = scene_of(candidate("a"), candidate("b"))
    choice = POLICIES[name](view)
    assert choice.decode.instance.name in {"a", "b"}
    assert choice.predicted_ttft_s > 0
    assert choice.options
