"""Results of an oracle: outcomes of branches, actions tried, decisions judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from analysis.regret.actions import Action, View


@dataclass(frozen=True, slots=True)
class BranchOutcome:
    """A branch's outcome: cost of its members (None: all requests), TTFT of the decided request."""

    cost_s: float
    requests: int
    own_ttft_s: float | None
    members: tuple[int, ...] | None


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
