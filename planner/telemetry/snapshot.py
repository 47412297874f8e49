"""One tick as a document: what was seen, predicted, proposed and decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from planner.core.builtin import Builtin
from planner.core.pipeline import Heard, Outcome
from planner.core.propose.load import Judge, LoadDecision
from planner.core.propose.reserve import ReserveDecision
from planner.core.propose.throughput import ThroughputDecision
from planner.core.types import Context, FinalPrediction, Kind, Proposal, Target


class TickOutcome(StrEnum):
    """How a tick has ended."""

    APPLY = "apply"
    ADVISORY = "advisory"
    NO_DATA = "no_data"
    UNCHANGED = "unchanged"
    REJECTED = "rejected"
    TIMEOUT = "tick_timeout"
    IN_PROGRESS = "in_progress"
    FAILED = "scaler_failed"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A tick. `at`: seconds of the epoch. `seen` and `decided` are None where nothing was read."""

    tick: int
    at: float
    outcome: TickOutcome
    duration_s: float
    targets: Mapping[str, int]
    seen: Mapping[str, Any] | None = None
    decided: Mapping[str, Any] | None = None
    waits_for: str = ""
    failure: str = ""


def seen_of(context: Context, builtin: Builtin) -> dict[str, Any]:
    """Replicas, traffic, and what an average request would meet on each instance now."""
    traffic = context.traffic
    return {
        "replicas": {name: asdict(one) for name, one in context.replicas.items()},
        "traffic": None if traffic is None else asdict(traffic),
        "engines": {
            name: [_engine(builtin, name, engine, context) for engine in engines]
            for name, engines in context.engines.items()
        },
    }


def _engine(builtin: Builtin, component: str, engine: Any, context: Context) -> dict[str, Any]:
    model, typical = builtin.state.model(component), builtin.load.typical()
    told = asdict(engine)
    if model is None or typical is None:
        return told
    found = Judge(model, typical, context.capabilities[component]).estimate(engine)
    return told | {"ttft_s": found.ttft_s, "itl_s": found.itl_s}


def decided_of(outcome: Outcome, builtin: Builtin) -> dict[str, Any]:
    """Targets of time, the prediction, what each loop has decided, what limits have made of it."""
    return {
        "slo": asdict(builtin.rules.slo),
        "prediction": asdict(outcome.prediction),
        "load": {name: str(one) for name, one in builtin.load.decisions.items()},
        "throughput": {name: str(one) for name, one in builtin.throughput.decisions.items()},
        "reserve": {name: str(one) for name, one in builtin.reserve.decisions.items()},
        "needs": {name: asdict(one) for name, one in builtin.reserve.needs.items()},
        "floors": {name: one.replicas for name, one in builtin.state.floors.items()},
        "capacities": {name: asdict(one) for name, one in builtin.throughput.capacities.items()},
        "stages": {str(stage): dict(one.targets) for stage, one in outcome.stages.items()},
        "limits": outcome.limits.reason,
        "rejected_by": outcome.rejected_by,
        "targets": dict(outcome.targets),
        "plugins": [heard_of(one) for one in outcome.heard],
    }


def heard_of(one: Heard) -> dict[str, Any]:
    """What a plugin of another process has said, or why not."""
    said: dict[str, Any] = {}
    if isinstance(one.said, Proposal):
        targets = [_wish(target) for target in one.said.targets]
        said = {"says": targets, "final": one.said.is_final, "reason": one.said.reason}
    elif one.said is not None:
        figures = {k: v for k, v in asdict(one.said).items() if v is not None}
        said = {"predicts": figures, "final": isinstance(one.said, FinalPrediction)}
    told = {"name": one.name, "stage": one.stage, "state": one.how, **said}
    return told | {"failure": one.failure, "dropped": one.dropped}


def _wish(target: Target) -> str:
    if target.kind is Kind.REJECT:
        return "reject"
    return f"{target.kind} {target.replicas} of {target.component}"


def hold_of(decided: Mapping[str, Any]) -> str:
    """What keeps the planner from a target, in the words of the rules; empty where nothing does."""
    holds = {
        *(ReserveDecision.NO_DATA, ReserveDecision.NOT_READY),
        *(LoadDecision.NO_DATA, LoadDecision.INSUFFICIENT),
        *(ThroughputDecision.NO_DATA, ThroughputDecision.NOT_READY),
    }
    told = (decided[loop].items() for loop in ("throughput", "load", "reserve"))
    return ", ".join(f"{name}: {said}" for one in told for name, said in one if said in holds)


def reason_of(decided: Mapping[str, Any]) -> str:
    """Why a target changed, in a few words."""
    quiet = {
        *(LoadDecision.NO_CHANGE, LoadDecision.DISABLED),
        *(ThroughputDecision.DISABLED, ReserveDecision.SCALE),
    }
    parts = [
        f"{loop} of {name}: {said}"
        for loop in ("throughput", "load", "reserve")
        for name, said in decided[loop].items()
        if said not in quiet
    ]
    parts += [
        f"{name} needs {one['level']:.1f} now, {one['reserve']:.1f} in reserve,"
        f" {one['backlog']:.1f} for what waits"
        for name, one in decided["needs"].items()
    ]
    if decided["floors"]:
        floors = ", ".join(f"{name} {count}" for name, count in decided["floors"].items())
        parts.append(f"lower bound: {floors}")
    parts += [
        f"plugin {one['name']}: {', '.join(one['says'])}"
        for one in decided.get("plugins", ())
        if one.get("says")
    ]
    if decided["limits"]:
        parts.append(decided["limits"])
    return "; ".join(parts)
