"""A child that answers, and one that hangs, dies, is slow to begin, or says garbage."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from planner.sources.workers.child import MOST_ANSWER, Child

BEGINS = (
    "import sys, time; p = lambda s: print(s, flush=True); p('ready'); asked = iter(sys.stdin);"
)
ADDS = BEGINS + "[p(sum(map(int, line.strip('[]\\n').split(',')))) for line in asked]"


@contextmanager
def child(program: str, deadline_s: float = 30.0, start_s: float = 30.0) -> Iterator[Child]:
    made = Child((sys.executable, "-c", program), time.monotonic, deadline_s, start_s)
    try:
        yield made
    finally:
        made.close()


def test_it_answers_and_keeps_what_it_has_begun() -> None:
    with child(ADDS) as adds:
        adds.start()
        assert [adds.ask([1, 2]), adds.ask([3, 4]), adds.ask([0, 0])] == [3.0, 7.0, 0.0]


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("sys.exit(3)", "it is started again"),
        ("next(asked); sys.exit(3)", "has ended"),
        ("next(asked); p('forty two')", "'forty two', which is no number"),
        ("next(asked); p('true')", "no number"),
        ("next(asked); p('[1]')", "no number"),
        ("next(asked); p('1e999')", "no number"),
        (f"next(asked); p('1' * {2 * MOST_ANSWER})", "says too much"),
        ("next(asked); time.sleep(600)", "no answer within"),
    ],
)
def test_after_a_failure_another_one_answers(
    does: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first of them fails, and leaves a note for its successor, which adds."""
    note = tmp_path / "failed"
    first = f"import os; n = {str(note)!r}; is_first = not os.path.exists(n); open(n, 'w');"
    program = f"{first} exec({BEGINS + does!r} if is_first else {ADDS!r})"
    with caplog.at_level(logging.WARNING), child(program, 8.0) as failing:
        found = [failing.ask([1, 2]) for _ in range(4)]
    answered = [one for one in found if one is not None]
    assert answered
    assert set(answered) == {3.0}
    assert found[0] is None
    assert told in caplog.text


def test_no_answer_is_an_answer() -> None:
    with child(BEGINS + "[p('null') for _ in asked]") as shrugs:
        assert [shrugs.ask([1]), shrugs.ask([1])] == [None, None]


def test_one_that_has_not_begun_is_waited_for_until_it_should_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with child("import time; time.sleep(600)", 0.0) as slow:
        assert slow.ask([1]) is None
        assert not caplog.records
    with child("import time; time.sleep(600)", 0.0, 0.0) as slow:
        assert slow.ask([1]) is None
        assert "started again" in caplog.text
    with child("print('hello', flush=True)") as other:
        assert other.ask([1]) is None
        assert "something else than that it is ready" in caplog.text


def test_what_cannot_be_started_has_no_answer() -> None:
    missing = Child(("/no/such/program",), time.monotonic, 1.0)
    missing.start()
    assert missing.ask([1]) is None
    missing.close()
