"""A tick: plugins are asked stage by stage, what they say is merged, limits have the last word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from planner.core.budget import Bounded, Limits, bounded
from planner.core.merge import Merged, merge
from planner.core.types import Context, Prediction, Proposal, Stage


class Plugin(Protocol):
    """One rule. `stage`: when it is asked; the smallest `priority` counts first."""

    name: str
    stage: Stage
    priority: int
    interval_s: float
    """Time between two answers; 0 for one in each tick."""
    holds: bool
    """Whether its last answer counts while none is due (HOLD_LAST); else it has none."""

    def evaluate(self, context: Context) -> Proposal | Prediction | None:
        """What it says of this tick; None: nothing."""
        ...


@dataclass(slots=True)
class _Answered:
    """When a plugin answered last, and what; how often it has failed since."""

    at_s: float
    said: Proposal | Prediction | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a tick has come to. `rejected_by`: the plugin that stopped it, if one did."""

    targets: Mapping[str, int]
    prediction: Prediction
    stages: Mapping[Stage, Merged]
    limits: Bounded
    rejected_by: str = ""


class Pipeline:
    """Asks plugins in the order of stages and of their priorities."""

    def __init__(self, plugins: Sequence[Plugin], limits: Limits) -> None:
        self._plugins = sorted(plugins, key=lambda plugin: (plugin.priority, plugin.name))
        self._limits = limits
        self._last: dict[str, _Answered] = {}

    def tick(self, context: Context) -> Outcome:
        """Decide once, from the current targets in `context.baseline`."""
        context = replace(context, prediction=self._predicted(context))
        targets = dict(context.baseline)
        stages: dict[Stage, Merged] = {}
        for stage in (Stage.PROPOSE, Stage.RECONCILE, Stage.CONSTRAIN):
            asked = replace(context, baseline=targets)
            said = [one for one in self._answers(stage, asked) if isinstance(one, Proposal)]
            stages[stage] = merged = merge(stage, said, targets)
            if merged.rejected_by:
                kept = Bounded(dict(context.baseline))
                name = merged.rejected_by
                return Outcome(kept.targets, context.prediction, stages, kept, name)
            targets = dict(merged.targets)
        fits = bounded(context.baseline, targets, self._limits)
        return Outcome(fits.targets, context.prediction, stages, fits)

    def _predicted(self, context: Context) -> Prediction:
        """Each figure as the first plugin says that says it."""
        found = context.prediction
        for said in self._answers(Stage.PREDICT, context):
            if isinstance(said, Prediction):
                found = _filled(found, said)
        return found

    def _answers(self, stage: Stage, context: Context) -> list[Proposal | Prediction | None]:
        return [self._answer(p, context) for p in self._plugins if p.stage is stage]

    def _answer(self, plugin: Plugin, context: Context) -> Proposal | Prediction | None:
        last = self._last.get(plugin.name)
        if last is not None and context.now_s - last.at_s < plugin.interval_s - 1e-6:
            return last.said if plugin.holds else None
        said = plugin.evaluate(context)
        self._last[plugin.name] = _Answered(context.now_s, said)
        return said


def _filled(known: Prediction, said: Prediction) -> Prediction:
    """A prediction with what another one says of figures that it has not; 0.0 is a value."""
    missing = {
        name: getattr(said, name)
        for name in Prediction.__dataclass_fields__
        if getattr(known, name) is None
    }
    return replace(known, **missing)
