"""The builtin plugin that predicts the next interval's load."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from planner.core.predict import PREDICTORS, Predictor
from planner.core.rules import Rules
from planner.core.state import PlannerScalingState
from planner.core.types import Context, Prediction, Stage, Traffic

WINDOWS = 512
"""A day and more of windows of 180 s."""


class LoadPredict:
    """Predicts requests and lengths; of cached shares and accept lengths it knows the last ones.

    `predictors`: of requests, prompts and answers, where those that the rules name are not wanted.
    """

    name = "builtin_load_predict"
    stage = Stage.PREDICT
    priority = 100
    holds = True

    def __init__(
        self,
        rules: Rules,
        state: PlannerScalingState,
        predictors: Sequence[Predictor] = (),
    ) -> None:
        self._rules, self._state = rules, state
        self.interval_s = rules.throughput_interval_s
        make = PREDICTORS[rules.predictor]
        made = predictors or [make(log=rules.predictor_log) for _ in range(3)]
        self._requests, self._isl, self._osl = made
        self.windows: deque[Traffic] = deque(maxlen=WINDOWS)
        """What it has learned from, the last of it: a successor learns the same from these."""

    def warm_up(self, windows: Iterable[Traffic]) -> None:
        """Learn from the intervals of a trace; the fleet itself begins anew behind it."""
        self.recall(windows)
        for predictor in (self._requests, self._isl, self._osl):
            predictor.reset_idle_skip()

    def recall(self, windows: Iterable[Traffic]) -> None:
        """Learn what a process before this one has learned."""
        for window in windows:
            self._observe(window)

    def evaluate(self, context: Context) -> Prediction | None:
        """What the next interval brings; None without a window of traffic."""
        if context.traffic is None:
            return None
        self._observe(context.traffic)
        self._state.observe(context.now_s, context.traffic)
        known = self._state
        return Prediction(
            self._requests.predict(),
            self._isl.predict(),
            self._osl.predict(),
            known.hit_ratio.value or 0.0,
            min(max(known.accept_length.value or 1.0, 1.0), self._rules.most_accept_length),
        )

    def _observe(self, window: Traffic) -> None:
        self.windows.append(window)
        self._requests.observe(window.requests)
        # Windows without ends say nothing of lengths: a quiet night must not teach zeros.
        for predictor, value in ((self._isl, window.isl_tokens), (self._osl, window.osl_tokens)):
            if value is not None:
                predictor.observe(value)
