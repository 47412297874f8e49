"""A tick: plugins are asked stage by stage, what they say is merged, limits have the last word.

Plugins of other processes are asked by the caller: `Pipeline.steps` yields whom to ask what.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from planner.core.budget import Bounded, Limits, bounded
from planner.core.merge import Merged, merge, usable
from planner.core.types import Context, FinalPrediction, Prediction, Proposal, Stage

MOST_FAILURES = 3
OFF_S = 60.0
"""A plugin that has failed so often in a row is not asked for so long; then once more."""
BUILTIN_PRIORITY = 100
"""That of the forecast that a context brings along."""
Said = Proposal | Prediction | None


class Plugin(Protocol):
    """One rule. `stage`: when it is asked; the smallest `priority` counts first."""

    name: str
    stage: Stage
    priority: int
    interval_s: float
    """Time between two answers; 0 for one in each tick."""
    holds: bool
    """Whether its last answer counts while none is due (HOLD_LAST); else it has none."""

    def evaluate(self, context: Context) -> Said:
        """What it says of this tick; None: nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Remote:
    """A plugin of another process, with the figures of a `Plugin`: whoever runs a tick asks it."""

    name: str
    stage: Stage
    priority: int
    interval_s: float = 0.0
    holds: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a plugin of another process has not answered, in a line."""

    reason: str


class How(StrEnum):
    """What came of a plugin of another process in a tick.

    HELD: its last answer counts. IDLE: none is due. OFF: it has failed too often.
    """

    ANSWERED = "answered"
    HELD = "held"
    IDLE = "idle"
    FAILED = "failed"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Heard:
    """What a plugin of another process has said in a tick. `dropped`: parts that have no meaning.

    `said` of one that has failed is its last answer, where it holds one.
    """

    name: str
    stage: Stage
    how: How
    said: Said = None
    failure: str = ""
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """Plugins of other processes to be asked at a stage, all at once."""

    plugins: tuple[Remote, ...]
    stage: Stage
    context: Context


Answers = Mapping[str, Said | Failed]
"""What each of them has said, by its name."""


@dataclass(slots=True)
class _Answered:
    """When a plugin answered last, and what."""

    at_s: float
    said: Said


@dataclass(slots=True)
class _Health:
    """How often a plugin has failed in a row, and until when it is not asked."""

    failures: int = 0
    off_until_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a tick has come to. `rejected_by`: the plugin that stopped it, if one did."""

    targets: Mapping[str, int]
    prediction: Prediction
    stages: Mapping[Stage, Merged]
    limits: Bounded
    rejected_by: str = ""
    heard: tuple[Heard, ...] = ()
    """Of plugins of other processes."""

    @property
    def dropped(self) -> dict[str, list[str]]:
        """Wishes that the stages do not know, by plugin."""
        found: dict[str, list[str]] = {}
        for stage, merged in self.stages.items():
            for plugin, component in merged.dropped:
                found.setdefault(plugin, []).append(f"set of {component} at the stage {stage}")
        return found


Steps = Generator[Ask, Answers, Outcome]
"""A tick that waits for plugins of other processes, and returns its outcome."""


def finished(steps: Steps) -> Outcome:
    """A tick without plugins of other processes."""
    try:
        next(steps)
        while True:
            steps.send({})
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome


class Pipeline:
    """Asks plugins in the order of stages and of their priorities."""

    def __init__(self, plugins: Sequence[Plugin], limits: Limits) -> None:
        self._plugins: list[Plugin | Remote] = sorted(plugins, key=_order)
        self._limits = limits
        self._last: dict[str, _Answered] = {}
        self._health: dict[str, _Health] = {}

    def add(self, plugin: Remote) -> None:
        """Ask one more plugin, of a name that no other one has."""
        self._plugins = sorted([*self._plugins, plugin], key=_order)

    def remove(self, name: str) -> None:
        """Ask a plugin no more, and forget what it has said."""
        self._plugins = [plugin for plugin in self._plugins if plugin.name != name]
        self._last.pop(name, None)
        self._health.pop(name, None)

    def tick(self, context: Context) -> Outcome:
        """Decide once without plugins of other processes, from the targets in the baseline."""
        return finished(self.steps(context))

    def steps(self, context: Context) -> Steps:
        """Decide once, from the current targets in `context.baseline`."""
        heard: list[Heard] = []
        predicted = yield from self._predicted(context, heard)
        context = replace(context, prediction=predicted)
        targets = dict(context.baseline)
        stages: dict[Stage, Merged] = {}
        for stage in (Stage.PROPOSE, Stage.RECONCILE, Stage.CONSTRAIN):
            asked = replace(context, baseline=targets)
            answers = yield from self._answers(stage, asked, heard)
            said = [one for one in answers if isinstance(one, Proposal)]
            stages[stage] = merged = merge(stage, said, targets)
            if merged.rejected_by:
                kept = Bounded(dict(context.baseline))
                name = merged.rejected_by
                return Outcome(kept.targets, predicted, stages, kept, name, tuple(heard))
            targets = dict(merged.targets)
        fits = bounded(context.baseline, targets, self._limits)
        return Outcome(fits.targets, predicted, stages, fits, heard=tuple(heard))

    def _predicted(
        self, context: Context, heard: list[Heard]
    ) -> Generator[Ask, Answers, Prediction]:
        """Each figure as the first plugin says that says it; behind a final one none does."""
        own = [one.priority for one in self._plugins if one.stage is Stage.PREDICT]
        answers = yield from self._answers(Stage.PREDICT, context, heard)
        said = [(BUILTIN_PRIORITY, context.prediction), *zip(own, answers, strict=True)]
        found = Prediction()
        for _, one in sorted(said, key=lambda told: told[0]):
            if isinstance(one, Prediction):
                found = _filled(found, one)
            if isinstance(one, FinalPrediction):
                break
        return found

    def _answers(
        self, stage: Stage, context: Context, heard: list[Heard]
    ) -> Generator[Ask, Answers, list[Said]]:
        """What the plugins of a stage say, in the order of their priorities."""
        own = [plugin for plugin in self._plugins if plugin.stage is stage]
        asked = tuple(p for p in own if isinstance(p, Remote) and self._is_asked(p, context.now_s))
        told: Answers = (yield Ask(asked, stage, context)) if asked else {}
        said: list[Said] = []
        for plugin in own:
            if isinstance(plugin, Remote):
                heard.append(self._hear(plugin, told, context))
                said.append(heard[-1].said)
            else:
                said.append(self._answer(plugin, context))
        return said

    def _answer(self, plugin: Plugin, context: Context) -> Said:
        if not self._is_due(plugin, context.now_s):
            return self._held(plugin)
        said = plugin.evaluate(context)
        self._last[plugin.name] = _Answered(context.now_s, said)
        return said

    def _is_due(self, plugin: Plugin | Remote, now_s: float) -> bool:
        last = self._last.get(plugin.name)
        return last is None or now_s - last.at_s >= plugin.interval_s - 1e-6

    def _held(self, plugin: Plugin | Remote) -> Said:
        last = self._last.get(plugin.name)
        return last.said if last is not None and plugin.holds else None

    def _is_off(self, name: str, now_s: float) -> bool:
        health = self._health.get(name)
        return health is not None and now_s < health.off_until_s

    def _is_asked(self, plugin: Remote, now_s: float) -> bool:
        return self._is_due(plugin, now_s) and not self._is_off(plugin.name, now_s)

    def holding(self, now_s: float) -> list[str]:
        """Plugins of other processes whose last answer will count now without their being asked."""
        return [
            plugin.name
            for plugin in self._plugins
            if isinstance(plugin, Remote)
            and self._held(plugin) is not None
            and not self._is_due(plugin, now_s)
        ]

    def failed(self, name: str, now_s: float) -> None:
        """A plugin of another process does not answer. After some such times it is off for a while.

        What it has said last is forgotten then.
        """
        health = self._health.setdefault(name, _Health())
        health.failures += 1
        if health.failures >= MOST_FAILURES:
            health.off_until_s = now_s + OFF_S
            self._last.pop(name, None)

    def _hear(self, plugin: Remote, told: Answers, context: Context) -> Heard:
        name, stage, now_s = plugin.name, plugin.stage, context.now_s
        if self._is_off(name, now_s):
            return Heard(name, stage, How.OFF)
        if name not in told:
            said = self._held(plugin)
            return Heard(name, stage, How.IDLE if said is None else How.HELD, said)
        answer = told[name]
        if plugin not in self._plugins:  # it has gone while it was asked
            return Heard(name, stage, How.IDLE)
        if isinstance(answer, Failed):
            self.failed(name, now_s)
            return Heard(name, stage, How.FAILED, self._held(plugin), answer.reason)
        said, dropped = usable(answer, context.baseline)
        self._health.pop(name, None)
        self._last[name] = _Answered(now_s, said)
        return Heard(name, stage, How.ANSWERED, said, dropped=dropped)


def _order(plugin: Plugin | Remote) -> tuple[int, str]:
    return plugin.priority, plugin.name


def _filled(known: Prediction, said: Prediction) -> Prediction:
    """A prediction with what another one says of figures that it has not; 0.0 is a value."""
    missing = {
        name: getattr(said, name)
        for name in Prediction.__dataclass_fields__
        if getattr(known, name) is None
    }
    return replace(known, **missing)
