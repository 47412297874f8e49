"""A source for each kind of `--discover`."""

from __future__ import annotations

import pytest

from proxy.config.options import Settings
from proxy.config.sources import ConfigError
from proxy.config.values import DISCOVER_FORM, DiscoverAt
from proxy.fleet.discovery.dns import Dns
from proxy.fleet.discovery.kubernetes import Kubernetes
from proxy.fleet.discovery.registry import DISCOVERIES, Around, sources
from proxy.net.addresses import Resolver

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
BOTH = "dns://engines.example:8000,k8s://inference/vllm"


def around(**environ: str) -> Around:
    return Around(Settings(discover=BOTH), Resolver(), environ)


def test_sources_by_their_texts() -> None:
    found = sources(around(**POD))
    assert {text: type(source) for text, source in found.items()} == {
        "dns://engines.example:8000": Dns,
        "k8s://inference/vllm": Kubernetes,
    }


def test_every_kind_that_is_read_has_a_source() -> None:
    assert all(f"{kind}://" in DISCOVER_FORM for kind in DISCOVERIES)
    assert {DiscoverAt.parse(text).kind for text in BOTH.split(",")} == {*DISCOVERIES}


def test_outside_a_pod() -> None:
    with pytest.raises(ConfigError, match="discover = 'k8s://inference/vllm': KUBERNETES_SERVICE"):
        sources(around())
