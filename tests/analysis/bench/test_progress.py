"""Long commands speak."""

import io
import math

import pytest

from analysis.bench.progress import Steps, changed, duration


def test_each_finished_run_is_a_line_with_the_time_left():
    now = iter((0.0, 10.0, 70.0, 130.0))
    file = io.StringIO()
    steps = Steps("league", file, lambda: next(now))
    steps.say("looking for the load")
    steps(1, 3)
    steps(2, 3)
    assert file.getvalue().splitlines() == [
        "league: looking for the load",
        "league: 1 of 3 runs, 1 min 0 s, 2 min 0 s left",
        "league: 2 of 3 runs, 2 min 0 s, 1 min 0 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.2, "0 s"), (59.6, "1 min 0 s"), (61, "1 min 1 s")]
)
def test_a_time_span_in_words(seconds, told):
    assert duration(seconds) == told


@pytest.mark.parametrize(
    ("ratio", "told"),
    [
        (-0.3, "-30 %"),
        (0.004, "equal"),
        (0.016, "+2 %"),
        (0.0, "equal"),
        (math.inf, "far higher"),
    ],
)
def test_a_change_in_words(ratio, told):
    assert changed(ratio) == told


def test_a_number_of_runs_that_may_change_is_about_that():
    file = io.StringIO()
    Steps("slo", file, lambda: 0.0, of="of about")(3, 12)
    assert file.getvalue() == "slo: 3 of about 12 runs, 0 s, 0 s left\n"
