"""A cluster as its API shows it: objects, their scale, and controllers that follow when told.

Enough of Kubernetes for a scaler: merge and JSON patches, conflicts by resource version, rights,
and the order in which each controller takes pods away.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer

from planner.scalers.base import Member

NAMESPACE = "inference"
APPS = f"/apis/apps/v1/namespaces/{NAMESPACE}"
DYNAMO = f"/apis/nvidia.com/v1alpha1/namespaces/{NAMESPACE}"
DYNAMO_BETA = f"/apis/nvidia.com/v1beta1/namespaces/{NAMESPACE}"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
HPAS = f"/apis/autoscaling/v2/namespaces/{NAMESPACE}/horizontalpodautoscalers"
ADAPTERS = "dynamographdeploymentscalingadapters"
GRAPH = ("nvidia.com/dynamo-graph-deployment-name", "nvidia.com/dynamo-component")


@dataclass
class Call:
    """One that was made. `path` has no query."""

    method: str
    path: str
    content: str
    body: Any
    token: str = ""


class Cluster:
    """Objects by the path of the API. `forbidden`: rights that the planner lacks, as VERB KIND."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.calls: list[Call] = []
        self.forbidden: set[str] = set()
        self.used: set[str] = set()
        """Rights that were needed."""
        self.faults: dict[tuple[str, str], list[int]] = {}
        """Statuses that the next calls get, by method and path; 0: no answer at all."""
        self.deleted: list[dict[str, Any]] = []
        self._version = 0
        self._born = 0

    def put(self, path: str, of: Mapping[str, Any]) -> dict[str, Any]:
        self._version += 1
        one = {"metadata": {}, **of}
        one["metadata"] = {"name": path.rpartition("/")[2], **one["metadata"]}
        one["metadata"]["resourceVersion"] = str(self._version)
        self.objects[path] = one
        return one

    def workload(self, plural: str, name: str, replicas: int, base: str = APPS, **spec: Any) -> str:
        """An object with a scale, and pods that are ready."""
        path = f"{base}/{plural}/{name}"
        self.put(path, {"spec": {"replicas": replicas, **spec}, "labels": {"app": name}})
        self.settle(ready=True)
        return path

    def pods(self, **labels: str) -> list[dict[str, Any]]:
        """Those that have not ended, by name."""
        found = [one for path, one in sorted(self.objects.items()) if path.startswith(f"{PODS}/")]
        return [one for one in found if labels.items() <= one["metadata"].get("labels", {}).items()]

    def pod(self, name: str) -> dict[str, Any]:
        return self.objects[f"{PODS}/{name}"]

    def set_ready(self, name: str, is_ready: bool) -> None:
        self.pod(name)["status"]["conditions"] = [
            {"type": "Ready", "status": "True" if is_ready else "False"}
        ]

    def settle(self, ready: bool = False) -> None:
        """Let the controllers make pods of what the objects say."""
        for path, one in list(self.objects.items()):
            kind, name = path.split("/")[-2:]
            if kind in ("deployments", "statefulsets"):
                self._follow(name, {"app": name}, kind, one["spec"]["replicas"], ready)
            elif kind == "dynamographdeployments":
                spec = one["spec"]
                services = spec.get("services") or {c["name"]: c for c in spec["components"]}
                for service, of in services.items():
                    base = path.partition("/dynamographdeployments/")[0]
                    adapter = f"{base}/{ADAPTERS}/{name}-{service.lower()}"
                    if adapter in self.objects:
                        of["replicas"] = self.objects[adapter]["spec"]["replicas"]
                    labels = dict(zip(GRAPH, (name, service), strict=True))
                    self._follow(
                        f"{name}-{service.lower()}", labels, "deployments", of["replicas"], ready
                    )

    def _follow(self, name: str, labels: dict[str, str], kind: str, want: int, ready: bool) -> None:
        have = self.pods(**labels)
        if kind == "statefulsets":
            have.sort(key=lambda one: int(one["metadata"]["name"].rpartition("-")[2]))
            goes = [p for p in have if int(p["metadata"]["name"].rpartition("-")[2]) >= want]
        else:
            have.sort(key=_cost)
            goes = have[: max(0, len(have) - want)]
        for one in goes:
            self.deleted.append(self.objects.pop(f"{PODS}/{one['metadata']['name']}"))
        taken = {one["metadata"]["name"] for one in have}
        for at in range(want - (len(have) - len(goes))):
            self._born += 1
            suffix = str(len(have) + at) if kind == "statefulsets" else f"x{self._born}"
            assert f"{name}-{suffix}" not in taken
            owner = "StatefulSet" if kind == "statefulsets" else "ReplicaSet"
            self.put(
                f"{PODS}/{name}-{suffix}",
                {
                    "metadata": {
                        "labels": dict(labels),
                        "annotations": {},
                        "creationTimestamp": f"2026-01-01T00:00:{self._born:02}Z",
                        "ownerReferences": [{"kind": owner, "name": name, "controller": True}],
                    },
                    "status": {"phase": "Running", "podIP": f"10.0.0.{self._born}"},
                },
            )
            self.set_ready(f"{name}-{suffix}", ready)

    @asynccontextmanager
    async def served(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
        """The address of its API."""
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._handle)
        server = TestServer(app, scheme="https" if tls else "http")
        await server.start_server(ssl=tls)
        try:
            yield str(server.make_url("")).rstrip("/")
        finally:
            await server.close()

    async def _handle(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read() or b"null")
        token = request.headers.get("Authorization", "")
        call = Call(request.method, request.path, request.content_type, body, token)
        self.calls.append(call)
        if faults := self.faults.get((call.method, call.path)):
            if (status := faults.pop(0)) == 0:
                await asyncio.Event().wait()
            return _status(status, "a fault")
        is_scale = call.path.endswith("/scale")
        path = call.path.removesuffix("/scale")
        if path.endswith("/selfsubjectaccessreviews"):
            of = body["spec"]["resourceAttributes"]
            kind = "/".join(part for part in (of["resource"], of["subresource"]) if part)
            allowed = f"{of['verb']} {kind}" not in self.forbidden
            return web.json_response({"status": {"allowed": allowed}}, status=201)
        is_list = path in (PODS, HPAS)
        kind = path.split("/")[-1 if is_list else -2] + "/scale" * is_scale
        verb = {"GET": "list" if is_list else "get", "PATCH": "patch"}[call.method]
        self.used.add(f"{verb} {kind}")
        if f"{verb} {kind}" in self.forbidden:
            return _status(403, f"User cannot {verb} {kind}")
        if is_list:
            return web.json_response({"items": self._selected(path, request.query)})
        if path not in self.objects or (is_scale and kind.startswith("dynamographdeployments/")):
            return _status(404, "not found")
        if call.method == "PATCH" and not self._patch(path, call, is_scale):
            return _status(409, "the object has been modified")
        one = self.objects[path]
        return web.json_response(_scale(one) if is_scale else one)

    def _selected(self, path: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
        if path == HPAS:
            return [one for at, one in self.objects.items() if at.startswith(f"{HPAS}/")]
        wanted = (term.split("=") for term in query["labelSelector"].split(","))
        return self.pods(**dict(wanted))

    def _patch(self, path: str, call: Call, is_scale: bool) -> bool:
        one = self.objects[path]
        told: dict[str, Any] = {}
        if isinstance(call.body, list):
            assert call.content == "application/json-patch+json"
            told = {op["path"]: op["value"] for op in call.body}
            version = told.pop("/metadata/resourceVersion")
        else:
            assert call.content == "application/merge-patch+json"
            version = call.body.get("metadata", {}).get("resourceVersion")
        if version not in (None, one["metadata"]["resourceVersion"]):
            return False
        for at, value in told.items():
            _, _, _, index, last = at.split("/")
            one["spec"]["components"][int(index)][last] = value
        if not told:
            merge(one, call.body)
        self._version += 1
        one["metadata"]["resourceVersion"] = str(self._version)
        return True

    def changes(self) -> list[tuple[str, Any]]:
        """The patches that were asked for, without versions: path below the namespace, body."""
        found = []
        for call in self.calls:
            if call.method == "PATCH":
                body = call.body
                if isinstance(body, dict) and "spec" in body:
                    body = body["spec"]
                found.append((call.path.partition(f"/{NAMESPACE}/")[2], body))
        return found


def merge(into: dict[str, Any], change: Mapping[str, Any]) -> None:
    """RFC 7396."""
    for key, value in change.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


def _cost(pod: dict[str, Any]) -> tuple[bool, int, str]:
    """A ReplicaSet's order: not ready, cheap, and what it likes last, the newest."""
    is_ready = pod["status"]["conditions"][0]["status"] == "True"
    cost = pod["metadata"]["annotations"].get("controller.kubernetes.io/pod-deletion-cost", "0")
    return is_ready, int(cost), pod["metadata"]["name"]


def _scale(one: Mapping[str, Any]) -> dict[str, Any]:
    meta = {key: one["metadata"][key] for key in ("name", "resourceVersion")}
    count = one["spec"]["replicas"]
    selector = ",".join(f"{key}={value}" for key, value in one.get("labels", {}).items())
    spec = {"replicas": count} if count else {}  # the API leaves a 0 out
    return {"metadata": meta, "spec": spec, "status": {"replicas": count, "selector": selector}}


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


def kubeconfig(path: Path, server: str) -> str:
    """A file that leads to a server, with a token."""
    user = {"name": "planner", "user": {"token": "secret-token"}}
    of = {"cluster": "here", "user": "planner", "namespace": NAMESPACE}
    path.write_bytes(
        orjson.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "clusters": [{"name": "here", "cluster": {"server": server}}],
                "users": [user],
                "contexts": [{"name": "here", "context": of}],
            }
        )
    )
    return str(path)


@dataclass
class Proxies:
    """The fleet that a planner looks at: drains take until `end` is called."""

    known: dict[str, Member] = field(default_factory=dict)
    drained: list[str] = field(default_factory=list)
    added: list[tuple[str, str]] = field(default_factory=list)

    def join(self, name: str, url: str, tokens: int = 0, requests: int = 0) -> None:
        self.known[name] = Member(name, url, True, requests=requests, held_tokens=tokens)

    def generation(self) -> str:
        return "1"

    def members(self, component: str) -> list[Member]:
        return [self.known[name] for name in sorted(self.known)]

    async def drain(self, name: str) -> None:
        one = self.known[name]
        self.drained.append(name)
        self.known[name] = Member(name, one.url, False, True, one.requests, one.held_tokens)

    async def has_left(self, name: str) -> bool:
        return name not in self.known

    async def add(self, name: str, url: str) -> None:
        self.added.append((name, url))
        self.join(name, url)

    def end(self) -> None:
        """Let the last requests of all that drain be over."""
        self.known = {name: one for name, one in self.known.items() if not one.is_draining}

    def join_all(self, cluster: Cluster) -> None:
        """Every pod of the cluster, the first with most to lose."""
        for at, pod in enumerate(cluster.pods()):
            address = urlsplit(f"http://{pod['status']['podIP']}:8000").geturl()
            self.join(f"i{at}", address, tokens=1000 - at, requests=1)
