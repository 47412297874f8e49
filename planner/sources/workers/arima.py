"""The child that forecasts by ARIMA. Nothing else imports statsmodels, which takes seconds.

A question has the number of the series, its values, how many were before those, and the intervals
ahead. The answer is the value then, or null.
"""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
import orjson

ORDERS = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2))
"""Autoregressive terms and moving averages."""
LEAST_P, LEAST_TESTED = 0.05, 12
"""Below this the values are not stationary (KPSS), and their differences are modelled. Of fewer
values the test says nothing: those of a rise pass it."""
ERRORS = 10
"""Past errors whose mean is compared with that of the fit."""
FAILURES = (ValueError, ArithmeticError, IndexError, np.linalg.LinAlgError)


class Model:
    """One series: an order by AICc, then each value is appended without a fit.

    It is fitted anew after `refit_after` values, once it has as many again as it was fitted to, and
    where its errors have doubled. Hyndman and Khandakar, Automatic Time Series Forecasting, 2008.
    """

    def __init__(self, refit_after: int) -> None:
        self._refit_after = refit_after
        self._found: Any = None
        self._log = False
        self._end = self._fitted = self._length = 0
        self._typical = 0.0
        self._errors: list[float] = []
        self.fits = 0

    def forecast(self, values: Sequence[float], first: int, ahead: int) -> float | None:
        """The value so many intervals after the last; `first`: the number of the first of them."""
        end = first + len(values)
        if self._found is None or not first <= self._end <= end or self._is_old(end):
            self._fit(values, end)
        else:
            for value in values[self._end - first :]:
                self._append(value)
        if self._found is None:
            return None
        said = float(self._found.forecast(ahead)[-1])
        said = math.expm1(min(said, 60.0)) if self._log else said
        return said if math.isfinite(said) else None

    def _is_old(self, end: int) -> bool:
        late = end - self._fitted
        errors = self._errors
        is_worse = len(errors) == ERRORS and sum(errors) / ERRORS > 2.0 * self._typical
        return late >= self._refit_after or late >= self._length or is_worse

    def _append(self, value: float) -> None:
        value = math.log1p(max(0.0, value)) if self._log else value
        self._errors = [*self._errors, abs(value - float(self._found.forecast(1)[0]))][-ERRORS:]
        self._found = self._found.append([value], refit=False)
        self._end += 1

    def _fit(self, values: Sequence[float], end: int) -> None:
        self.fits += 1
        self._found, order = best(values)
        self._log = self._found is not None and (order[0], order[2]) == (0, 0)
        if self._log:
            self._found, _ = best([math.log1p(max(0.0, value)) for value in values])
        self._end = self._fitted = end
        self._length, self._errors = len(values), []
        if self._found is not None:
            skipped = order[1]  # the first residual of differences is the value itself
            self._typical = float(np.mean(np.abs(self._found.resid[skipped:])))


def best(values: Sequence[float]) -> tuple[Any, tuple[int, int, int]]:
    """The fit with the least AICc and its order; None where there is none."""
    of, stationary = _imported()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of starting values, and of few observations
        d = 0 if _is_stationary(stationary, values) else 1
        found: tuple[float, Any, tuple[int, int, int]] = (math.inf, None, (0, d, 0))
        for p, q in ORDERS:
            try:
                fitted = of(values, order=(p, d, q)).fit()
                aicc = float(fitted.aicc)
            except FAILURES:
                continue
            if aicc < found[0]:
                found = (aicc, fitted, (p, d, q))
    return found[1:]


def _imported() -> tuple[Any, Any]:
    """The model and the test; their packages set filters of warnings once they are imported."""
    model = importlib.import_module("statsmodels.tsa.arima.model").ARIMA
    return model, importlib.import_module("statsmodels.tsa.stattools").kpss


def _is_stationary(kpss: Any, values: Sequence[float]) -> bool:
    if len(values) < LEAST_TESTED:
        return False
    try:
        return float(kpss(values, nlags="auto", result_object=False)[1]) > LEAST_P
    except FAILURES:
        return True


def answer(models: dict[int, Model], question: dict[str, Any]) -> float | None:
    """The answer to one question."""
    model = models.setdefault(question["series"], Model(question["refit_after"]))
    try:
        return model.forecast(question["values"], question["first"], question["ahead"])
    except FAILURES:
        del models[question["series"]]
        return None


def main(asked: BinaryIO, said: BinaryIO) -> None:
    """Answer until the planner closes its end."""
    _imported()
    models: dict[int, Model] = {}
    said.write(b"ready\n")
    said.flush()
    for line in asked:
        said.write(orjson.dumps(answer(models, orjson.loads(line))) + b"\n")
        said.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
