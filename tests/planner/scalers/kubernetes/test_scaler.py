"""Scaling on a cluster: who is drained, what is set, and what a successor goes on with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from planner.config.components import Component
from planner.core.types import COMPONENT
from planner.scalers.base import Decision, Failure, ScalerError
from planner.scalers.kubernetes.api import Api
from planner.scalers.kubernetes.options import KubernetesOptions
from planner.scalers.kubernetes.pods import LEAVES
from planner.scalers.kubernetes.scaler import KubernetesScaler
from tests.support.cluster import (
    ADAPTERS,
    APPS,
    DYNAMO,
    DYNAMO_BETA,
    HPAS,
    NAMESPACE,
    PODS,
    Cluster,
    Proxies,
    kubeconfig,
)

pytest.importorskip("kubernetes_asyncio", reason="the extra k8s is not installed")
SCALE = f"{APPS}/deployments/vllm/scale"
COST = "controller.kubernetes.io/pod-deletion-cost"
MOST_TICKS = 9
ROOT = Path(__file__).parents[4]


def to(count: int, component: str = COMPONENT) -> Decision:
    return Decision(1, {component: count}, 0.0)


class World:
    """A cluster, the proxies in front of it, and the planner's scaler."""

    def __init__(self, config: str, cluster: Cluster) -> None:
        self.config = config
        self.cluster, self.proxies = cluster, Proxies()
        self.first: set[str] = set()
        self.scaler = self.successor()

    def successor(self, **options: Any) -> KubernetesScaler:
        told = {"object": "deployment/vllm", "namespace": NAMESPACE, "kubeconfig": self.config}
        self.scaler = KubernetesScaler(KubernetesOptions(**{**told, **options}))
        return self.scaler

    async def tick(self, count: int, component: str = COMPONENT) -> str:
        return (await self.scaler.apply(to(count, component), self.proxies)).waits_for

    def scaled(self) -> list[int]:
        """What was set, one after the other."""
        changes = [body for path, body in self.cluster.changes() if path.endswith("/scale")]
        return [body["replicas"] for body in changes]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
async def world(cluster: Cluster, tmp_path: Path) -> AsyncIterator[World]:
    async with cluster.served() as server:
        world = World(kubeconfig(tmp_path / "config", server), cluster)
        yield world
        await world.scaler.aclose()


async def test_up_is_one_change_and_done(cluster: Cluster, world: World) -> None:
    cluster.workload("deployments", "vllm", 1)
    assert await world.tick(3) == ""
    assert world.scaled() == [3]
    assert await world.tick(3) == ""
    assert world.scaled() == [3], "the same again changes nothing"


async def test_what_was_set_is_observed(cluster: Cluster, world: World) -> None:
    cluster.workload("deployments", "vllm", 2)
    assert await world.scaler.observe() == {}
    await world.tick(0)
    cluster.objects[f"{APPS}/deployments/vllm"]["spec"]["replicas"] = 0
    assert await world.scaler.observe() == {COMPONENT: 0}, "the API leaves a 0 out"


async def test_down_drains_the_one_with_least_to_lose_and_then_scales(
    cluster: Cluster, world: World
) -> None:
    cluster.workload("deployments", "vllm", 3)
    world.proxies.join_all(cluster)
    assert await world.tick(2) == "vllm-x3 drains"
    assert world.proxies.drained == ["i2"]
    assert await world.tick(2) == "vllm-x3 drains"
    assert world.proxies.drained == ["i2"], "it is drained once"
    assert world.scaled() == []
    world.proxies.end()
    assert await world.tick(2) == "vllm-x3 ends"
    assert world.scaled() == [2]
    assert COST in cluster.pod("vllm-x3")["metadata"]["annotations"]
    cluster.settle()
    assert [one["metadata"]["name"] for one in cluster.deleted] == ["vllm-x3"]
    assert await world.tick(2) == ""
    assert world.scaled() == [2]


async def test_each_goes_as_soon_as_it_has_left(cluster: Cluster, world: World) -> None:
    cluster.workload("deployments", "vllm", 3)
    world.proxies.join_all(cluster)
    assert await world.tick(1) == "vllm-x3, vllm-x2 drain"
    del world.proxies.known["i1"]
    assert await world.tick(1) == "vllm-x3 drains; vllm-x2 ends"
    cluster.settle()
    assert [one["metadata"]["name"] for one in cluster.deleted] == ["vllm-x2"]
    world.proxies.end()
    await world.tick(1)
    cluster.settle()
    assert await world.tick(1) == ""
    assert world.scaled() == [2, 1]


async def test_pods_that_are_not_ready_need_no_drain(cluster: Cluster, world: World) -> None:
    cluster.workload("deployments", "vllm", 2)
    world.proxies.join_all(cluster)
    await world.tick(4)
    cluster.settle()  # two more, which never become ready
    assert await world.tick(2) == ""
    assert world.proxies.drained == []
    cluster.settle()
    assert [pod["metadata"]["name"] for pod in cluster.pods()] == ["vllm-x1", "vllm-x2"]


async def test_a_statefulset_loses_its_highest_ordinal(cluster: Cluster, world: World) -> None:
    cluster.workload("statefulsets", "vllm", 3)
    world.proxies.join_all(cluster)
    heavy = world.proxies.known["i2"]
    world.proxies.join("i2", heavy.url, tokens=99999, requests=5)
    world.successor(object="statefulset/vllm")
    assert await world.tick(1) == "vllm-2, vllm-1 drain"
    del world.proxies.known["i1"]
    assert await world.tick(1) == "vllm-2 drains; vllm-1 ends"
    assert world.scaled() == [], "only the highest can go"
    world.proxies.end()
    await world.tick(1)
    assert world.scaled() == [1]
    assert all(COST not in pod["metadata"]["annotations"] for pod in cluster.pods())


async def test_one_that_goes_serves_again_when_it_is_wanted(cluster: Cluster, world: World) -> None:
    cluster.workload("deployments", "vllm", 2)
    world.proxies.join_all(cluster)
    url = world.proxies.known["i1"].url
    await world.tick(1)
    world.proxies.end()
    assert await world.tick(2) == ""
    assert world.proxies.added == [("i1", url)]
    assert world.scaled() == []
    assert cluster.pod("vllm-x2")["metadata"]["annotations"] == {}


async def test_what_an_operator_drained_is_not_brought_back(cluster: Cluster, world: World) -> None:
    cluster.workload("deployments", "vllm", 2)
    world.proxies.join_all(cluster)
    await world.proxies.drain("i0")
    assert await world.tick(1) == "vllm-x1 drains", "it leaves already"
    await world.tick(2)
    assert world.proxies.added == []
    assert world.proxies.known["i0"].is_draining


async def test_one_that_no_proxy_knows_is_looked_at_twice(cluster: Cluster, world: World) -> None:
    cluster.workload("deployments", "vllm", 2)
    world.proxies.join("a", "http://10.0.0.1:8000")
    assert await world.tick(1) == "vllm-x2 drains"
    world.proxies.join("b", "http://10.0.0.2:8000", requests=1)
    assert await world.tick(1) == "vllm-x2 drains"
    assert world.proxies.drained == ["b"]
    world.proxies.end()
    assert await world.tick(1) == "vllm-x2 ends"


async def test_one_that_kubernetes_may_be_ending_is_not_brought_back(
    cluster: Cluster, world: World
) -> None:
    cluster.workload("deployments", "vllm", 3)
    world.proxies.join_all(cluster)
    await world.tick(1)
    world.proxies.end()
    await world.tick(1)
    assert await world.tick(2) == "vllm-x3 may end yet; vllm-x2 ends"
    assert world.scaled() == [1, 2]
    assert world.proxies.added == []
    cluster.settle()
    assert await world.tick(2) == ""
    assert len(world.proxies.added) == 1
    assert len(world.proxies.known) == len(cluster.pods()) == 2


async def test_what_somebody_else_takes_away_is_not_given_back(
    cluster: Cluster, world: World
) -> None:
    path = cluster.workload("deployments", "vllm", 3)
    world.proxies.join_all(cluster)
    cluster.objects[path]["spec"]["replicas"] = 2
    assert await world.tick(1) == "vllm-x3, vllm-x2 drain"
    assert world.scaled() == []


async def test_of_many_that_go_three_are_named(cluster: Cluster, world: World) -> None:
    cluster.workload("deployments", "vllm", 5)
    world.proxies.join_all(cluster)
    assert await world.tick(1) == "vllm-x5, vllm-x4, vllm-x3 and 1 more drain"


async def test_a_pod_that_ended_meanwhile_is_no_failure(cluster: Cluster, world: World) -> None:
    cluster.workload("deployments", "vllm", 2)
    world.proxies.join_all(cluster)
    cluster.faults["PATCH", f"{PODS}/vllm-x2"] = [404, 403]
    assert await world.tick(1) == "vllm-x2 drains"
    with pytest.raises(ScalerError, match="403"):
        await world.tick(1)


async def test_a_rollout_is_waited_for(cluster: Cluster, world: World) -> None:
    cluster.workload("deployments", "vllm", 3)
    world.proxies.join_all(cluster)
    cluster.pod("vllm-x3")["metadata"]["ownerReferences"][0]["name"] = "newer"
    assert "is rolled out" in await world.tick(2)
    assert world.proxies.drained == []
    assert await world.tick(4) == "", "more may come meanwhile"


async def test_new_pods_are_brought_in_where_a_port_is_told(cluster: Cluster, world: World) -> None:
    cluster.workload("deployments", "vllm", 1)
    world.successor(port=8000)
    world.proxies.join("a", "http://10.0.0.1:8000")
    assert await world.tick(2) == "1 of 2 pods are ready"
    cluster.settle()
    assert await world.tick(2) == "1 of 2 pods are ready"
    cluster.set_ready("vllm-x2", True)
    assert await world.tick(2) == ""
    assert world.proxies.added == [("vllm-x2", "http://10.0.0.2:8000")]
    del world.proxies.known["vllm-x2"]
    assert await world.tick(2) == ""
    assert len(world.proxies.added) == 1, "whom an operator took out stays out"


async def test_an_address_of_ip_version_6_is_brought_in(cluster: Cluster, world: World) -> None:
    cluster.workload("deployments", "vllm", 1)
    cluster.pod("vllm-x1")["status"]["podIP"] = "fd00::1"
    world.successor(port=8000)
    assert await world.tick(1) == ""
    assert world.proxies.added == [("vllm-x1", "http://[fd00::1]:8000")]
    await world.tick(0)
    assert world.proxies.drained == ["vllm-x1"]


async def test_a_pod_that_never_is_ready_is_told_as_what_is_missing(
    cluster: Cluster, world: World
) -> None:
    cluster.workload("deployments", "vllm", 1)
    world.successor(port=8000)
    await world.tick(2)
    cluster.settle()
    for _ in range(3):
        assert await world.tick(2) == "1 of 2 pods are ready"
    assert world.scaled() == [2]


async def test_an_autoscaler_is_overruled_and_named(cluster: Cluster, world: World) -> None:
    path = cluster.workload("deployments", "vllm", 2)
    await world.tick(3)
    target = {"kind": "Deployment", "name": "vllm", "apiVersion": "apps/v1"}
    cluster.put(f"{HPAS}/cpu", {"spec": {"scaleTargetRef": target}})
    cluster.objects[path]["spec"]["replicas"] = 5
    assert await world.tick(6) == (
        "deployments.apps/vllm was set to 5 by horizontalpodautoscalers.autoscaling/cpu, not to 3"
    )
    assert world.scaled() == [3, 6], "the target is absolute"
    assert await world.tick(6) == ""
    del cluster.objects[f"{HPAS}/cpu"]
    cluster.objects[path]["spec"]["replicas"] = 5
    assert "was set to 5 by somebody else, not to 6" in await world.tick(6)


async def test_a_conflict_is_tried_once_more(cluster: Cluster, world: World) -> None:
    cluster.workload("deployments", "vllm", 1)
    cluster.faults["PATCH", SCALE] = [409]
    assert await world.tick(2) == ""
    assert world.scaled() == [2, 2]
    cluster.faults["PATCH", SCALE] = [409, 409]
    with pytest.raises(ScalerError) as error:
        await world.tick(3)
    assert error.value.failure is Failure.CONFLICT
    assert cluster.objects[f"{APPS}/deployments/vllm"]["spec"]["replicas"] == 2


async def test_a_change_made_meanwhile_is_a_conflict(cluster: Cluster, world: World) -> None:
    """The object's version is part of what is asked for."""
    path = cluster.workload("deployments", "vllm", 1)
    read = Api.get
    raced: list[int] = []

    async def racing(api: Api, *args: Any) -> dict[str, Any]:
        said = await read(api, *args)
        if not raced and args[1:] == ("scale",):
            raced.append(cluster.put(path, cluster.objects[path])["spec"]["replicas"])
        return said

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Api, "get", racing)
        assert await world.tick(2) == ""
    assert world.scaled() == [2, 2]
    assert cluster.objects[path]["spec"]["replicas"] == 2


async def test_an_object_that_vanished_is_looked_for_anew(cluster: Cluster, world: World) -> None:
    path = cluster.workload("deployments", "vllm", 1)
    await world.tick(1)
    one = cluster.objects.pop(path)
    with pytest.raises(ScalerError, match="404, not there"):
        await world.tick(2)
    cluster.put(path, one)
    assert await world.tick(2) == ""


async def test_a_component_that_fails_does_not_stop_the_others(
    cluster: Cluster, world: World
) -> None:
    cluster.workload("deployments", "d", 1)
    world.successor(object={"prefill": "deployment/p", "decode": "deployment/d"})
    with pytest.raises(ScalerError, match=r"deployments\.apps/p .*404"):
        await world.scaler.apply(Decision(1, {"prefill": 2, "decode": 2}, 0.0), world.proxies)
    assert world.scaled() == [2]


@pytest.mark.parametrize("base", [DYNAMO, DYNAMO_BETA])
@pytest.mark.parametrize("has_adapter", [True, False])
async def test_a_graphs_service_is_scaled_by_its_adapter_else_by_the_graph(
    cluster: Cluster, world: World, base: str, has_adapter: bool
) -> None:
    decode = {"subComponentType": "decode", "type": "decode", "replicas": 2, "name": "Worker"}
    frontend = {"type": "frontend", "replicas": 1, "name": "Frontend"}
    spec: dict[str, Any] = {"components": [frontend, decode]}
    if base == DYNAMO:
        spec = {"services": {"Frontend": frontend, "Worker": decode}}
    graph = cluster.put(f"{base}/dynamographdeployments/g", {"spec": spec})
    if has_adapter:
        cluster.put(f"{base}/{ADAPTERS}/g-worker", {"spec": {"replicas": 2}})
    cluster.settle(ready=True)
    for pod in cluster.pods():
        if "frontend" not in pod["metadata"]["name"]:
            world.proxies.join(pod["metadata"]["name"], f"http://{pod['status']['podIP']}:8000")
    version = base.split("/")[3]
    world.successor(object=f"nvidia.com/{version}/dynamographdeployments/g")
    await world.tick(1, "decode")
    world.proxies.end()
    await world.tick(1, "decode")
    cluster.settle()
    assert await world.tick(1, "decode") == ""
    assert len(cluster.deleted) == 1
    assert decode["replicas"] == 1
    assert frontend["replicas"] == 1
    of_graph = [path for path, _ in cluster.changes() if path.endswith("dynamographdeployments/g")]
    assert len(of_graph) == (not has_adapter)
    assert graph["spec"] is spec


async def test_the_manifest_gives_the_rights_that_are_needed_and_no_others(
    cluster: Cluster, world: World
) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    text = (ROOT / "configs/kubernetes/planner.yaml").read_text("utf-8")
    role = next(one for one in yaml.safe_load_all(text) if one["kind"] == "Role")
    given = {
        f"{verb} {resource}"
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    cluster.workload("deployments", "vllm", 2)
    world.proxies.join_all(cluster)
    await world.scaler.validate([Component()])
    await world.tick(1)
    world.proxies.end()
    await world.tick(1)
    assert cluster.used == given
    assert {rule["resourceNames"][0] for rule in role["rules"] if "resourceNames" in rule} == {
        "vllm"
    }


class Killed(BaseException):
    """The planner's process ends here."""


class Killer:
    """Ends the planner after its n-th call of the API or the fleet, so before the next one."""

    def __init__(self, at: int) -> None:
        self.left = at

    def wrap(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def killing(*args: Any, **of: Any) -> Any:
            said = await call(*args, **of)
            self.left -= 1
            if self.left == 0:
                raise Killed
            return said

        return killing


@pytest.mark.long
@pytest.mark.parametrize("kind", ["deployments", "statefulsets"])
async def test_a_planner_killed_at_any_step_has_a_successor_that_goes_on(
    cluster: Cluster, world: World, kind: str
) -> None:
    """Nothing is deleted that was not drained, and never more than was decided."""
    died, at = True, 0
    while died:
        at += 1
        died = await _killed_once(world, kind, at)
    assert at > 25, "it was killed after every call"


async def _killed_once(world: World, kind: str, at: int) -> bool:
    """Play 4 -> 2, before that is done 3, and then 2; killed once; whether it was."""
    await world.scaler.aclose()
    world.cluster.objects, world.cluster.deleted = {}, []
    world.cluster.workload(kind, "vllm", 4)
    world.proxies = Proxies()
    world.proxies.join_all(world.cluster)
    world.first = {pod["status"]["podIP"] for pod in world.cluster.pods()}
    world.successor(object=f"{kind[:-1]}/vllm")
    killer, died, waits = Killer(at), False, "begun"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Api, "_call", killer.wrap(Api._call))
        for name in ("drain", "has_left", "add"):
            patch.setattr(world.proxies, name, killer.wrap(getattr(world.proxies, name)))
        for target, ticks in ((2, 2), (3, MOST_TICKS), (2, MOST_TICKS)):
            waits = "begun"
            for tick in range(ticks):
                try:
                    waits = waits and await world.tick(target)
                except Killed:
                    died = True
                    await world.scaler.aclose()
                    world.successor(object=f"{kind[:-1]}/vllm")
                _check(world, f"{APPS}/{kind}/vllm")
                if tick % 3 == 1:
                    world.proxies.end()
                if tick % 3 == 2:
                    world.cluster.settle(ready=True)
                    _check(world, f"{APPS}/{kind}/vllm")
    assert waits == ""
    assert len(world.cluster.pods()) == 2
    assert all(pod["metadata"]["annotations"] == {} for pod in world.cluster.pods())
    return died


def _check(world: World, path: str) -> None:
    """Enough is wanted, only what had left was deleted, and what is left serves or is to go."""
    assert world.cluster.objects[path]["spec"]["replicas"] >= 2
    known = world.proxies.known.values()
    gone = {pod["status"]["podIP"] for pod in world.cluster.deleted}
    assert not any(f"/{address}:" in one.url for address in gone for one in known)
    serve = [one.url for one in known if not one.is_draining]
    for pod in world.cluster.pods():
        if (address := pod["status"]["podIP"]) in world.first:
            is_used = any(f"/{address}:" in url for url in serve)
            assert is_used or LEAVES in pod["metadata"]["annotations"], "it is forgotten"
