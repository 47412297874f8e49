"""How proposals become numbers: the worked table of the founding rules, and what always holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.merge import merge
from planner.core.types import Kind, Proposal, Stage, Target

SET, LEAST, MOST, REJECT = Kind.SET, Kind.AT_LEAST, Kind.AT_MOST, Kind.REJECT


def says(
    *targets: tuple[Kind, int], priority: int = 100, name: str = "p", final: bool = False
) -> Proposal:
    wishes = tuple(Target("c", kind, replicas) for kind, replicas in targets)
    return Proposal(name, wishes, priority, final)


@pytest.mark.parametrize(
    ("proposals", "merged"),
    [
        ([], 3),
        ([says((SET, 5))], 5),
        ([says((SET, 5), priority=2), says((SET, 7), priority=1)], 7),
        ([says((LEAST, 4))], 4),
        ([says((LEAST, 2))], 3),
        ([says((MOST, 2))], 2),
        ([says((SET, 9), (MOST, 6))], 6),
        ([says((SET, 1), (LEAST, 2))], 2),
        ([says((LEAST, 5), (MOST, 4))], 5),
        ([says((LEAST, 2)), says((LEAST, 6), name="q")], 6),
        ([says((MOST, 2)), says((MOST, 1), name="q")], 1),
        ([says((SET, 8), priority=1), says((SET, 2), priority=9, final=True)], 2),
        ([says((SET, 8), priority=1, final=True), says((LEAST, 9), priority=0)], 8),
        ([says((SET, -4))], 0),
    ],
)
def test_the_worked_table(proposals: list[Proposal], merged: int) -> None:
    assert merge(Stage.PROPOSE, proposals, {"c": 3}).targets == {"c": merged}


def test_a_rejection_beats_a_final_proposal() -> None:
    found = merge(
        Stage.PROPOSE, [says((SET, 9), final=True), says((REJECT, 0), name="no")], {"c": 3}
    )
    assert (found.targets, found.rejected_by) == ({"c": 3}, "no")


def test_constraints_set_nothing_and_are_never_final() -> None:
    said = [says((SET, 9), (MOST, 5), final=True, name="a"), says((LEAST, 4), name="b")]
    found = merge(Stage.CONSTRAIN, said, {"c": 8})
    assert (found.targets, found.dropped) == ({"c": 5}, (("a", "c"),))


KINDS = st.sampled_from([SET, LEAST, MOST])
PROPOSALS = st.lists(
    st.builds(
        lambda targets, priority, name: Proposal(name, tuple(targets), priority),
        st.lists(st.builds(Target, st.sampled_from("cd"), KINDS, st.integers(-3, 20)), max_size=4),
        st.integers(0, 5),
        st.text("abc", min_size=1, max_size=3),
    ),
    max_size=5,
    unique_by=lambda proposal: (proposal.priority, proposal.plugin),
)
BASELINE = st.fixed_dictionaries({"c": st.integers(0, 20), "d": st.integers(0, 20)})


@given(PROPOSALS, BASELINE, st.randoms())
def test_what_holds_for_all_proposals(
    proposals: list[Proposal], baseline: dict[str, int], dice: object
) -> None:
    """No order counts, floors are kept, what nobody names stays, and twice is once."""
    for stage in (Stage.PROPOSE, Stage.CONSTRAIN):
        found = merge(stage, proposals, baseline)
        shuffled = list(proposals)
        dice.shuffle(shuffled)  # type: ignore[attr-defined]
        assert merge(stage, shuffled, baseline) == found
        wishes = [target for proposal in proposals for target in proposal.targets]
        for name, replicas in found.targets.items():
            floors = [t.replicas for t in wishes if t.component == name and t.kind is LEAST]
            assert replicas >= max([0, *floors])
            if not any(t.component == name for t in wishes):
                assert replicas == baseline[name]
        assert merge(stage, proposals, found.targets).targets == found.targets


@given(PROPOSALS, BASELINE, st.integers(0, 20))
def test_one_more_floor_takes_nothing_away(
    proposals: list[Proposal], baseline: dict[str, int], replicas: int
) -> None:
    before = merge(Stage.PROPOSE, proposals, baseline).targets
    more = Proposal("floor", (Target("c", LEAST, replicas),), 99)
    after = merge(Stage.PROPOSE, [*proposals, more], baseline).targets
    assert after["c"] >= before["c"]
    assert after["d"] == before["d"]
