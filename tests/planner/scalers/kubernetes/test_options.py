"""Objects and options of the Kubernetes scaler, from text."""

from __future__ import annotations

import re

import pytest

from planner.scalers.kubernetes.options import KubernetesOptions, Resource, parsed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("deployment/vllm", "deployments.apps/vllm"),
        ("StatefulSet/vllm-7b", "statefulsets.apps/vllm-7b"),
        ("leaderworkerset/big", "leaderworkersets.leaderworkerset.x-k8s.io/big"),
        ("dynamographdeployment/g", "dynamographdeployments.nvidia.com/g"),
        ("nvidia.com/v1beta1/dynamographdeployments/g", "dynamographdeployments.nvidia.com/g"),
        (
            "dynamographdeploymentscalingadapter/g-decode",
            "dynamographdeploymentscalingadapters.nvidia.com/g-decode",
        ),
    ],
)
def test_an_object_is_a_kind_or_a_group_version_and_plural(text: str, said: str) -> None:
    assert str(parsed(text)) == said


def test_the_version_is_kept() -> None:
    told = parsed("nvidia.com/v1beta1/dynamographdeployments/g")
    assert told == Resource("nvidia.com", "v1beta1", "dynamographdeployments", "g")
    assert told.is_graph
    assert not parsed("deployment/vllm").is_graph


@pytest.mark.parametrize(
    "text",
    ["vllm", "pod/vllm", "deployment/", "deployment/Vllm", "a/b/vllm", "deployment/a b", "//"],
)
def test_another_text_is_no_object(text: str) -> None:
    with pytest.raises(ValueError, match=r"^object: .* is no object; it is KIND/NAME .*$"):
        KubernetesOptions(object=text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "object: missing, and DYN_PARENT_DGD_K8S_NAME is not set; it is KIND/NAME"),
        ({"object": "deployment/a", "port": -1}, "port: -1; it is 0 to 65535"),
        ({"object": "deployment/a", "port": "8000"}, "port: '8000' is no integer"),
        ({"object": "deployment/a", "port": True}, "port: True is no integer"),
        ({"object": "deployment/a", "kubeconfig": 5}, "kubeconfig: 5 is no text"),
        ({"object": 5}, "object: 5 is no object; it is KIND/NAME"),
        ({"object": {"decode": ["a"]}}, "object: ['a'] is no object; it is KIND/NAME"),
        ({"object": "deployment/a", "port": 65536}, "port: 65536; it is 0 to 65535"),
        ({"object": "deployment/a", "namespace": "a/b"}, "namespace: 'a/b' is no name"),
    ],
)
def test_bad_options_are_told_in_one_line(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}.*$"):
        KubernetesOptions(**options)  # type: ignore[arg-type]


def test_the_parent_is_the_object_where_none_is_named() -> None:
    assert KubernetesOptions(parent="g").resources() == {"": parsed("dynamographdeployment/g")}
    told = KubernetesOptions(object="deployment/a", parent="g")
    assert told.resources() == {"": parsed("deployment/a")}


def test_each_component_may_have_an_object_of_its_own() -> None:
    told = KubernetesOptions(object={"prefill": "deployment/p", "decode": "deployment/d"})
    assert {name: str(one) for name, one in told.resources().items()} == {
        "prefill": "deployments.apps/p",
        "decode": "deployments.apps/d",
    }
