"""UP and DOWN: what takes an instance down, what brings it back, as words over its events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.health import FALL, RISE, Health

FAILED, PROBED, ANSWERED = "f", "p", "a"


def after(events: str) -> tuple[Health, list[int]]:
    """The state after these events, and which of them changed it."""
    health, changes = Health(was_seen=True), []
    for i, event in enumerate(events):
        if event == ANSWERED:
            health.answered()
        elif health.failed("x") if event == FAILED else health.probed():
            changes.append(i)
    return health, changes


@pytest.mark.parametrize(
    ("events", "is_up", "changes"),
    [
        ("", True, []),
        ("f", True, []),
        ("ff", False, [1]),
        ("fff", False, [1]),
        ("fpf", True, []),
        ("faf", True, []),
        ("ffp", False, [1]),
        ("ffpp", True, [1, 3]),
        ("ffppp", True, [1, 3]),
        ("ffpfp", False, [1]),
        ("ffpfpp", True, [1, 5]),
        ("ffaaaa", False, [1]),
        ("ffpap", True, [1, 4]),
        ("ppff", False, [3]),
        ("ffppff", False, [1, 3, 5]),
        ("ffppf", True, [1, 3]),
    ],
)
def test_histories(events: str, is_up: bool, changes: list[int]) -> None:
    health, changed = after(events)
    assert (health.is_up, changed) == (is_up, changes)


def test_one_never_seen_falls_at_the_first_failure_and_rises_at_the_first_answer() -> None:
    health = Health()
    assert (health.is_up, health.was_seen) == (True, False)
    assert health.failed("refused")
    assert (health.is_up, health.last_error) == (False, "refused")
    assert health.probed()
    assert (health.is_up, health.was_seen) == (True, True)
    assert not health.failed("late")


@given(st.text(FAILED + PROBED + ANSWERED, max_size=30))
def test_any_history(events: str) -> None:
    """Each change is told once; down means FALL failures came, up again RISE probes."""
    health, changes = after(events)
    assert health.is_up == (len(changes) % 2 == 0)
    for nth, at in enumerate(changes):
        before = events[: at + 1].replace(ANSWERED, "") if nth % 2 else events[: at + 1]
        assert before.endswith(PROBED * RISE if nth % 2 else FAILED * FALL)
