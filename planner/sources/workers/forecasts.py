"""Predictors whose forecasts a child process makes, for the planner and for `dry-run`."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

from planner.core.predict.base import Predictor
from planner.core.predict.plugin import LoadPredict
from planner.core.rules import Rules
from planner.core.state import PlannerScalingState
from planner.core.types import Context, Prediction
from planner.sources.workers.child import Child
from replayer.arguments import InputError

COMMANDS = {"arima": (sys.executable, "-m", "planner.sources.workers.arima")}
"""The child of each predictor that has one."""
NEED = "statsmodels"
LEAST_POINTS, MOST_POINTS = 5, 256
DAY_S = 86_400.0
Ask = Callable[[object], float | None]


class Asked(Predictor):
    """Asks a child; it gives the last value where there is no answer, or nothing to ask.

    `series` tells the child whose values these are. `refit_after`: values after which it fits anew.
    """

    def __init__(self, ask: Ask, series: int, refit_after: int, *, log: bool = False) -> None:
        super().__init__(log=log)
        self._ask, self._series, self._refit_after = ask, series, refit_after
        self._values: deque[float] = deque(maxlen=MOST_POINTS)
        self._count = 0

    def _take(self, value: float) -> None:
        self._values.append(value)
        self._count += 1

    def _at(self, intervals: int) -> float:
        values = list(self._values)
        if len(values) < LEAST_POINTS or min(values) == max(values):
            return values[-1]
        question = {
            "series": self._series,
            "values": values,
            "first": self._count - len(values),
            "ahead": intervals,
            "refit_after": self._refit_after,
        }
        said = self._ask(question)
        return values[-1] if said is None else said


def child_of(predictor: str, now_s: Callable[[], float], deadline_s: float) -> Child | None:
    """The child of a predictor, not started yet; None for one without. Raises InputError."""
    command = COMMANDS.get(predictor)
    if command is None:
        return None
    if find_spec(NEED) is None:
        told = "run pip install -c constraints.txt '.[planner]'"
        raise InputError(f"load_predictor {predictor}: {NEED} is not installed; {told}")
    return Child(command, now_s, deadline_s)


def asking(rules: Rules, ask: Ask) -> LoadPredict:
    """A plugin of its own whose three predictors ask."""
    refit_after = max(1, math.ceil(DAY_S / rules.throughput_interval_s))
    made = [Asked(ask, n, refit_after, log=rules.predictor_log) for n in range(3)]
    return LoadPredict(rules, PlannerScalingState(), made)


class Forecasts:
    """The forecasts of a planner that runs: made in a thread, so that nothing else has to wait."""

    def __init__(self, rules: Rules, child: Child) -> None:
        self.predict, self._child = asking(rules, child.ask), child
        self._said, self._at_s = Prediction(), -math.inf
        self._is_asking = threading.Lock()

    def start(self) -> None:
        """Start the child, which takes some seconds."""
        self._child.start()

    async def of(self, context: Context) -> Prediction:
        """The context's prediction; that of before until the interval is over."""
        is_due = context.now_s - self._at_s >= self.predict.interval_s - 1e-6
        if is_due and context.traffic is not None:
            self._at_s = context.now_s
            self._said = await asyncio.to_thread(self._asked, context)
        return self._said

    def _asked(self, context: Context) -> Prediction:
        """Only the figures that are forecast: the others are the builtin plugin's."""
        if not self._is_asking.acquire(blocking=False):  # a tick that was cut short still asks
            return Prediction()
        try:
            said = self.predict.evaluate(context) or Prediction()
        finally:
            self._is_asking.release()
        return replace(said, hit_ratio=None, accept_length=None)

    def close(self) -> None:
        """End the child."""
        self._child.close()
