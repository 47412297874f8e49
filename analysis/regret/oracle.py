"""The oracle: at each HEAVY decision it tries every action and runs each future to its end.

A Probe wraps the policy under test and branches the run for every action. Its mode says what it
does then: follow the policy (watch), take the action that turned out best (rollout: one step of
policy improvement), or only postpone the policy's action (placebo).

The placebo is the noise floor. A fleet is chaotic: a request moved by a few milliseconds moves
thousands of later ones, so the best of a dozen runs is better in any case. The placebo keeps the
policy's action but may postpone it by multiples of 4 ms, with as many tries as the oracle had
actions; its gain is the gain of choosing among a dozen runs. For an oracle without hindsight
futures are resampled (`futures` > 1), the same ones for every action.

A rival with accounts of its own (smetric) charges its own choice even when another is forced.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from statistics import fmean
from typing import Any

from analysis.regret.actions import Action, View, actions, forced, is_heavy, view
from analysis.regret.branching import BranchingFleet, BranchOutcome, Postponed
from proxy.core.placement.scene import Choice, Decide, PlacementView
from replayer.virtual.requests import LiveRequest

PLACEBO_STEP_S = 0.004


class Mode(Enum):
    """What a Probe does after every action was tried."""

    WATCH = "watch"
    ROLLOUT = "rollout"
    PLACEBO = "placebo"


@dataclass(slots=True)
class Tried:
    """One action (or postponement) and its outcomes, one per future."""

    action: Action
    outcomes: list[BranchOutcome] = field(default_factory=list)

    @property
    def cost_s(self) -> float:
        """Summed cost of all requests that count, mean over futures, seconds."""
        return fmean(one.cost_s for one in self.outcomes)

    @property
    def objective_s(self) -> float:
        """Cost per request, mean over futures: J, seconds."""
        return fmean(one.cost_s / one.requests for one in self.outcomes)

    @property
    def own_ttft_s(self) -> float | None:
        """TTFT of the decided request, mean over futures; None if it failed in any of them."""
        found = [one.own_ttft_s for one in self.outcomes if one.own_ttft_s is not None]
        return fmean(found) if len(found) == len(self.outcomes) else None

    def as_dict(self, home: str | None) -> dict[str, Any]:
        """Return the JSON form; times in seconds."""
        return {
            **asdict(self.action),
            "kind": self.action.kind(home),
            "objective_s": self.objective_s,
            "cost_s": self.cost_s,
            "costs_s": [one.cost_s for one in self.outcomes],
            "own_ttft_s": self.own_ttft_s,
        }


@dataclass(slots=True)
class JudgedDecision:
    """One HEAVY decision with the outcomes of every action; `tried[0]` is the policy's own."""

    number: int
    at_s: float
    request: int
    session_id: str
    prompt_tokens: int
    home: str | None
    predicted_ttft_s: float | None
    views: tuple[View, ...]
    tried: list[Tried]
    placebo: list[Tried] = field(default_factory=list)

    @property
    def chosen(self) -> Tried:
        """The policy's action."""
        return self.tried[0]

    @property
    def best(self) -> Tried:
        """The action with the least cost; the policy's own if none is better."""
        return min(self.tried, key=lambda one: one.cost_s)

    @property
    def gap_s(self) -> float:
        """Cost saved by the best action over all requests, in seconds; never negative."""
        return self.chosen.cost_s - self.best.cost_s

    @property
    def gap_ratio(self) -> float:
        """`gap_s` relative to the best action's cost."""
        return self.gap_s / self.best.cost_s

    @property
    def own_gap_s(self) -> float:
        """The part of `gap_s` due to the request's own TTFT, of any sign; 0 if unknown."""
        chosen_s, best_s = self.chosen.own_ttft_s, self.best.own_ttft_s
        return 0.0 if chosen_s is None or best_s is None else chosen_s - best_s

    @property
    def floor_ratio(self) -> float:
        """Relative gap to the best postponement; 0 without a placebo."""
        luckiest_s = min([one.cost_s for one in self.placebo], default=self.chosen.cost_s)
        return max(0.0, self.chosen.cost_s / luckiest_s - 1.0)

    @property
    def held_out_ratio(self) -> float | None:
        """Relative gap in one future to the action that is best in all others, mean over futures.

        Chosen and judged on different futures, the action cannot fit noise, so the gap may have any
        sign. None with one future.
        """
        return held_out_ratio([[o.cost_s for o in one.outcomes] for one in self.tried])

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form; times in seconds."""
        return {
            "number": self.number,
            "at_s": self.at_s,
            "request": self.request,
            "session_id": self.session_id,
            "prompt_tokens": self.prompt_tokens,
            "home": self.home,
            "predicted_ttft_s": self.predicted_ttft_s,
            "requests": self.chosen.outcomes[0].requests,
            "chosen": self.chosen.as_dict(self.home),
            "best": self.best.as_dict(self.home),
            "gap_s": self.gap_s,
            "gap_ratio": self.gap_ratio,
            "held_out_ratio": self.held_out_ratio,
            "floor_ratio": self.floor_ratio,
            "candidates": [asdict(one) for one in self.views],
            "tried": [one.as_dict(self.home) for one in self.tried],
        }


def held_out_ratio(costs_s: Sequence[Sequence[float]]) -> float | None:
    """`JudgedDecision.held_out_ratio` of costs by action (the policy's first) and future."""
    futures = len(costs_s[0])
    if futures < 2:
        return None
    gaps = []
    for out in range(futures):
        rest = [sum(c for f, c in enumerate(one) if f != out) for one in costs_s]
        best = rest.index(min(rest))
        gaps.append(costs_s[0][out] / costs_s[best][out] - 1.0)
    return fmean(gaps)


@dataclass(frozen=True, slots=True)
class RegretRun:
    """The results: one row of figures, and the decisions at which every action was tried."""

    row: dict[str, Any]
    decisions: list[JudgedDecision]


class Probe:
    """A Decide that wraps the policy's. `wanted`: numbers of the decisions to try; None: all."""

    def __init__(self, policy: Decide, mode: Mode, wanted: frozenset[int] | None = None) -> None:
        self.decisions: list[JudgedDecision] = []
        self.seen = 0
        """HEAVY decisions so far."""
        self._policy = policy
        self._mode = mode
        self._wanted = wanted
        self._fleet: BranchingFleet | None = None
        self._postponed: LiveRequest | None = None

    def attach(self, fleet: BranchingFleet) -> None:
        """Set the fleet whose router calls this; without one the policy decides alone."""
        self._fleet = fleet

    def __call__(self, scene: PlacementView) -> Choice:
        """Decide as the policy does; at a wanted HEAVY decision, as the mode says."""
        fleet = self._fleet
        choice = self._policy(scene)
        if fleet is None or fleet.is_branch or not is_heavy(scene, choice):
            return choice
        live, self._postponed = self._postponed, None
        if live is not None and live is fleet.asked:
            return choice
        number, self.seen = self.seen, self.seen + 1
        if self._wanted is not None and number not in self._wanted:
            return choice
        return self._look(fleet, scene, choice, number)

    def _look(
        self, fleet: BranchingFleet, scene: PlacementView, choice: Choice, number: int
    ) -> Choice:
        decision = _noted(fleet, scene, choice, number)
        for tried in decision.tried if self._mode is not Mode.PLACEBO else decision.tried[:1]:
            if not self._play(fleet, scene, decision, tried):
                own = tried is decision.chosen
                return choice if own else forced(scene, tried.action)
        if self._mode is not Mode.ROLLOUT:
            self._try_placebo(fleet, scene, decision)
        self.decisions.append(decision)
        if self._mode is Mode.ROLLOUT and decision.best is not decision.chosen:
            return forced(scene, decision.best.action)
        if self._mode is Mode.PLACEBO:
            self._be_lucky(fleet, decision)
        return choice

    def _try_placebo(
        self, fleet: BranchingFleet, scene: PlacementView, decision: JudgedDecision
    ) -> None:
        for step in range(1, len(decision.tried)):
            tried = Tried(decision.chosen.action)
            if not self._play(fleet, scene, decision, tried):
                raise Postponed(step * PLACEBO_STEP_S)
            decision.placebo.append(tried)

    def _be_lucky(self, fleet: BranchingFleet, decision: JudgedDecision) -> None:
        costs_s = [decision.chosen.cost_s, *(one.cost_s for one in decision.placebo)]
        step = costs_s.index(min(costs_s))
        decision.tried = decision.tried[:1]
        if step:
            self._postponed = fleet.asked
            raise Postponed(step * PLACEBO_STEP_S)

    def _play(
        self, fleet: BranchingFleet, scene: PlacementView, decision: JudgedDecision, tried: Tried
    ) -> bool:
        """Branch once per future; False in the child, which then takes the action."""
        futures, seed = fleet.terms.futures, fleet.terms.seed
        for future in range(futures):
            draw = None
            if futures > 1:
                draw = random.Random(f"future {seed} {decision.number} {future}")
            first = decision.chosen.outcomes
            members = first[future].members if len(first) > future else None
            outcome = fleet.branch(scene.now_s, draw, members)
            if outcome is None:
                return False
            tried.outcomes.append(outcome)
        return True


def _noted(
    fleet: BranchingFleet, scene: PlacementView, choice: Choice, number: int
) -> JudgedDecision:
    live = fleet.asked
    return JudgedDecision(
        number=number,
        at_s=scene.now_s,
        request=live.index if live is not None else -1,
        session_id=live.row.session_id if live is not None else "",
        prompt_tokens=scene.facts.prompt_tokens,
        home=scene.home,
        predicted_ttft_s=choice.predicted_ttft_s,
        views=tuple(view(scene, c) for c in scene.free),
        tried=[Tried(one) for one in actions(scene, choice)],
    )
