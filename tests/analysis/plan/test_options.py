"""What a list of policies stands for."""

from __future__ import annotations

import pytest

from analysis.plan.options import PlanOptions
from replayer.arguments import InputError


@pytest.mark.parametrize(
    ("policies", "sizes"),
    [
        (("static",), [1, 2, 3, 4]),
        (("static-2", "static-3..4"), [2, 3, 4]),
        (("founding", "clairvoyant"), []),
    ],
)
def test_sizes_of_fixed_fleets(policies: tuple[str, ...], sizes: list[int]) -> None:
    assert PlanOptions(policies=policies).fixed(1, 4) == sizes


@pytest.mark.parametrize("wrong", ["static-0", "static-5", "static-3..2", "static-2..9"])
def test_a_fixed_fleet_out_of_bounds_is_told(wrong: str) -> None:
    with pytest.raises(InputError, match=f"--policies: {wrong}: must be of 1 to 4 replicas"):
        PlanOptions(policies=(wrong,)).fixed(1, 4)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (PlanOptions(policies=("static-x",)), "--policies: must be of static, clairvoyant, mine,"),
        (PlanOptions(policies=()), "--policies: must not be empty"),
        (PlanOptions(profile="b200"), "--profile: must be of h100, .*, not b200"),
    ],
)
def test_unknown_names_are_told(options: PlanOptions, told: str) -> None:
    with pytest.raises(InputError, match=told):
        options.check(("mine",))
    PlanOptions(policies=("mine", "static-1..2")).check(("mine",))
