"""Which objects of a cluster are scaled, and how the cluster is reached."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

PARENT = "DYN_PARENT_DGD_K8S_NAME"
"""The variable by which Dynamo's operator tells a planner the name of its graph deployment."""
KINDS = {
    "deployment": ("apps", "v1", "deployments"),
    "statefulset": ("apps", "v1", "statefulsets"),
    "leaderworkerset": ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets"),
    "dynamographdeployment": ("nvidia.com", "v1alpha1", "dynamographdeployments"),
    "dynamographdeploymentscalingadapter": (
        *("nvidia.com", "v1alpha1"),
        "dynamographdeploymentscalingadapters",
    ),
}
"""What may stand before the name of an object, and its group, version and plural."""
FORM = f"KIND/NAME with one of {', '.join(KINDS)}, or GROUP/VERSION/PLURAL/NAME"
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
MOST_PORT = 65535
_KINDS = {str: "text", int: "integer"}


@dataclass(frozen=True, slots=True)
class Resource:
    """An object of the cluster, or all of its kind where `name` is empty."""

    group: str
    version: str
    plural: str
    name: str = ""

    def of(self, name: str) -> Resource:
        """One of its kind."""
        return Resource(self.group, self.version, self.plural, name)

    @property
    def is_graph(self) -> bool:
        """Whether it is a graph deployment: several services, each with replicas of its own."""
        return self.plural == "dynamographdeployments"

    def __str__(self) -> str:
        kind = f"{self.plural}.{self.group}" if self.group else self.plural
        return f"{kind}/{self.name}" if self.name else kind


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """Options of the scaler `kubernetes`. A `ValueError` of one line says what is wrong.

    `object`: KIND/NAME or GROUP/VERSION/PLURAL/NAME, or a map of those by component. Empty: the
    graph deployment that `parent` names.
    `parent`: what the environment variable DYN_PARENT_DGD_K8S_NAME says.
    `namespace`: where the objects are; empty: the planner's own, else "default".
    `kubeconfig`: a file with the cluster's address and the credentials; empty: those of the pod.
    `port`: where a pod of the fleet serves. Given, pods that are ready and new are told to the
    proxies as http://ADDRESS:PORT, under the pod's name. 0: the proxies find them themselves.
    """

    object: str | Mapping[str, str] = ""
    parent: str = ""
    namespace: str = ""
    kubeconfig: str = ""
    port: int = 0

    def __post_init__(self) -> None:
        for name, kind in (("parent", str), ("namespace", str), ("kubeconfig", str), ("port", int)):
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{name}: {value!r} is no {_KINDS[kind]}")
        if self.namespace and not _NAME.fullmatch(self.namespace):
            raise ValueError(f"namespace: {self.namespace!r} is no name of a namespace")
        if not 0 <= self.port <= MOST_PORT:
            raise ValueError(f"port: {self.port}; it is 0 to {MOST_PORT}")
        if not self.object and not self.parent:
            raise ValueError(f"object: missing, and {PARENT} is not set; it is {FORM}")
        self.resources()

    def resources(self) -> dict[str, Resource]:
        """The objects by component; under "" the one that all components are looked for in."""
        told = self.object or f"dynamographdeployment/{self.parent}"
        of = told if isinstance(told, Mapping) else {"": told}
        return {component: parsed(text) for component, text in of.items()}


def parsed(text: object) -> Resource:
    """An object's text as its parts."""
    *kind, name = text.split("/") if isinstance(text, str) else ("",)
    known = KINDS.get(kind[0].lower()) if len(kind) == 1 else tuple(kind)
    if known is None or len(known) != 3 or not all(map(_NAME.fullmatch, (*known, name))):
        raise ValueError(f"object: {text!r} is no object; it is {FORM}")
    return Resource(*known, name)
