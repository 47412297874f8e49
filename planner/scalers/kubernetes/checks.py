"""What is checked of a cluster before the planner starts, so that no decision fails for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.config.components import Component
from planner.scalers.base import Failure, ScalerError
from planner.scalers.kubernetes.api import AUTOSCALERS, PODS, Api, understood
from planner.scalers.kubernetes.objects import Scalable, gpus_per_replica, model_of, services_of
from planner.scalers.kubernetes.options import Resource


async def check(api: Api, components: Sequence[Component], found: Mapping[str, Scalable]) -> None:
    """Rights, GPUs, models and rivals of every component. What is wrong is a `ScalerError`."""
    await _check_rights(api, list(found.values()))
    models: dict[str, str] = {}
    for one in components:
        scaled = found[one.name]
        await scaled.read(api)
        seen = await api.get(scaled.resource)
        with understood(scaled):
            _check_gpus(one, scaled, seen)
            models[one.name] = model_of(scaled, seen) or ""
        if rival := await autoscaler(api, scaled):
            text = f"{rival} in namespace {api.namespace} scales {scaled} too; delete it"
            raise ScalerError(Failure.CONFLICT, text)
    _check_models(models)


async def autoscaler(api: Api, scaled: Scalable) -> str:
    """Another one that scales an object, by its name; empty: there is none."""
    answer = await api.list(AUTOSCALERS)
    with understood(AUTOSCALERS):
        for one in answer:
            target = one["spec"]["scaleTargetRef"]
            group = target.get("apiVersion", "").rpartition("/")[0]
            scales = (group, f"{target['kind'].lower()}s", target["name"])
            if scales in (
                (of.group, of.plural, of.name) for of in (scaled.resource, scaled.adapter)
            ):
                return str(AUTOSCALERS.of(one["metadata"]["name"]))
    return ""


async def _check_rights(api: Api, found: Sequence[Scalable]) -> None:
    """Ask for every right before the first decision needs it, and name all that are missing."""
    wanted: dict[tuple[str, Resource, str], None] = {
        ("list", PODS, ""): None,
        ("patch", PODS, ""): None,
        ("list", AUTOSCALERS, ""): None,
    }
    for one in found:
        wanted |= dict.fromkeys((verb, one.adapter, "scale") for verb in ("get", "patch"))
        if one.service:
            wanted["patch", one.resource, ""] = None
    lacks = [
        f"{verb} {resource}{f'/{sub}' * bool(sub)}"
        for verb, resource, sub in wanted
        if not await api.may(verb, resource, sub)
    ]
    if lacks:
        text = f"the planner's account may not {', '.join(lacks)} in namespace {api.namespace}"
        raise ScalerError(Failure.FORBIDDEN, f"{text}; see kubernetes/planner.yaml in configs/")


def _check_gpus(component: Component, scaled: Scalable, seen: Mapping[str, Any]) -> None:
    gpus = gpus_per_replica(scaled, seen)
    if gpus not in (None, component.gpus_per_replica):
        text = f"{scaled} asks for {gpus} GPUs for each replica"
        text += f"; gpus_per_replica of component {component.name} is {component.gpus_per_replica}"
        raise ScalerError(Failure.FAILED, text)
    if scaled.service:
        nodes = (services_of(seen)[scaled.service].get("multinode") or {}).get("nodeCount", 1)
        if nodes > 1:
            text = f"{scaled}: a replica has pods on {nodes} nodes; only pods that are whole"
            raise ScalerError(Failure.FAILED, f"{text} replicas can be drained")


def _check_models(models: Mapping[str, str]) -> None:
    told = {name: model for name, model in models.items() if model}
    if len(set(told.values())) > 1:
        text = ", ".join(f"{name} {model}" for name, model in told.items())
        raise ScalerError(Failure.FAILED, f"the components serve different models: {text}")
