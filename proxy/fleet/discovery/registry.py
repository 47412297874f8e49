"""DISCOVERIES: every kind of discovery by the scheme of its option."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from proxy.config.options import Settings
from proxy.config.sources import ConfigError
from proxy.config.values import DiscoverAt
from proxy.fleet.discovery.base import DiscoveryError, Source
from proxy.fleet.discovery.dns import Dns
from proxy.fleet.discovery.kubernetes import Api, Kubernetes, Times
from proxy.net.addresses import Resolver


@dataclass(frozen=True, slots=True)
class Around:
    """What a source may need beside its own place."""

    settings: Settings
    resolver: Resolver
    environ: Mapping[str, str]


def _dns(at: DiscoverAt, around: Around) -> Source:
    return Dns(at, around.resolver)


def _k8s(at: DiscoverAt, around: Around) -> Source:
    api = Api.named_by(around.environ, around.settings.discover_account)
    return Kubernetes(at, api, Times(connect_s=around.settings.connect_timeout))


DISCOVERIES: Mapping[str, Callable[[DiscoverAt, Around], Source]] = {"dns": _dns, "k8s": _k8s}


def sources(around: Around) -> dict[str, Source]:
    """The sources of `--discover` by their texts; raises ConfigError."""
    found = {}
    for at in around.settings.discover:
        try:
            found[str(at)] = DISCOVERIES[at.kind](at, around)
        except DiscoveryError as error:
            raise ConfigError(f"discover = {str(at)!r}: {error}") from error
    return found
