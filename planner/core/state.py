"""What the builtin plugins know from tick to tick: models, floors, last values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high, median_low

from planner.core.perf.regression import Inputs, Line, Observation, is_iteration
from planner.core.types import Engine, Traffic

MOST_APART = 100.0
"""Iterations of a tick that differ from the median one by more teach nothing. One may compute a
prompt while another decodes; whoever lies by less is found by the model's fit."""


@dataclass(slots=True)
class LastValue:
    """The last valid value of a figure, and when it was seen; None before the first."""

    value: float | None = None
    at_s: float = 0.0

    def observe(self, value: float | None, now_s: float) -> None:
        """Take a value; None changes nothing."""
        if value is not None:
            self.value, self.at_s = value, now_s


@dataclass(slots=True)
class Floor:
    """The lower bound of a component, and the tick that has set it."""

    replicas: int
    tick: int


@dataclass(slots=True)
class PlannerScalingState:
    """Private to the builtin plugins; the context of a tick is what others see.

    `priors`: points of a profile, from which every model begins. `models`: by component. `floors`:
    of throughput scaling; they stand while traffic is not known, since a dead source takes nothing
    away.
    """

    priors: Sequence[tuple[Inputs, float]] = ()
    models: dict[str, Line] = field(default_factory=dict)
    floors: dict[str, Floor] = field(default_factory=dict)
    hit_ratio: LastValue = field(default_factory=LastValue)
    accept_length: LastValue = field(default_factory=LastValue)
    isl_tokens: LastValue = field(default_factory=LastValue)
    osl_tokens: LastValue = field(default_factory=LastValue)

    def observe(self, now_s: float, window: Traffic) -> None:
        """Take what a window of traffic has shown; what it has not shown stays as it was."""
        self.hit_ratio.observe(window.hit_ratio, now_s)
        self.accept_length.observe(window.accept_length, now_s)
        self.isl_tokens.observe(window.isl_tokens, now_s)
        self.osl_tokens.observe(window.osl_tokens, now_s)

    def learn(self, engines: Mapping[str, Sequence[Engine]], least: int) -> None:
        """Teach the models: the mean iteration of each instance is one observation.

        One that takes far less or more time than the others is left out: a model is for all
        instances, and each tells its times itself.
        """
        for component, own in engines.items():
            model = self.models.get(component)
            if model is None:
                model = self.models[component] = self.fresh(least)
            for inputs, wall_s, name in _alike(own):
                model.observe(inputs, wall_s, name)

    def fresh(self, least: int) -> Line:
        """A model that has observed nothing yet."""
        return Line(2, self.priors, least=least)

    def model(self, component: str) -> Line | None:
        """A component's time of a step, by tokens of prompts and KV tokens that are decoded.

        None before it has seen enough.
        """
        found = self.models.get(component)
        return None if found is None or found.coefficients is None else found


def _alike(engines: Sequence[Engine]) -> list[Observation]:
    """The iterations of a tick that are possible beside the median one.

    Of two that disagree nobody knows which one is right: neither counts.
    """
    told = [
        Observation((one.prefill_tokens, one.decode_kv_tokens), one.wall_s, one.name)
        for one in engines
        if one.wall_s is not None
    ]
    told = [one for one in told if is_iteration(one.inputs, one.seconds)]
    if not told:
        return []
    times = [one.seconds for one in told]
    most, least = median_low(times) * MOST_APART, median_high(times) / MOST_APART
    return [one for one in told if least <= one.seconds <= most]
