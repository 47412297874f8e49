"""What is asked of a child, what stands in for its answer, and what a planner makes of both."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.rules import Rules
from planner.core.types import Context, Prediction, Traffic
from planner.sources.workers import forecasts
from planner.sources.workers.child import Child
from planner.sources.workers.forecasts import Asked, Forecasts, child_of
from replayer.arguments import InputError

RULES = Rules(throughput_interval_s=10.0)
HUNDREDS = "import sys; print('ready', flush=True); [print(100, flush=True) for _ in sys.stdin]"


class Asks:
    """Notes what it is asked, and gives one answer."""

    def __init__(self, answer: float | None = None) -> None:
        self.answer, self.asked = answer, list[Any]()

    def __call__(self, question: object) -> float | None:
        self.asked.append(question)
        return self.answer


def test_it_asks_for_the_last_values_from_five_on() -> None:
    asks = Asks(7.5)
    predictor = Asked(asks, 2, 480)
    for value in (0.0, 1.0, 2.0, 3.0, 4.0):
        predictor.observe(value)
    assert predictor.predict(3) == 4.0
    assert not asks.asked
    predictor.observe(5.0)
    assert predictor.predict(3) == 7.5
    asked = {"series": 2, "values": [1.0, 2.0, 3.0, 4.0, 5.0], "first": 0}
    assert asks.asked == [asked | {"ahead": 3, "refit_after": 480}]
    for n in range(300):
        predictor.observe(float(n))
    predictor.predict()
    assert len(asks.asked[-1]["values"]) == 256
    assert asks.asked[-1]["first"] == 305 - 256


def test_equal_values_are_not_asked_for_and_no_answer_is_the_last_value() -> None:
    asks = Asks()
    predictor = Asked(asks, 0, 480)
    for _ in range(9):
        predictor.observe(4.0)
    assert (predictor.predict(), asks.asked) == (4.0, [])
    predictor.observe(6.0)
    assert predictor.predict() == 6.0
    assert asks.asked


@given(
    st.lists(st.floats(0, 1e9), min_size=1, max_size=20), st.floats(-1e300, 1e300), st.booleans()
)
def test_whatever_the_child_says_it_is_no_negative_number(
    values: list[float], said: float, log: bool
) -> None:
    predictor = Asked(Asks(said), 0, 480, log=log)
    for value in values:
        predictor.observe(value)
    found = predictor.predict()
    assert found is None or 0.0 <= found < float("inf")


def _context(now_s: float, requests: float) -> Context:
    return Context(1, now_s, {}, {}, Traffic(10.0, requests, 2000.0, 100.0, 0.5))


async def test_a_planner_has_its_figures_once_an_interval_and_no_others() -> None:
    child = Child((sys.executable, "-c", HUNDREDS), time.monotonic, 30.0)
    made = Forecasts(RULES, child)
    made.start()
    try:
        assert await made.of(Context(0, 0.0, {}, {})) == Prediction()
        told = [await made.of(_context(10.0 * n, float(n))) for n in range(5)][-1]
        assert told == Prediction(3.0 + 1.0, 2000.0, 100.0)
        assert await made.of(_context(45.0, 900.0)) is told
        assert (await made.of(_context(50.0, 5.0))).next_num_req == 100.0
    finally:
        made.close()


def test_only_arima_has_a_child_and_what_it_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert child_of("kalman", time.monotonic, 1.0) is None
    assert child_of("arima", time.monotonic, 1.0) is not None
    monkeypatch.setattr(forecasts, "NEED", "no_such_package")
    with pytest.raises(InputError, match="load_predictor arima: no_such_package is not installed"):
        child_of("arima", time.monotonic, 1.0)
