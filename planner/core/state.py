"""What the builtin plugins know from tick to tick: models, floors, last values."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.core.perf.regression import Line


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

    `models`: by component. `floors`: of throughput scaling; they stand while traffic is not known,
    since a dead source takes nothing away.
    """

    models: dict[str, Line] = field(default_factory=dict)
    floors: dict[str, Floor] = field(default_factory=dict)
    hit_ratio: LastValue = field(default_factory=LastValue)
    accept_length: LastValue = field(default_factory=LastValue)
    isl_tokens: LastValue = field(default_factory=LastValue)
    osl_tokens: LastValue = field(default_factory=LastValue)

    def observe(
        self,
        now_s: float,
        hit_ratio: float | None,
        accept_length: float | None,
        lengths: tuple[float | None, float | None],
    ) -> None:
        """Take what a window of traffic has shown; what it has not shown stays as it was."""
        self.hit_ratio.observe(hit_ratio, now_s)
        self.accept_length.observe(accept_length, now_s)
        self.isl_tokens.observe(lengths[0], now_s)
        self.osl_tokens.observe(lengths[1], now_s)
