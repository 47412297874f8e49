"""How proposals become one number per component: rejections, floors, ceilings, wishes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from planner.core.types import Kind, Prediction, Proposal, Stage, Target

MOST_REPLICAS = 10**5
"""Of a component, in what a plugin of another process says."""
BOUNDS = {
    "next_num_req": (0.0, 1e9),
    "next_isl": (0.0, 1e7),
    "next_osl": (0.0, 1e7),
    "hit_ratio": (0.0, 1.0),
    "accept_length": (1.0, 65.0),
}
"""Least and most of each predicted figure."""


@dataclass(frozen=True, slots=True)
class Merged:
    """The outcome of a stage. `rejected_by`: the plugin that stopped the tick, if one did.

    `dropped`: plugins and components of wishes that the stage does not know.
    """

    targets: Mapping[str, int]
    rejected_by: str = ""
    dropped: tuple[tuple[str, str], ...] = ()


def merge(stage: Stage, proposals: Sequence[Proposal], baseline: Mapping[str, int]) -> Merged:
    """One number per component of `baseline`, or of any proposal.

    A REJECT stops the tick, also beside a final proposal. Else the final one of the smallest
    priority counts alone; CONSTRAIN knows none. Else the highest floor beats the lowest ceiling,
    which beats the SET of the smallest priority, which beats the baseline. CONSTRAIN has no SET.
    """
    ordered = sorted(proposals, key=lambda proposal: (proposal.priority, proposal.plugin))
    for proposal in ordered:
        if any(target.kind is Kind.REJECT for target in proposal.targets):
            return Merged(dict(baseline), rejected_by=proposal.plugin)
    dropped: list[tuple[str, str]] = []
    if stage is Stage.CONSTRAIN:
        for proposal in ordered:
            dropped += [(proposal.plugin, t.component) for t in proposal.targets if _is_set(t)]
        wishes = [t for proposal in ordered for t in proposal.targets if not _is_set(t)]
    else:
        final = next((proposal for proposal in ordered if proposal.is_final), None)
        counted = ordered if final is None else [final]
        wishes = [target for proposal in counted for target in proposal.targets]
    merged = dict(baseline)
    for component in {target.component for target in wishes}:
        own = [target for target in wishes if target.component == component]
        merged[component] = _of_one(own, baseline.get(component, 0))
    return Merged(merged, dropped=tuple(dropped))


def _is_set(target: Target) -> bool:
    return target.kind is Kind.SET


def _of_one(targets: Sequence[Target], baseline: int) -> int:
    """The number of one component; its targets are in order of priority."""
    wish = next((target.replicas for target in targets if target.kind is Kind.SET), baseline)
    ceilings = [target.replicas for target in targets if target.kind is Kind.AT_MOST]
    floors = [target.replicas for target in targets if target.kind is Kind.AT_LEAST]
    return max(0, *floors, min([wish, *ceilings]))


def usable(
    said: Proposal | Prediction | None, components: Collection[str]
) -> tuple[Proposal | Prediction | None, tuple[str, ...]]:
    """What has a meaning in what a plugin of another process says, and names of the rest."""
    if said is None:
        return None, ()
    if isinstance(said, Prediction):
        # A comparison with NaN is false.
        wrong = {
            name: value
            for name, (least, most) in BOUNDS.items()
            if (value := getattr(said, name)) is not None and not least <= value <= most
        }
        named = tuple(f"{name} {value:g}" for name, value in wrong.items())
        kept_figures = asdict(said) | dict.fromkeys(wrong)
        return (Prediction(**kept_figures) if wrong else said), named  # a part is not final
    kept: list[Target] = []
    dropped: list[Target] = []
    for target in said.targets:
        (kept if _has_meaning(target, components) else dropped).append(target)
    named = tuple(f"{one.kind} {one.replicas} of {one.component[:64]!r}" for one in dropped)
    # A part of what was to be final is not.
    return replace(said, targets=tuple(kept), is_final=said.is_final and not dropped), named


def _has_meaning(target: Target, components: Collection[str]) -> bool:
    is_known = target.component in components and 0 <= target.replicas <= MOST_REPLICAS
    return is_known or target.kind is Kind.REJECT
