"""What objects say: replicas, services of a graph, GPUs, models."""

from __future__ import annotations

from typing import Any

import pytest

from planner.scalers.base import Failure, ScalerError
from planner.scalers.kubernetes.objects import (
    Replicas,
    Scalable,
    gpus_per_replica,
    model_of,
    scalable,
    service_named,
    services_of,
)
from planner.scalers.kubernetes.options import parsed

GRAPH = parsed("dynamographdeployment/g")
DEPLOYMENT = parsed("deployment/vllm")


def graph(**services: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": "7"}, "spec": {"services": services}}


def beta(*components: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": "7"}, "spec": {"components": list(components)}}


def template(gpus: str = "1", *args: str) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": gpus, "cpu": "8"}
    return {"spec": {"containers": [{"resources": {"limits": limits}, "args": list(args)}]}}


@pytest.mark.parametrize(
    ("component", "of", "service"),
    [
        (
            "prefill",
            graph(a={"subComponentType": "prefill"}, b={"subComponentType": "decode"}),
            "a",
        ),
        ("decode", graph(a={"subComponentType": "prefill"}, b={"subComponentType": "decode"}), "b"),
        ("decode", beta({"name": "a", "type": "frontend"}, {"name": "b", "type": "decode"}), "b"),
        ("combined", graph(a={"componentType": "frontend"}, w={"subComponentType": "decode"}), "w"),
        # A type goes before a label, a label before a name.
        ("decode", graph(decode={"labels": {"cache-planner/component": "prefill"}}), "decode"),
        (
            "decode",
            graph(decode={}, x={"labels": {"cache-planner/component": "decode"}}),
            "x",
        ),
        (
            "combined",
            beta(
                {
                    "name": "x",
                    "podTemplate": {
                        "metadata": {"labels": {"cache-planner/component": "combined"}}
                    },
                }
            ),
            "x",
        ),
        ("prefill", graph(VllmPrefillWorker={}, VllmDecodeWorker={}), "VllmPrefillWorker"),
        ("combined", graph(VllmWorker={}), "VllmWorker"),
        ("combined", beta({"name": "TRTLLMWorker", "type": "worker"}), "TRTLLMWorker"),
    ],
)
def test_a_service_is_found_by_type_label_or_name(
    component: str, of: dict[str, Any], service: str
) -> None:
    assert service_named(GRAPH, of, component) == service
    assert scalable(GRAPH, of, component) == Scalable(GRAPH, service)


@pytest.mark.parametrize(
    ("of", "failure", "said"),
    [
        (
            graph(Frontend={}),
            Failure.MISSING,
            "no service is decode by type, label cache-planner/com",
        ),
        (graph(decode={"subComponentType": "prefill"}), Failure.MISSING, "it has decode"),
        (graph(), Failure.MISSING, "it has none"),
        (
            graph(a={"subComponentType": "decode"}, b={"subComponentType": "decode"}),
            Failure.FAILED,
            "services a, b are all decode; one may be",
        ),
        ({"spec": {"components": [{}]}}, Failure.FAILED, "has another form than is known"),
    ],
)
def test_a_service_that_is_not_clear_is_named(
    of: dict[str, Any], failure: Failure, said: str
) -> None:
    with pytest.raises(ScalerError, match=said) as error:
        scalable(GRAPH, of, "decode")
    assert error.value.failure is failure


def test_a_statefulset_may_begin_with_another_ordinal() -> None:
    stateful = parsed("statefulset/s")
    assert scalable(stateful, {"spec": {"ordinals": {"start": 3}}}, "combined").start == 3
    assert scalable(stateful, {"spec": {}}, "combined") == Scalable(stateful)


def test_a_change_is_a_conflict_if_the_object_is_another_by_then() -> None:
    scale = Replicas(3, "app=vllm", DEPLOYMENT, "scale", "7")
    version = {"resourceVersion": "7"}
    assert scale.body(2) == {"metadata": version, "spec": {"replicas": 2}}
    service = Replicas(3, "", GRAPH, "", "7", ("decode",))
    assert service.body(2) == {
        "metadata": version,
        "spec": {"services": {"decode": {"replicas": 2}}},
    }
    component = Replicas(3, "", GRAPH, "", "7", (1,))
    assert component.body(2) == [
        {"op": "replace", "path": "/metadata/resourceVersion", "value": "7"},
        {"op": "add", "path": "/spec/components/1/replicas", "value": 2},
    ]


def test_the_adapter_of_a_service_is_of_the_graphs_version() -> None:
    of = Scalable(parsed("nvidia.com/v1beta1/dynamographdeployments/g"), "VllmWorker")
    assert of.adapter == parsed(
        "nvidia.com/v1beta1/dynamographdeploymentscalingadapters/g-vllmworker"
    )
    assert str(of) == "dynamographdeployments.nvidia.com/g (VllmWorker)"
    assert Scalable(DEPLOYMENT).adapter == DEPLOYMENT


def test_services_are_the_same_in_both_versions() -> None:
    assert services_of(graph(a={"replicas": 1})) == {"a": {"replicas": 1}}
    assert services_of(beta({"name": "a"})) == {"a": {"name": "a"}}


@pytest.mark.parametrize(
    ("object_", "of", "gpus"),
    [
        ("deployment/d", {"spec": {"template": template("2")}}, 2),
        ("deployment/d", {"spec": {"template": {"spec": {"containers": [{}]}}}}, None),
        (
            "leaderworkerset/l",
            {"spec": {"leaderWorkerTemplate": {"size": 3, "workerTemplate": template("8")}}},
            24,
        ),
        (
            "leaderworkerset/l",
            {
                "spec": {
                    "leaderWorkerTemplate": {
                        "size": 3,
                        "leaderTemplate": template("0"),
                        "workerTemplate": template("8"),
                    }
                }
            },
            16,
        ),
        ("dynamographdeploymentscalingadapter/a", {"spec": {"replicas": 1}}, None),
    ],
)
def test_gpus_are_those_of_all_pods_of_a_replica(
    object_: str, of: dict[str, Any], gpus: int | None
) -> None:
    assert gpus_per_replica(Scalable(parsed(object_)), of) == gpus


def test_a_services_gpus_stand_in_one_of_three_places() -> None:
    main = template("4")["spec"]["containers"][0]
    for service in (
        {"resources": {"limits": {"gpu": "4"}}, "extraPodSpec": {"mainContainer": main}},
        {"extraPodSpec": {"mainContainer": main}},
    ):
        assert gpus_per_replica(Scalable(GRAPH, "a"), graph(a=service)) == 4
    of = beta({"name": "a", "podTemplate": template("4")})
    assert gpus_per_replica(Scalable(GRAPH, "a"), of) == 4


@pytest.mark.parametrize(
    ("args", "model"),
    [
        (["--model", "Qwen/Qwen3-8B"], "Qwen/Qwen3-8B"),
        (["--model=a", "--served-model-name=b"], "b"),
        (["python -m vllm --model a"], "a"),
        (["--port", "8000"], None),
        (["--model"], None),
    ],
)
def test_the_model_is_read_from_the_command_line(args: list[str], model: str | None) -> None:
    of = {"spec": {"template": template("1", *args)}}
    assert model_of(Scalable(DEPLOYMENT), of) == model
    service = beta({"name": "a", "podTemplate": template("1", *args)})
    assert model_of(Scalable(GRAPH, "a"), service) == model
