"""Objects that have replicas: where these are read and set, and what their templates say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from planner.core.types import COMPONENT
from planner.scalers.base import Failure, ScalerError
from planner.scalers.kubernetes.api import Api, understood
from planner.scalers.kubernetes.options import Resource

LABEL = "cache-planner/component"
"""The label of a graph deployment's service that says which component it is."""
TYPES = {COMPONENT: (COMPONENT, "decode")}
"""Names that a component's type may have beside its own: Dynamo's aggregated workers decode."""
NAMES = {
    "prefill": ("VllmPrefillWorker", "SGLangPrefillWorker", "TRTLLMPrefillWorker", "prefill"),
    "decode": ("VllmDecodeWorker", "SGLangDecodeWorker", "TRTLLMDecodeWorker", "decode"),
    COMPONENT: ("VllmWorker", "TRTLLMWorker", "VllmDecodeWorker", "SGLangDecodeWorker"),
}
"""What Dynamo's examples called the services before these had types."""
_MODEL = ("--served-model-name", "--model-name", "--model")

Body = Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas that an object is told to have, as they were read.

    `at`: the object, and `sub` the part of it, that `body` changes. `selector`: labels of its pods.
    """

    count: int
    selector: str
    at: Resource
    sub: str
    version: str
    path: tuple[str | int, ...] = ()

    def body(self, count: int) -> Body:
        """The change to other replicas; a conflict if somebody changed the object meanwhile."""
        match self.path:
            case (int(index),):
                return [
                    {"op": "replace", "path": "/metadata/resourceVersion", "value": self.version},
                    {"op": "add", "path": f"/spec/components/{index}/replicas", "value": count},
                ]
            case (str(service),):
                spec: dict[str, Any] = {"services": {service: {"replicas": count}}}
            case _:
                spec = {"replicas": count}
        return {"metadata": {"resourceVersion": self.version}, "spec": spec}


@dataclass(frozen=True, slots=True)
class Scalable:
    """A component's object. Of a graph deployment: one of its services, by its name.

    `start`: the first ordinal of its pods, where those are numbered.
    """

    resource: Resource
    service: str = ""
    start: int = 0

    @property
    def adapter(self) -> Resource:
        """What autoscalers scale: the object itself, or what Dynamo made of a service for them."""
        if not self.service:
            return self.resource
        of = self.resource
        name = f"{of.name}-{self.service.lower()}"
        return Resource(of.group, of.version, "dynamographdeploymentscalingadapters", name)

    def __str__(self) -> str:
        return f"{self.resource}{f' ({self.service})' * bool(self.service)}"

    async def read(self, api: Api) -> Replicas:
        """Its replicas: of its scale, else, where a service has no adapter, of the graph."""
        try:
            scale = await api.get(self.adapter, "scale")
            with understood(self):
                return self._of_scale(scale)
        except ScalerError as error:
            if not self.service or error.failure is not Failure.MISSING:
                raise
        graph = await api.get(self.resource)
        with understood(self):
            return self._of_graph(graph)

    def _of_scale(self, scale: Mapping[str, Any]) -> Replicas:
        selector = (scale.get("status") or {}).get("selector") or self._labels()
        if not selector:
            text = f"the scale of {self} names no selector, so its pods are not known"
            raise ScalerError(Failure.FAILED, text)
        count = (scale.get("spec") or {}).get("replicas", 0)  # the API leaves a 0 out
        return Replicas(count, selector, self.adapter, "scale", _version(scale))

    def _of_graph(self, graph: Mapping[str, Any]) -> Replicas:
        services = services_of(graph)
        if self.service not in services:
            text = f"{self.resource} has no service {self.service} any more"
            raise ScalerError(Failure.MISSING, text)
        index = list(services).index(self.service)
        path = (index if "components" in graph["spec"] else self.service,)
        count = services[self.service].get("replicas", 1)
        return Replicas(count, self._labels(), self.resource, "", _version(graph), path)

    def _labels(self) -> str:
        """Those that Dynamo's operator gives the pods of a service."""
        graph, component = "nvidia.com/dynamo-graph-deployment-name", "nvidia.com/dynamo-component"
        return f"{graph}={self.resource.name},{component}={self.service}" if self.service else ""


def _version(of: Mapping[str, Any]) -> str:
    return str(of["metadata"]["resourceVersion"])


def scalable(resource: Resource, seen: Mapping[str, Any], component: str) -> Scalable:
    """A component's part of an object that was read."""
    with understood(resource):
        return _scalable(resource, seen, component)


def _scalable(resource: Resource, seen: Mapping[str, Any], component: str) -> Scalable:
    if resource.is_graph:
        return Scalable(resource, service_named(resource, seen, component))
    ordinals = seen["spec"].get("ordinals") or {}
    return Scalable(resource, start=ordinals.get("start", 0))


def services_of(graph: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """A graph deployment's services by name, of either version of the API."""
    spec = graph["spec"]
    if "components" in spec:
        return {one["name"]: one for one in spec["components"]}
    return dict(spec.get("services") or {})


def service_named(resource: Resource, graph: Mapping[str, Any], component: str) -> str:
    """The service that is a component: by its type, else by a label, else by a known name."""
    services = services_of(graph)
    types = TYPES.get(component, (component,))
    ways = [[name for name, one in services.items() if _type(one) == said] for said in types]
    ways.append([name for name, one in services.items() if component in _labelled(one)])
    known = NAMES.get(component, ())
    ways.append([name for name in known if name in services and not _type(services[name])][:1])
    found = next((way for way in ways if way), [])
    if len(found) > 1:
        text = f"{resource}: services {', '.join(found)} are all {component}; one may be"
        raise ScalerError(Failure.FAILED, text)
    if not found:
        have = ", ".join(services) or "none"
        text = (
            f"{resource}: no service is {component} by type, label {LABEL} or name; it has {have}"
        )
        raise ScalerError(Failure.MISSING, text)
    return found[0]


def _type(service: Mapping[str, Any]) -> str:
    """What a service is: `worker` and the like leave it open."""
    said = service.get("subComponentType") or service.get("type") or ""
    return "" if said == "worker" else str(said)


def _labelled(service: Mapping[str, Any]) -> Iterator[str]:
    """What its labels say that it is."""
    template = service.get("podTemplate") or {}
    for of in (service, service.get("extraPodMetadata") or {}, template.get("metadata") or {}):
        yield (of.get("labels") or {}).get(LABEL, "")


def gpus_per_replica(scaled: Scalable, seen: Mapping[str, Any]) -> int | None:
    """GPUs of one replica, as its templates ask for them; None where they do not say."""
    if scaled.service:
        service = services_of(seen)[scaled.service]
        own = [service] if _gpus([service]) else _containers(_template(service))
        return _gpus(own) or None
    spec = seen["spec"]
    group = spec.get("leaderWorkerTemplate")
    if group is None:
        return _gpus(_containers(spec.get("template") or {})) or None
    worker = _gpus(_containers(group["workerTemplate"]))
    leader = _gpus(_containers(group["leaderTemplate"])) if "leaderTemplate" in group else worker
    return leader + worker * (group.get("size", 1) - 1) or None


def model_of(scaled: Scalable, seen: Mapping[str, Any]) -> str | None:
    """The model that its engines serve, as their command line names it."""
    template = _template(services_of(seen)[scaled.service]) if scaled.service else None
    containers = _containers(template or seen["spec"].get("template") or {})
    words = [
        word
        for one in containers
        for text in (*(one.get("command") or ()), *(one.get("args") or ()))
        for word in str(text).replace("=", " ").split()
    ]
    after = dict(pairwise(words))
    return next((after[flag] for flag in _MODEL if flag in after), None)


def _template(service: Mapping[str, Any]) -> Mapping[str, Any]:
    """The pod of a service, in the form of a pod's template."""
    main = (service.get("extraPodSpec") or {}).get("mainContainer")
    return service.get("podTemplate") or {"spec": {"containers": [main] if main else []}}


def _containers(template: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((template.get("spec") or {}).get("containers") or ())


def _gpus(containers: Sequence[Mapping[str, Any]]) -> int:
    """GPUs of all makes: what asks for a part of one, such as MIG, has another name."""
    total = 0
    for one in containers:
        asked = one.get("resources") or {}
        wanted = {**(asked.get("requests") or {}), **(asked.get("limits") or {})}
        total += sum(int(n) for name, n in wanted.items() if f"/{name}".endswith("/gpu"))
    return total
