"""ARIMA: orders by hand, what is appended, when it is fitted anew, and the process itself."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import pytest

from planner.core.rules import Rules
from planner.core.types import Context, Traffic
from planner.sources.workers.arima import Model, answer, best
from planner.sources.workers.forecasts import asking, child_of

pytestmark = pytest.mark.long  # statsmodels takes over a second to import
NOISE = (0.3, -0.8, 0.5, 1.1, -0.4, -1.0, 0.7, 0.1, -0.6, 0.9, -0.2, 0.4)


def test_six_values_are_a_random_walk_whose_forecast_is_the_last() -> None:
    """Order (0, 1, 0): the same in logarithms, so that it is 5 again at any distance."""
    values = [9.0, 4.0, 6.0, 5.0, 8.0, 5.0]
    _, order = best(values)
    assert order == (0, 1, 0)
    assert Model(480).forecast(values, 0, 3) == pytest.approx(5.0)


def test_a_line_is_differenced() -> None:
    values = [10.0 * n + NOISE[n % 12] for n in range(40)]
    _, order = best(values)
    assert order[1] == 1
    found = Model(480).forecast(values, 0, 1)
    assert found == pytest.approx(400.0, rel=0.05)


def test_values_are_appended_and_it_is_fitted_anew_when_it_is_old_or_wrong() -> None:
    values = [50.0 + 5.0 * NOISE[n % 12] for n in range(30)]
    model = Model(30)
    for end in range(12, 30):
        assert model.forecast(values[:end], 0, 1) == pytest.approx(50.0, abs=8.0)
    assert model.fits == 2, "once it has as many again"
    model = Model(480)
    model.forecast(values, 0, 1)
    wild = values + [50.0 + 300.0 * NOISE[n % 12] for n in range(10)]
    for end in range(31, 41):
        model.forecast(wild[:end], 0, 1)
    assert model.fits == 1
    model.forecast([*wild, 50.0], 0, 1)
    assert model.fits == 2, "its errors have doubled"
    model.forecast([*wild, 50.0], 900, 1)
    assert model.fits == 3, "these are others than it knows"


def test_the_same_questions_have_the_same_answers() -> None:
    values = [20.0 + 3.0 * NOISE[n % 12] + n % 5 for n in range(30)]
    first, second = dict[int, Model](), dict[int, Model]()
    questions = [
        {"series": 0, "values": values[:end], "first": 0, "ahead": 2, "refit_after": 9}
        for end in range(5, 13)
    ]
    one, other = ([answer(models, q) for q in questions] for models in (first, second))
    assert one == other
    assert all(said is not None and math.isfinite(said) for said in one)


def test_the_planner_asks_a_process_and_imports_no_statsmodels_itself() -> None:
    child = child_of("arima", time.monotonic, 120.0)
    assert child is not None
    try:
        plugin = asking(Rules(throughput_interval_s=10.0), child.ask)
        windows = [
            Traffic(10.0, 100.0 + 50.0 * (n % 2) + NOISE[n % 12], 2000.0, 100.0) for n in range(12)
        ]
        *_, said = [plugin.evaluate(Context(n, 10.0 * n, {}, {}, w)) for n, w in enumerate(windows)]
        assert said is not None
        assert said.next_num_req == pytest.approx(100.0, abs=9.0), "the last one had 150"
        assert said.next_isl == 2000.0
    finally:
        child.close()
    program = "import planner.service, planner.dry_run, sys; print('statsmodels' in sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert told.stdout == "False\n"
