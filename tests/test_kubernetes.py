"""The manifests in configs/kubernetes agree with the product and each other, and can be rendered.

No cluster has seen them.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from proxy.config.load import load
from proxy.config.options import Settings
from proxy.telemetry.metrics import Metrics
from replayer.simulator.cli import _parser
from tests.install.containerfile import stages_of, words_of
from tests.support.renew import RULES, rules

yaml: Any = pytest.importorskip("yaml", reason="PyYAML comes with the extra k8s")
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "configs/kubernetes"
BASE = "base"
OVERLAYS = [BASE, *sorted(f"overlays/{path.name}" for path in (FOLDER / "overlays").iterdir())]
AFTER_DRAIN_S = 15
KUBECTL = shutil.which("kubectl")
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")


def kustomization(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
    return found


def sources(folder: Path) -> Iterator[dict[str, Any]]:
    """The objects of a kustomization as they are written, those of its bases too."""
    for name in kustomization(folder).get("resources", ()):
        path = (folder / name).resolve()
        if path.is_dir():
            yield from sources(path)
        else:
            yield from yaml.safe_load_all(path.read_text("utf-8"))


def rendered(folder: Path) -> list[dict[str, Any]]:
    assert KUBECTL is not None
    text = subprocess.run(
        [KUBECTL, "kustomize", str(folder)], check=True, capture_output=True, timeout=60
    ).stdout
    return [*yaml.safe_load_all(text)]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


def of_an_operator(one: Mapping[str, Any]) -> bool:
    """Whether the object's schema comes with an operator, not with Kubernetes."""
    return ".coreos." in one["apiVersion"] or one["apiVersion"].startswith("keda.sh/")


def pod(workload: Mapping[str, Any]) -> Any:
    return workload["spec"]["template"]


def container(workload: Mapping[str, Any]) -> Any:
    (one,) = pod(workload)["spec"]["containers"]
    return one


def ports(workload: Mapping[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(workload)["ports"]}


def proxy_settings(deployment: Mapping[str, Any]) -> Settings:
    """What the options of the container are to the product's own parser."""
    args = [word.replace("$(POD_NAMESPACE)", "inference") for word in container(deployment)["args"]]
    at = f"--config={FOLDER / BASE / 'cache-proxy.toml'}"
    return load([at if word.startswith("--config=") else word for word in args], {}).settings


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_names_labels_and_ports_agree(overlay: str) -> None:
    objects = [*sources(FOLDER / overlay)]
    workloads = of_kind(objects, "Deployment")
    labels = {one["metadata"]["name"]: pod(one)["metadata"]["labels"] for one in workloads}
    for one in workloads:
        assert one["spec"]["selector"]["matchLabels"] == labels[one["metadata"]["name"]]
        for probe in ("livenessProbe", "readinessProbe"):
            if found := container(one).get(probe):
                assert (found.get("httpGet") or found["tcpSocket"])["port"] in ports(one)
    for service in of_kind(objects, "Service"):
        (behind,) = [
            one
            for one in workloads
            if pod(one)["metadata"]["labels"] == service["spec"]["selector"]
        ]
        assert {p["name"]: p["port"] for p in service["spec"]["ports"]} == ports(behind)
        assert all(p["targetPort"] == p["name"] for p in service["spec"]["ports"])
    for budget in of_kind(objects, "PodDisruptionBudget"):
        assert budget["spec"]["selector"]["matchLabels"] in labels.values()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_have_no_more_rights_than_they_need(overlay: str) -> None:
    for one in of_kind([*sources(FOLDER / overlay)], "Deployment"):
        of_pod, of_container = (
            pod(one)["spec"]["securityContext"],
            container(one)["securityContext"],
        )
        assert of_pod["runAsNonRoot"]
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert of_container == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_options_are_the_products() -> None:
    objects = [*sources(FOLDER / BASE)]
    (deployment,) = of_kind(objects, "Deployment")
    settings, spec = proxy_settings(deployment), pod(deployment)["spec"]
    assert [str(at) for at in settings.discover] == ["k8s://inference/vllm"]
    assert ports(deployment) == {"http": settings.port}
    assert spec["terminationGracePeriodSeconds"] == settings.drain_seconds + AFTER_DRAIN_S
    paths = {
        container(deployment)[p]["httpGet"]["path"] for p in ("livenessProbe", "readinessProbe")
    }
    assert paths == {"/live", "/ready"}
    (config,) = [w for w in container(deployment)["args"] if w.startswith("--config=")]
    (generated,) = kustomization(FOLDER / BASE)["configMapGenerator"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container(deployment)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert config == f"--config={mounts['options']}/{generated['files'][0]}"
    assert volumes["options"]["configMap"]["name"] == generated["name"]
    assert mounts.keys() == volumes.keys()


def test_the_role_has_the_right_that_discovery_needs() -> None:
    objects = [*sources(FOLDER / BASE)]
    (role,), (binding,) = of_kind(objects, "Role"), of_kind(objects, "RoleBinding")
    (account,) = of_kind(objects, "ServiceAccount")
    (deployment,) = of_kind(objects, "Deployment")
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"][0]["name"] == account["metadata"]["name"]
    assert pod(deployment)["spec"]["serviceAccountName"] == account["metadata"]["name"]


def test_the_simulated_engines_are_a_command_of_the_image() -> None:
    objects = [*sources(FOLDER / "overlays/sim")]
    (engine,) = [one for one in of_kind(objects, "Deployment") if one["metadata"]["name"] == "vllm"]
    one = container(engine)
    entry = words_of(stages_of((ROOT / "Containerfile").read_text("utf-8"))[-1].last("ENTRYPOINT"))
    assert Path(one["command"][0]).parent == Path(entry[0]).parent
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    assert Path(one["command"][0]).name in scripts
    given = _parser().parse_args(one["args"])
    assert ports(engine) == {"http": given.port, "bootstrap": given.bootstrap_port}


def test_what_is_scraped_and_ruled() -> None:
    objects = [*sources(FOLDER / "overlays/monitoring")]
    (monitor,), (service,) = of_kind(objects, "ServiceMonitor"), of_kind(objects, "Service")
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert service["metadata"]["name"] == "cache-proxy", "the job that the alerts name"
    # To renew it: python -m tests.support.renew
    assert (ROOT / RULES).read_text("utf-8") == rules()


def test_policies_name_pods_and_ports_that_are_there() -> None:
    objects = [*sources(FOLDER / "overlays/networkpolicy")]
    proxy, engines = of_kind(objects, "NetworkPolicy")
    (deployment,) = of_kind(objects, "Deployment")
    (engine,) = [
        one
        for one in of_kind([*sources(FOLDER / "overlays/sim")], "Deployment")
        if one["metadata"]["name"] == "vllm"
    ]
    labels = pod(deployment)["metadata"]["labels"]
    assert proxy["spec"]["podSelector"]["matchLabels"] == labels
    assert proxy["spec"]["ingress"][0]["ports"][0]["port"] in ports(deployment)
    assert engines["spec"]["podSelector"]["matchLabels"] == pod(engine)["metadata"]["labels"]
    assert engines["spec"]["ingress"][0]["from"] == [{"podSelector": {"matchLabels": labels}}]


def test_keda_asks_for_a_metric_that_the_proxy_exports() -> None:
    (scaled,) = of_kind([*sources(FOLDER / "overlays/keda")], "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    found = re.findall(r"\bcache_proxy_\w+", trigger["metadata"]["query"])
    assert found == ["cache_proxy_backlog_seconds"]
    assert {family.name for family in Metrics().registry.collect()} >= {*found}


@pytest.mark.long
@needs_kubectl
def test_replicas_share_by_the_server_beside_them() -> None:
    objects = rendered(FOLDER / "overlays/replicas")
    workloads = {one["metadata"]["name"]: one for one in of_kind(objects, "Deployment")}
    proxy, server = workloads["cache-proxy"], workloads["valkey"]
    env = {one["name"]: one for one in container(proxy)["env"]}
    key = env["CACHE_PROXY_SHARE_KEY"]["valueFrom"]["secretKeyRef"]
    assert key["name"] not in {one["metadata"]["name"] for one in objects}, "it is the operator's"
    given = {
        "CACHE_PROXY_SHARE": env["CACHE_PROXY_SHARE"]["value"],
        "CACHE_PROXY_SHARE_KEY": "k" * 32,
    }
    share = load(["--instances=a:1"], given).settings.share
    (service,) = [one for one in of_kind(objects, "Service") if one["metadata"]["name"] == "valkey"]
    (port,) = service["spec"]["ports"]
    assert share is not None
    assert share.get_secret_value() == f"redis://{service['metadata']['name']}:{port['port']}"
    assert (proxy["spec"]["replicas"], server["spec"]["replicas"]) == (2, 1)
    labels = pod(proxy)["metadata"]["labels"]
    (spread,) = pod(proxy)["spec"]["topologySpreadConstraints"]
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert "volumes" not in pod(server)["spec"], "what it has is of the last minute"
    (policy,) = of_kind(objects, "NetworkPolicy")
    (allowed,) = policy["spec"]["ingress"][0]["from"]
    assert allowed["podSelector"]["matchLabels"].items() <= labels.items()


@pytest.mark.long
@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_renders(overlay: str, tmp_path: Path) -> None:
    objects = rendered(FOLDER / overlay)
    written = {(one["kind"], one["metadata"]["name"]) for one in sources(FOLDER / overlay)}
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    assert written == {name for name in names if name[0] != "ConfigMap"}
    spaces = {one["metadata"].get("namespace") for one in objects if one["kind"] != "Namespace"}
    assert spaces == {"inference"}
    (deployment,) = [
        one for one in of_kind(objects, "Deployment") if one["metadata"]["name"] == "cache-proxy"
    ]
    options = next(v for v in pod(deployment)["spec"]["volumes"] if v["name"] == "options")
    assert ("ConfigMap", options["configMap"]["name"]) in names
    assert options["configMap"]["name"].startswith("cache-proxy-")
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("rendered; kubernetes-validate is not installed, so no schema was looked at")
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all(o for o in objects if not of_an_operator(o)))
    check = [sys.executable, "-m", "kubernetes_validate", "--strict", str(path)]
    subprocess.run(check, check=True, capture_output=True, timeout=120)


@needs_kubectl
def test_an_overlay_of_ones_own_has_another_namespace_and_image(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    own = tmp_path / "own"
    own.mkdir()
    (own / "kustomization.yaml").write_text(
        "namespace: models\n"
        "resources: [../kubernetes/base]\n"
        "images: [{name: cache-proxy, newName: registry.example/cache-proxy, newTag: v1}]\n"
    )
    objects = rendered(own)
    assert {one["metadata"]["namespace"] for one in objects} == {"models"}
    (binding,), (deployment,) = of_kind(objects, "RoleBinding"), of_kind(objects, "Deployment")
    assert binding["subjects"][0]["namespace"] == "models"
    assert container(deployment)["image"] == "registry.example/cache-proxy:v1"
