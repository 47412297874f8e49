"""What is checked before the planner starts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from planner.config.components import Component
from planner.scalers.base import ScalerError
from planner.scalers.kubernetes.options import KubernetesOptions
from planner.scalers.kubernetes.scaler import KubernetesScaler
from tests.support.cluster import (
    ADAPTERS,
    APPS,
    DYNAMO,
    HPAS,
    NAMESPACE,
    Cluster,
    kubeconfig,
)

pytest.importorskip("kubernetes_asyncio", reason="the extra k8s is not installed")


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
async def server(cluster: Cluster, tmp_path: Path) -> AsyncIterator[str]:
    async with cluster.served() as server:
        yield kubeconfig(tmp_path / "config", server)


async def problem(server: str, *components: Component, **options: Any) -> str:
    """What is wrong, or nothing."""
    told = {"namespace": NAMESPACE, "kubeconfig": server, **options}
    scaler = KubernetesScaler(KubernetesOptions(**told))
    try:
        await scaler.validate(components or (Component(),))
    except ScalerError as error:
        return f"{error.failure}: {error}"
    finally:
        await scaler.aclose()
    return ""


def engine(gpus: str, model: str) -> dict[str, Any]:
    one = {"resources": {"limits": {"nvidia.com/gpu": gpus}}, "args": ["--model", model]}
    return {"spec": {"containers": [one]}}


async def test_a_deployment_that_fits_passes_and_nothing_is_changed(
    cluster: Cluster, server: str
) -> None:
    cluster.workload("deployments", "vllm", 2, template=engine("1", "a"))
    assert await problem(server, object="deployment/vllm") == ""
    assert cluster.changes() == []


async def test_an_object_that_is_not_there(server: str) -> None:
    said = await problem(server, object="deployment/vllm")
    assert said == "missing: GET deployments.apps/vllm in namespace inference: 404, not there"


async def test_all_rights_that_are_missing_are_named_at_once(cluster: Cluster, server: str) -> None:
    cluster.workload("deployments", "vllm", 2)
    cluster.forbidden = {"patch pods", "patch deployments/scale"}
    assert await problem(server, object="deployment/vllm") == (
        "forbidden: the planner's account may not patch pods, patch deployments.apps/vllm/scale "
        "in namespace inference; see kubernetes/planner.yaml in configs/"
    )
    cluster.forbidden = {"get deployments"}
    said = await problem(server, object="deployment/vllm")
    assert 'lacks {apiGroups: ["apps"], resources: ["deployments"], verbs: ["get"]}' in said


async def test_gpus_must_be_those_of_the_template_where_it_says(
    cluster: Cluster, server: str
) -> None:
    cluster.workload("deployments", "vllm", 2, template=engine("8", "a"))
    assert await problem(server, object="deployment/vllm") == (
        "failed: deployments.apps/vllm asks for 8 GPUs for each replica; "
        "gpus_per_replica of component combined is 1"
    )
    assert await problem(server, Component(gpus_per_replica=8), object="deployment/vllm") == ""


@pytest.mark.parametrize(
    ("kind", "name", "version", "is_rival"),
    [
        ("Deployment", "vllm", "apps/v1", True),
        ("Deployment", "other", "apps/v1", False),
        ("StatefulSet", "vllm", "apps/v1", False),
    ],
)
async def test_nobody_else_may_scale_the_object(
    cluster: Cluster, server: str, kind: str, name: str, version: str, is_rival: bool
) -> None:
    cluster.workload("deployments", "vllm", 2)
    target = {"kind": kind, "name": name, "apiVersion": version}
    cluster.put(f"{HPAS}/cpu", {"spec": {"scaleTargetRef": target}})
    said = await problem(server, object="deployment/vllm")
    assert said == is_rival * (
        "conflict: horizontalpodautoscalers.autoscaling/cpu in namespace inference scales "
        "deployments.apps/vllm too; delete it"
    )


def graph(cluster: Cluster, **services: dict[str, Any]) -> None:
    cluster.put(f"{DYNAMO}/dynamographdeployments/g", {"spec": {"services": services}})


PREFILL, DECODE = Component("prefill"), Component("decode")


async def test_both_services_of_a_graph_must_be_there(cluster: Cluster, server: str) -> None:
    graph(cluster, P={"subComponentType": "prefill", "replicas": 1})
    said = await problem(server, PREFILL, DECODE, parent="g")
    assert said.startswith("missing: dynamographdeployments.nvidia.com/g: no service is decode by")
    graph(
        cluster,
        P={"subComponentType": "prefill", "replicas": 1},
        D={"subComponentType": "decode", "replicas": 1},
    )
    assert await problem(server, PREFILL, DECODE, parent="g") == ""


async def test_the_models_must_be_the_same(cluster: Cluster, server: str) -> None:
    def main(model: str) -> dict[str, Any]:
        return {"extraPodSpec": {"mainContainer": {"args": ["--model", model]}}, "replicas": 1}

    graph(cluster, prefill=main("a"), decode=main("b"))
    said = await problem(server, PREFILL, DECODE, parent="g")
    assert said == "failed: the components serve different models: prefill a, decode b"


async def test_an_autoscaler_of_a_services_adapter_is_a_rival(
    cluster: Cluster, server: str
) -> None:
    graph(cluster, decode={"replicas": 1})
    adapter = "g-decode"
    cluster.put(f"{DYNAMO}/{ADAPTERS}/{adapter}", {"spec": {"replicas": 1}})
    kind = "DynamoGraphDeploymentScalingAdapter"
    target = {"kind": kind, "name": adapter, "apiVersion": "nvidia.com/v1alpha1"}
    cluster.put(f"{HPAS}/keda", {"spec": {"scaleTargetRef": target}})
    assert "autoscaling/keda" in await problem(server, DECODE, parent="g")


async def test_a_replica_of_several_nodes_is_refused(cluster: Cluster, server: str) -> None:
    graph(cluster, decode={"replicas": 1, "multinode": {"nodeCount": 2}})
    assert "a replica has pods on 2 nodes" in await problem(server, DECODE, parent="g")


async def test_every_component_needs_an_object(cluster: Cluster, server: str) -> None:
    cluster.workload("deployments", "p", 1)
    said = await problem(server, PREFILL, DECODE, object={"prefill": "deployment/p"})
    assert said == "missing: component decode has no object; there are prefill"


async def test_a_scale_without_a_selector_is_named(cluster: Cluster, server: str) -> None:
    cluster.put(f"{APPS}/deployments/vllm", {"spec": {"replicas": 1}})
    said = await problem(server, object="deployment/vllm")
    assert "the scale of deployments.apps/vllm names no selector" in said
