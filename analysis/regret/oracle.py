"""The oracle: at each HEAVY decision it tries every action and runs each future to its end.

A Probe wraps the policy under test and branches the run for every action. Its mode then decides:
follow the policy (watch), take the best action (rollout: one step of policy improvement), or only
postpone the policy's action (placebo).

The placebo is the noise floor. A fleet is chaotic: a request moved by a few milliseconds moves
thousands of later ones, so the best of a dozen runs is better in any case. The placebo keeps the
policy's action but may postpone it by multiples of 4 ms, with as many tries as the oracle had
actions. Its gain is the gain of choosing among a dozen runs. For an oracle without hindsight
futures are resampled (`futures` > 1), the same ones for every action.

A rival with accounts of its own (smetric) charges its own choice even when another is forced.
"""

from __future__ import annotations

import random
from enum import Enum

from analysis.regret.actions import actions, forced, is_heavy, view
from analysis.regret.branching import BranchingFleet, Postponed
from analysis.regret.outcomes import JudgedDecision, Tried
from proxy.core.placement.decision import Choice, Decide, PlacementView
from replayer.virtual.fleet import LiveRequest

PLACEBO_STEP_S = 0.004


class Mode(Enum):
    """A Probe's step after every action was tried."""

    WATCH = "watch"
    ROLLOUT = "rollout"
    PLACEBO = "placebo"


class Probe:
    """A Decide that wraps the policy's. `wanted`: numbers of the decisions to try; None: all.

    Without `offloads` only the instances that compute and decode alone are tried.
    """

    def __init__(
        self,
        policy: Decide,
        mode: Mode,
        wanted: frozenset[int] | None = None,
        *,
        offloads: bool = True,
    ) -> None:
        self.decisions: list[JudgedDecision] = []
        self.seen = 0
        """HEAVY decisions so far."""
        self._policy = policy
        self._mode = mode
        self._wanted = wanted
        self._offloads = offloads
        self._fleet: BranchingFleet | None = None
        self._postponed: LiveRequest | None = None

    def attach(self, fleet: BranchingFleet) -> None:
        """Set the fleet whose router calls this; without one the policy decides alone."""
        self._fleet = fleet

    def __call__(self, scene: PlacementView) -> Choice:
        """Decide as the policy does; at a wanted HEAVY decision, as the mode says.

        A retry is the policy's alone: its request is in the middle of its life, and can be neither
        postponed nor begun anew.
        """
        fleet = self._fleet
        choice = self._policy(scene)
        if fleet is None or fleet.is_branch or fleet.asked is None or not is_heavy(scene, choice):
            return choice
        live, self._postponed = self._postponed, None
        if live is fleet.asked:
            return choice
        number, self.seen = self.seen, self.seen + 1
        if self._wanted is not None and number not in self._wanted:
            return choice
        return self._look(fleet, scene, choice, number)

    def _look(
        self, fleet: BranchingFleet, scene: PlacementView, choice: Choice, number: int
    ) -> Choice:
        tried = [Tried(one) for one in actions(scene, choice, offloads=self._offloads)]
        decision = _noted(fleet, scene, choice, number, tried)
        for one in decision.tried if self._mode is not Mode.PLACEBO else decision.tried[:1]:
            if not self._play(fleet, scene, decision, one):
                own = one is decision.chosen
                return choice if own else forced(scene, one.action)
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
    fleet: BranchingFleet, scene: PlacementView, choice: Choice, number: int, tried: list[Tried]
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
        tried=tried,
    )
