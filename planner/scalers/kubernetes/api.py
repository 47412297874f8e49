"""The few calls of the Kubernetes API that the scaler makes, and what their failures mean.

The library `kubernetes-asyncio` finds the cluster and renews the credentials; its 700 model
classes are not used. It is imported when the first call is made.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from planner.scalers.base import Failure, ScalerError
from planner.scalers.kubernetes.options import KubernetesOptions, Resource

TIMEOUT_S = 5.0
"""The longest that one call may take, renewed credentials included."""
MOST_SAID = 200
"""Characters of a server's message that are passed on."""
PODS = Resource("", "v1", "pods")
AUTOSCALERS = Resource("autoscaling", "v2", "horizontalpodautoscalers")
REVIEWS = Resource("authorization.k8s.io", "v1", "selfsubjectaccessreviews")
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
MERGE, JSON = "application/merge-patch+json", "application/json-patch+json"
FIELD_MANAGER = "cache-planner"
"""Who changed an object, as the object itself says."""
EXTRA = "kubernetes-asyncio is not installed; run pip install -c constraints.txt '.[k8s]'"
_NO_CONFIG = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""What the library raises where a file has another form than a kubeconfig's."""
_FAILURES = {
    401: (Failure.FORBIDDEN, "the planner's credentials are not accepted"),
    404: (Failure.MISSING, "not there"),
    409: (Failure.CONFLICT, "somebody else changed it meanwhile"),
}


async def connected(options: KubernetesOptions) -> Api:
    """The API of the cluster that the options name, or of the one that the planner runs in."""
    try:
        config = importlib.import_module("kubernetes_asyncio.config")
        client = importlib.import_module("kubernetes_asyncio.client")
        yaml_error = importlib.import_module("yaml").YAMLError
    except ImportError as error:
        raise ScalerError(Failure.FAILED, EXTRA) from error
    # Without this detour it would be a copy of what some other part set as the default.
    how = type.__call__(client.Configuration)
    try:
        if options.kubeconfig:
            await config.load_kube_config(options.kubeconfig, client_configuration=how)
        else:
            config.load_incluster_config(how)
    except (config.ConfigException, *_NO_CONFIG, yaml_error) as error:
        where = options.kubeconfig or "the pod's service account"
        text = f"no way into a cluster by {where}: {_one_line(str(error))}"
        raise ScalerError(Failure.UNREACHABLE, text) from error
    reached = client.ApiClient(how)
    reached.user_agent = FIELD_MANAGER
    return Api(reached, options.namespace or _own_namespace(), config.ConfigException)


def _own_namespace() -> str:
    try:
        return OWN_NAMESPACE.read_text("utf-8").strip()
    except OSError:
        return "default"


class Api:
    """One namespace of a cluster. Every call raises `ScalerError`, and ends within `TIMEOUT_S`."""

    def __init__(self, client: Any, namespace: str, no_credentials: type[Exception]) -> None:
        self._client = client
        self._no_credentials = no_credentials
        self.namespace = namespace

    async def get(self, resource: Resource, sub: str = "") -> dict[str, Any]:
        """One object, or a part of it."""
        return await self._call("get", resource, sub)

    async def list(self, resource: Resource, selector: str = "") -> list[dict[str, Any]]:
        """All objects of a kind whose labels are so."""
        query = [("labelSelector", selector)] if selector else []
        answer = await self._call("list", resource, query=query)
        items: list[dict[str, Any]] = answer.get("items") or []
        return items

    async def patch(
        self, resource: Resource, body: Mapping[str, Any] | Sequence[Any], sub: str = ""
    ) -> None:
        """Change an object: by a map of what is merged into it, or by a list of operations."""
        query = [("fieldManager", FIELD_MANAGER)]
        await self._call("patch", resource, sub, query=query, body=body)

    async def may(self, verb: str, resource: Resource, sub: str = "") -> bool:
        """Whether the planner's account has a right."""
        attributes = {
            "namespace": self.namespace,
            "verb": verb,
            "group": resource.group,
            "resource": resource.plural,
            "subresource": sub,
            "name": resource.name,
        }
        answer = await self._call(
            "create", REVIEWS, body={"spec": {"resourceAttributes": attributes}}
        )
        with understood(REVIEWS):
            return bool(answer["status"]["allowed"])

    async def aclose(self) -> None:
        """End its connections."""
        await self._client.close()

    async def _call(
        self,
        verb: str,
        resource: Resource,
        sub: str = "",
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Mapping[str, Any] | Sequence[Any] | None = None,
    ) -> dict[str, Any]:
        method = {"patch": "PATCH", "create": "POST"}.get(verb, "GET")
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if verb == "patch":
            headers["Content-Type"] = MERGE if isinstance(body, Mapping) else JSON
        what = f"{method} {resource}{f'/{sub}' * bool(sub)} in namespace {self.namespace}"
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, said = await self._answer(
                    method, self._path(resource, sub), headers, query, body
                )
        except TimeoutError as error:
            text = f"{what}: no answer within {TIMEOUT_S:g} s"
            raise ScalerError(Failure.TIMEOUT, text) from error
        except (aiohttp.ClientError, OSError) as error:
            text = f"{what}: {self._client.configuration.host} not reached: {_one_line(str(error))}"
            raise ScalerError(Failure.UNREACHABLE, text) from error
        except self._no_credentials as error:
            text = f"{what}: no credentials: {_one_line(str(error))}"
            raise ScalerError(Failure.FORBIDDEN, text) from error
        if status >= 300:
            raise _refused(what, status, said, _rule(verb, resource, sub))
        if not isinstance(said, dict):
            raise ScalerError(Failure.FAILED, f"{what}: {status}, no JSON object in the answer")
        return said

    async def _answer(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        query: Sequence[tuple[str, str]],
        body: Mapping[str, Any] | Sequence[Any] | None,
    ) -> tuple[int, Any]:
        """The status, and the answer's JSON, or its text where it is none."""
        answer = await self._client.call_api(
            path,
            method,
            query_params=list(query),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,  # its own reading ends with exceptions that have no status
            _request_timeout=TIMEOUT_S,
        )
        async with answer:
            said = await answer.read()
        try:
            return answer.status, orjson.loads(said)
        except orjson.JSONDecodeError:
            return answer.status, said.decode("utf-8", "replace")

    def _path(self, resource: Resource, sub: str) -> str:
        group = f"/apis/{resource.group}" if resource.group else "/api"
        space = "" if resource.plural == REVIEWS.plural else f"/namespaces/{self.namespace}"
        return "/".join(
            part
            for part in (f"{group}/{resource.version}{space}", resource.plural, resource.name, sub)
            if part
        )


@contextmanager
def understood(what: object) -> Iterator[None]:
    """Where an answer is read: one of another form than Kubernetes' is a `ScalerError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = f"{what}: an answer of the API has another form than is known: {error!r}"
        raise ScalerError(Failure.FAILED, text) from error


def _rule(verb: str, resource: Resource, sub: str) -> str:
    """The rule of RBAC that allows a call."""
    plural = f"{resource.plural}/{sub}" if sub else resource.plural
    return f'{{apiGroups: ["{resource.group}"], resources: ["{plural}"], verbs: ["{verb}"]}}'


def _refused(what: str, status: int, said: Any, rule: str) -> ScalerError:
    message = _one_line(str(said.get("message", "") if isinstance(said, dict) else said))
    failure, why = _FAILURES.get(status, (Failure.FAILED, message))
    if status == 403:  # of RBAC; a webhook or a quota has other words
        is_right = not message or " cannot " in message
        why = f"forbidden; its Role lacks {rule}" if is_right else message
        failure = Failure.FORBIDDEN
    return ScalerError(failure, f"{what}: {status}, {why}")


def _one_line(text: str) -> str:
    """The beginning of a text, on one line."""
    return " ".join(text.split())[:MOST_SAID]
