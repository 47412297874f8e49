"""Scaling on `kmock`, somebody else's idea of what the Kubernetes API answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from planner.core.types import COMPONENT
from planner.scalers.base import Decision, Failure, ScalerError
from planner.scalers.kubernetes.options import KubernetesOptions
from planner.scalers.kubernetes.scaler import KubernetesScaler
from tests.support.cluster import NAMESPACE, Proxies, kubeconfig

pytest.importorskip("kubernetes_asyncio", reason="the extra k8s is not installed")
library: Any = pytest.importorskip("kmock", reason="kmock is not installed")
SCALE = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/vllm/scale"
HPAS = f"/apis/autoscaling/v2/namespaces/{NAMESPACE}/horizontalpodautoscalers"


def scaler(kmock: Any, folder: Path) -> KubernetesScaler:
    config = kubeconfig(folder / "config", str(kmock.url))
    return KubernetesScaler(
        KubernetesOptions(object="deployment/vllm", namespace=NAMESPACE, kubeconfig=config)
    )


def to(count: int) -> Decision:
    return Decision(1, {COMPONENT: count}, 0.0)


@pytest.fixture
async def kmock() -> AsyncIterator[Any]:
    async with library.KubernetesEmulator() as emulator, library.Server(emulator):
        yield emulator


@pytest.fixture
def api(kmock: Any) -> Any:
    """A Deployment of two pods; its scale is what the last patch said."""
    spec = {"replicas": 2}
    kmock.objects["apps/v1/deployments", NAMESPACE, "vllm"] = {"spec": spec}
    for at in (1, 2):
        kmock.objects["v1/pods", NAMESPACE, f"vllm-{at}"] = {
            "metadata": {"name": f"vllm-{at}"},
            "status": {
                "podIP": f"10.0.0.{at}",
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }

    def scale(request: Any) -> dict[str, Any]:
        if request.method.value == "PATCH":
            spec.update(request.data["spec"])
        return {
            "metadata": {"name": "vllm", "resourceVersion": "7"},
            "spec": spec,
            "status": {"selector": "app=vllm"},
        }

    kmock[SCALE] << scale
    return kmock


async def test_down_is_a_mark_a_drain_a_cost_and_a_scale(api: Any, tmp_path: Path) -> None:
    of, proxies = scaler(api, tmp_path), Proxies()
    proxies.join("a", "http://10.0.0.1:8000", tokens=9, requests=1)
    proxies.join("b", "http://10.0.0.2:8000", tokens=1, requests=1)
    assert (await of.apply(to(1), proxies)).waits_for == "vllm-2 drains"
    proxies.end()
    assert (await of.apply(to(1), proxies)).waits_for == "vllm-2 ends"
    del api.objects["v1/pods", NAMESPACE, "vllm-2"]
    assert (await of.apply(to(1), proxies)).is_done
    await of.aclose()
    patches = [(one.url.path.rpartition("/")[2], one.data) for one in api["patch"]]
    assert patches == [
        (
            "vllm-2",
            {"metadata": {"annotations": {"cache-planner/leaves": "b http://10.0.0.2:8000"}}},
        ),
        (
            "vllm-2",
            {
                "metadata": {
                    "annotations": {"controller.kubernetes.io/pod-deletion-cost": "-2147483648"}
                }
            },
        ),
        ("scale", {"metadata": {"resourceVersion": "7"}, "spec": {"replicas": 1}}),
    ]
    for one in api["patch"]:
        assert one.headers["Content-Type"] == "application/merge-patch+json"
        assert one.headers["Authorization"] == "Bearer secret-token"
        assert one.params == {"fieldManager": "cache-planner"}
    assert api["get", "/api/v1/namespaces/inference/pods"][0].params == {
        "labelSelector": "app=vllm"
    }


@pytest.mark.parametrize(
    ("status", "failure"),
    [(403, Failure.FORBIDDEN), (404, Failure.MISSING), (409, Failure.CONFLICT)],
)
async def test_a_patch_that_is_refused(
    kmock: Any, tmp_path: Path, status: int, failure: Failure
) -> None:
    kmock.objects["apps/v1/deployments", NAMESPACE, "vllm"] = {"spec": {"replicas": 2}}
    kmock.resources["v1/pods"] = {}
    kmock["get", SCALE] << {
        "metadata": {"resourceVersion": "7"},
        "spec": {"replicas": 2},
        "status": {"selector": "app=vllm"},
    }
    kmock["patch", SCALE] << status
    of = scaler(kmock, tmp_path)
    with pytest.raises(ScalerError) as error:
        await of.apply(to(3), Proxies())
    await of.aclose()
    assert error.value.failure is failure
    assert len(kmock["patch"]) == (2 if status == 409 else 1)


async def test_an_object_that_is_not_there(kmock: Any, tmp_path: Path) -> None:
    kmock.resources["apps/v1/deployments"] = {}
    of = scaler(kmock, tmp_path)
    with pytest.raises(
        ScalerError, match=r"^GET deployments\.apps/vllm in namespace inference: 404"
    ):
        await of.apply(to(3), Proxies())
    await of.aclose()
