"""Where an instance that is added at run time may be: an allow-list against request forgery.

Whoever may add an instance makes the proxy connect somewhere, so every address of it is judged
before it is taken in, and again whenever its name is asked for anew (`resolve`). Redirects are
never followed: an answer that is not 200 is a failure.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterable
from ipaddress import ip_network
from urllib.parse import urlsplit

from proxy.config_values import InstanceSpec
from proxy.deadline import Limit
from proxy.protocol.errors import UpstreamFailure
from proxy.resolve import Address, Networks, Resolver, literal, never, within

LOOK_UP_S = 2.0
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)\.?", re.IGNORECASE)
"""A last label like this makes a host an IPv4 address in one of its forgotten spellings."""
_LABELS = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*\.?")


class ForbiddenAddressError(ValueError):
    """An address that must not be asked; says why."""


async def check(
    spec: InstanceSpec,
    allowed: Networks | None,
    configured: Iterable[InstanceSpec],
    own_ports: Collection[int],
    resolver: Resolver,
) -> None:
    """Raise ForbiddenAddressError unless every address of `spec` is within `allowed`.

    None allowed: the addresses of the configured instances. `own_ports`: the proxy's.
    """
    urls = [url for url in (spec.url, spec.bootstrap_url) if url]
    hosts = [urlsplit(url).hostname or "" for url in urls]
    for host in hosts:
        _check_form(host)
    configured = list(configured)
    networks = await _of(configured, resolver) if allowed is None else allowed
    new = [host for host in hosts if not resolver.knows(host)]
    try:
        for url in urls:
            await _check_addresses(url, networks, own_ports, resolver)
    except ForbiddenAddressError:
        for host in new:
            resolver.forget(host)
        raise
    # An operator's own instances may move; behind this nothing waits until `spec` is in.
    trusted = {urlsplit(other.url).hostname for other in configured}
    for host in hosts:
        if literal(host) is None and host not in trusted:
            resolver.fence(host, networks)


def _check_form(host: str) -> None:
    if literal(host) is None:
        if _NUMBER.fullmatch(host.rpartition(".")[2] or host.rstrip(".").rpartition(".")[2]):
            raise ForbiddenAddressError(f"{host!r} is not an address in its usual form")
        if len(host) > 253 or not _LABELS.fullmatch(host):
            raise ForbiddenAddressError(f"{host!r} is no name of a host")


async def _check_addresses(
    url: str, networks: Networks, own_ports: Collection[int], resolver: Resolver
) -> None:
    parts = urlsplit(url)
    port = parts.port or 0
    for address in await _look_up(parts.hostname or "", port, resolver):
        _check_address(address, port, networks, own_ports)


async def _look_up(host: str, port: int, resolver: Resolver) -> list[Address]:
    try:
        with Limit(LOOK_UP_S):
            texts = await resolver.addresses(host, port)
    except (UpstreamFailure, TimeoutError):
        raise ForbiddenAddressError(f"{host!r} has no address, or none that is allowed") from None
    return [a for text in texts if (a := literal(text.partition("%")[0])) is not None]


def _check_address(
    address: Address, port: int, networks: Networks, own_ports: Collection[int]
) -> None:
    if why := never(address):
        raise ForbiddenAddressError(why)
    if not within(address, networks):
        raise ForbiddenAddressError(f"{address} is outside the allowed networks (--allow-cidr)")
    if port in own_ports and _is_here(address):
        raise ForbiddenAddressError(f"{address}:{port} is this proxy")


def _is_here(address: Address) -> bool:
    """Whether an address is this machine's: only then a socket can be bound to it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


async def _of(configured: Iterable[InstanceSpec], resolver: Resolver) -> Networks:
    """The addresses of the configured instances and their bootstrap servers, each by itself."""
    found = []
    for spec in configured:
        for url in filter(None, (spec.url, spec.bootstrap_url)):
            parts = urlsplit(url)
            try:
                addresses = await _look_up(parts.hostname or "", parts.port or 0, resolver)
            except ForbiddenAddressError:
                continue  # its name is not known now: nothing can be added beside it
            found += [ip_network(address) for address in addresses]
    return found
