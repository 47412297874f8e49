"""Calls of the API and what their failures are told as."""

from __future__ import annotations

import importlib
import re
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme

from planner.scalers.base import Failure, ScalerError
from planner.scalers.kubernetes import api as module
from planner.scalers.kubernetes.api import PODS, Api, connected
from planner.scalers.kubernetes.options import KubernetesOptions, parsed
from tests.support.cluster import APPS, NAMESPACE, Cluster, kubeconfig

DEPLOYMENT = parsed("deployment/vllm")
SCALE = ("GET", f"{APPS}/deployments/vllm/scale")


def options(file: str) -> KubernetesOptions:
    return KubernetesOptions(object="deployment/vllm", namespace=NAMESPACE, kubeconfig=file)


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio.config", None)
    coroutine = connected(options(""))
    with pytest.raises(ScalerError, match=r"^kubernetes-asyncio is not installed; run pip inst"):
        coroutine.send(None)


class TestCalls:
    @pytest.fixture(autouse=True)
    def _needs_the_library(self) -> None:
        pytest.importorskip("kubernetes_asyncio", reason="the extra k8s is not installed")

    @pytest.fixture
    def cluster(self) -> Cluster:
        cluster = Cluster()
        cluster.workload("deployments", "vllm", 2)
        return cluster

    @pytest.fixture
    async def api(self, cluster: Cluster, tmp_path: Path) -> AsyncIterator[Api]:
        async with cluster.served() as server:
            api = await connected(options(kubeconfig(tmp_path / "config", server)))
            yield api
            await api.aclose()

    async def test_objects_are_read_listed_and_changed(self, api: Api, cluster: Cluster) -> None:
        scale = await api.get(DEPLOYMENT, "scale")
        assert scale["spec"] == {"replicas": 2}
        assert scale["status"]["selector"] == "app=vllm"
        assert len(await api.list(PODS, "app=vllm")) == 2
        await api.patch(DEPLOYMENT, {"spec": {"replicas": 3}}, "scale")
        assert (await api.get(DEPLOYMENT))["spec"]["replicas"] == 3

    async def test_a_right_is_asked_for(self, api: Api, cluster: Cluster) -> None:
        cluster.forbidden = {"patch deployments/scale"}
        assert await api.may("get", DEPLOYMENT, "scale")
        assert not await api.may("patch", DEPLOYMENT, "scale")

    async def test_a_missing_right_is_told_as_the_rule_that_gives_it(
        self, api: Api, cluster: Cluster
    ) -> None:
        cluster.forbidden = {"patch deployments/scale", "list pods"}
        with pytest.raises(ScalerError) as error:
            await api.patch(DEPLOYMENT, {"spec": {"replicas": 3}}, "scale")
        assert error.value.failure is Failure.FORBIDDEN
        assert str(error.value) == (
            "PATCH deployments.apps/vllm/scale in namespace inference: 403, forbidden; its Role "
            'lacks {apiGroups: ["apps"], resources: ["deployments/scale"], verbs: ["patch"]}'
        )
        with pytest.raises(
            ScalerError, match=r'apiGroups: \[""\], resources: \["pods"\], verbs: \["list"'
        ):
            await api.list(PODS, "app=vllm")

    @pytest.mark.parametrize(
        ("status", "failure", "said"),
        [
            (401, Failure.FORBIDDEN, "401, the planner's credentials are not accepted"),
            (404, Failure.MISSING, "404, not there"),
            (409, Failure.CONFLICT, "409, somebody else changed it meanwhile"),
            (422, Failure.FAILED, "422, a fault"),
            (500, Failure.FAILED, "500, a fault"),
        ],
    )
    async def test_other_statuses(
        self, api: Api, cluster: Cluster, status: int, failure: Failure, said: str
    ) -> None:
        cluster.faults[SCALE] = [status]
        with pytest.raises(ScalerError) as error:
            await api.get(DEPLOYMENT, "scale")
        assert error.value.failure is failure
        assert str(error.value) == f"GET deployments.apps/vllm/scale in namespace inference: {said}"

    async def test_what_a_webhook_denies_is_no_missing_right(
        self, api: Api, cluster: Cluster
    ) -> None:
        cluster.faults[SCALE] = [403]
        with pytest.raises(ScalerError, match=r"inference: 403, a fault$") as error:
            await api.get(DEPLOYMENT, "scale")
        assert error.value.failure is Failure.FORBIDDEN

    async def test_no_answer_is_a_timeout(
        self, api: Api, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "TIMEOUT_S", 0.05)
        cluster.faults[SCALE] = [0]
        with pytest.raises(ScalerError, match=r"no answer within 0\.05 s") as error:
            await api.get(DEPLOYMENT, "scale")
        assert error.value.failure is Failure.TIMEOUT

    async def test_credentials_that_cannot_be_renewed_are_told(
        self, api: Api, cluster: Cluster
    ) -> None:
        config = importlib.import_module("kubernetes_asyncio.config")

        def no_token(*_: object) -> None:
            raise config.ConfigException("Token file exists but empty.")

        api._client.configuration.refresh_api_key_hook = no_token
        with pytest.raises(ScalerError, match=r"no credentials: Token file exists but empty\.$"):
            await api.get(DEPLOYMENT)
        assert cluster.calls == []

    async def test_a_server_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        api = await connected(options(kubeconfig(tmp_path / "config", "http://127.0.0.1:9")))
        with pytest.raises(ScalerError, match=r"http://127\.0\.0\.1:9 not reached") as error:
            await api.list(PODS)
        assert error.value.failure is Failure.UNREACHABLE
        assert "\n" not in str(error.value)
        await api.aclose()

    @pytest.mark.parametrize("text", [None, "", "- a", "{", "{}", "clusters: 5\ncontexts: 5"])
    async def test_a_kubeconfig_that_leads_nowhere_is_named(
        self, tmp_path: Path, text: str | None
    ) -> None:
        file = tmp_path / "config"
        if text is not None:
            file.write_text(text)
        with pytest.raises(ScalerError, match=f"no way into a cluster by {re.escape(str(file))}: "):
            await connected(options(str(file)))

    async def test_outside_of_a_cluster_a_kubeconfig_is_needed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        with pytest.raises(ScalerError, match="by the pod's service account: ") as error:
            await connected(options(""))
        assert error.value.failure is Failure.UNREACHABLE

    async def test_a_pod_uses_its_service_account(
        self, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        authority = trustme.CA()
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(tls)
        authority.cert_pem.write_to_path(tmp_path / "ca.crt")
        (tmp_path / "token").write_text("of-the-pod")
        (tmp_path / "namespace").write_text(f"{NAMESPACE}\n")
        inside = importlib.import_module("kubernetes_asyncio.config.incluster_config")
        monkeypatch.setattr(inside, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
        monkeypatch.setattr(inside, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
        monkeypatch.setattr(module, "OWN_NAMESPACE", tmp_path / "namespace")
        async with cluster.served(tls) as server:
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            monkeypatch.setenv("KUBERNETES_SERVICE_PORT", server.rpartition(":")[2])
            api = await connected(KubernetesOptions(object="deployment/vllm"))
            assert (await api.get(DEPLOYMENT))["spec"]["replicas"] == 2
            await api.aclose()
        assert cluster.calls[-1].token == "Bearer of-the-pod"

    async def test_an_answer_of_another_form_is_named(self, api: Api, cluster: Cluster) -> None:
        cluster.objects[f"{APPS}/deployments/vllm"] = [1]  # type: ignore[assignment]
        with pytest.raises(ScalerError, match="200, no JSON object in the answer"):
            await api.get(DEPLOYMENT)
