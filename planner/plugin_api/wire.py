"""A tick as the messages of the protocol have it, and what a plugin's answer means."""

from __future__ import annotations

from dataclasses import asdict

from planner.config.plugins import PluginSpec
from planner.core.pipeline import Failed, Said
from planner.core.types import (
    Context,
    FinalPrediction,
    Kind,
    Prediction,
    Proposal,
    Stage,
    Target,
    Traffic,
)
from planner.plugin_api import planner_plugin_pb2 as pb

PROTOCOL = 1
MOST_TARGETS = 64
MOST_TEXT = 200
_KINDS = {
    pb.SET: Kind.SET,
    pb.AT_LEAST: Kind.AT_LEAST,
    pb.AT_MOST: Kind.AT_MOST,
    pb.REJECT: Kind.REJECT,
}


def request_of(stage: Stage, context: Context) -> pb.EvaluateRequest:
    """What a plugin is asked."""
    told = pb.Context(
        tick=context.tick,
        now_s=context.now_s,
        components=[_component(name, context) for name in context.replicas],
        traffic=_traffic(context.traffic),
        recent=_traffic(context.recent),
        prediction=pb.Prediction(**asdict(context.prediction)),
    )
    return pb.EvaluateRequest(protocol=PROTOCOL, stage=stage.name, context=told)


def _component(name: str, context: Context) -> pb.Component:
    replicas, of = context.replicas[name], context.capabilities[name]
    return pb.Component(
        name=name,
        ready=replicas.ready,
        expected=replicas.expected,
        pending=replicas.pending,
        baseline=context.baseline.get(name, 0),
        **asdict(of),
        engines=[pb.Engine(**asdict(one)) for one in context.engines.get(name, ())],
    )


def _traffic(traffic: Traffic | None) -> pb.Traffic | None:
    return None if traffic is None else pb.Traffic(**asdict(traffic))


def said_of(answer: pb.EvaluateResponse, spec: PluginSpec) -> Said | Failed:
    """What an answer says at the plugin's stage; its name and priority are ours."""
    if Stage(spec.stage) is Stage.PREDICT:
        told = answer.prediction
        names = Prediction.__dataclass_fields__
        figures = {name: getattr(told, name) for name in names if told.HasField(name)}
        return FinalPrediction(**figures) if figures and answer.is_final else Prediction(**figures)
    if not answer.targets:
        return None
    if len(answer.targets) > MOST_TARGETS:
        return Failed(f"{len(answer.targets)} targets, at most {MOST_TARGETS}")
    kinds = [_KINDS.get(target.kind) for target in answer.targets]
    targets = tuple(
        Target(target.component, kind, target.replicas)
        for target, kind in zip(answer.targets, kinds, strict=True)
        if kind is not None
    )
    if len(targets) < len(kinds):
        return Failed("a target of no kind: SET, AT_LEAST, AT_MOST or REJECT")
    return Proposal(spec.name, targets, spec.priority, answer.is_final, plain(answer.reason))


def plain(text: str) -> str:
    """A plugin's text as one short line that a terminal can show."""
    kept = "".join(one if one.isprintable() else " " for one in text[: 4 * MOST_TEXT])
    return " ".join(kept.split())[:MOST_TEXT]
