"""Resolves host names of instances, and checks which addresses may be used.

An answer of the name server is kept for a while, longer if the name server fails. Every answer is
checked before use: a changed name must not move an instance to this machine, to a metadata service
or out of the allowed networks. A refused answer counts as a failure.

An operator who adds an instance at run time makes the proxy connect to it. Against request forgery,
`check` checks every address of the instance before it is added, and `refused` one that a discovery
has found. Redirects are never followed: an answer that is not 200 is a failure.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from itertools import islice
from urllib.parse import urlsplit

from proxy.config.values import InstanceSpec
from proxy.core.types import FailureKind
from proxy.net.timeouts import Limit, MayHang
from proxy.protocol.errors import UpstreamFailure

Address = IPv4Address | IPv6Address
Networks = Sequence[IPv4Network | IPv6Network]
TTL_S = 5.0
"""An answer is used for this long before the name server is asked again."""
GOOD_S = 60.0
"""While the name server fails, the last good answer is used for this long."""
ANSWER_S = 1.0
"""A name server that takes longer has failed, if there is a last good answer."""
NAMES = 4096
LOOK_UPS = 64
"""Names that are looked up at once, each by a thread; a further one has no address meanwhile."""
MOST_ADDRESSES = 32
"""Of an answer so many addresses are used, the first ones. It may have thousands; the check of each
takes up to 40 us, and a request may try them all."""
_METADATA = frozenset({"100.100.100.200", "192.0.0.192", "fd00:ec2::254"})
"""Metadata addresses that are not link-local, and so may be within an allowed network."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Known:
    addresses: tuple[str, ...]
    good_s: float
    asked_s: float
    was_loopback: bool


LookUp = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host and a port to addresses; raises OSError, or UnicodeError for an invalid name."""


class LookUps:
    """The system's name service, asked for one name by one call, which may hang.

    Who asks for a name meanwhile waits for the same answer.
    """

    def __init__(self) -> None:
        self._calls = MayHang[list[str]]("names", LOOK_UPS)
        self._asked: dict[str, asyncio.Future[list[str]]] = {}

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """See `LookUp`. No time limit."""
        asked = self._asked.get(host)
        if asked is None:
            asked = self._asked[host] = self._calls.begin(lambda: _found(host))
            asked.add_done_callback(lambda _: self._asked.pop(host))
        return await asyncio.shield(asked)


def _found(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(info[4][0]) for info in found]


class Resolver:
    """Resolved names of one process. `fence` limits a name to networks; `now_s` is monotonic."""

    def __init__(
        self, look_up: LookUp | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.look_up = look_up or LookUps()
        self._now_s = now_s
        self._known: dict[str, _Known] = {}
        self._fences: dict[str, Networks] = {}

    def fence(self, host: str, networks: Networks) -> None:
        """Limit a name's addresses to these networks. The names are bounded by the instances."""
        self._fences[host] = networks

    def knows(self, host: str) -> bool:
        """Whether the name has been resolved for an instance."""
        return host in self._known

    def last(self, host: str) -> frozenset[str]:
        """The addresses that a host had when it was asked for last; a literal is its own."""
        if literal(host) is not None:
            return frozenset((host,))
        known = self._known.get(host)
        return frozenset(known.addresses) if known is not None else frozenset()

    def several(self, host: str) -> list[str]:
        """The addresses of a name that has more than one of a kind, IPv4 or IPv6; else none.

        One of each are mostly the same server's.
        """
        by_kind: dict[bool, list[str]] = {}
        for address in sorted(self.last(host)):
            by_kind.setdefault(":" in address, []).append(address)
        return [a for alike in by_kind.values() if len(alike) > 1 for a in alike]

    def keep(self, hosts: Collection[str]) -> None:
        """Forget all names but these, the present instances'."""
        for table in (self._known, self._fences):
            for host in [h for h in table if h not in hosts]:
                del table[host]

    def forget(self, host: str) -> None:
        """Forget a name whose instance was not added."""
        self._known.pop(host, None)
        self._fences.pop(host, None)

    async def addresses(self, host: str, port: int) -> tuple[str, ...]:
        """Addresses to connect to, best first; raises UpstreamFailure. No time limit."""
        if literal(host) is not None:
            return (host,)
        now_s = self._now_s()
        known = self._known.get(host)
        if known is None:
            return await self._ask(host, port, None)
        if known.addresses and now_s - known.asked_s < TTL_S:
            return known.addresses
        if not known.addresses:
            return await self._ask(host, port, known)
        known.asked_s = now_s  # meanwhile other requests use the known addresses
        try:
            with Limit(ANSWER_S):
                return await self._ask(host, port, known)
        except (UpstreamFailure, TimeoutError):
            if now_s - known.good_s >= GOOD_S:
                known.addresses = ()  # `was_loopback` is kept
                raise UpstreamFailure(FailureKind.UNREACHABLE, "its name has no address") from None
            return known.addresses

    async def _ask(self, host: str, port: int, known: _Known | None) -> tuple[str, ...]:
        try:
            found = dict.fromkeys(await self.look_up(host, port))
        except (OSError, UnicodeError) as error:
            raise UpstreamFailure(FailureKind.UNREACHABLE, "its name has no address") from error
        addresses = tuple(islice(found, MOST_ADDRESSES))
        if not addresses:
            raise UpstreamFailure(FailureKind.UNREACHABLE, "its name has no address")
        parsed = [ipaddress.ip_address(a.partition("%")[0]) for a in addresses]
        why = self._refused(host, parsed, known)
        if why:
            _log.warning("instance %s: the new address of its name is refused: %s", host, why)
            raise UpstreamFailure(FailureKind.UNREACHABLE, "its name's address is refused")
        if len(self._known) >= NAMES:
            self._known.clear()
        now_s, is_loopback = self._now_s(), any(a.is_loopback for a in parsed)
        was_loopback = is_loopback if known is None else known.was_loopback
        self._known[host] = _Known(addresses, now_s, now_s, was_loopback)
        return addresses

    def _refused(self, host: str, found: list[Address], known: _Known | None) -> str | None:
        for address in found:
            if why := never(address):
                return why
            if known is not None and address.is_loopback and not known.was_loopback:
                return f"{address} is this machine"
            fence = self._fences.get(host)
            if fence is not None and not within(address, fence):
                return f"{address} is outside the allowed networks"
        return None


def literal(host: str) -> Address | None:
    """The address that a host text is, or None for a name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def within(address: Address, networks: Networks) -> bool:
    """Whether the address is within one of the networks."""
    return any(address in network for network in networks)


def never(address: Address) -> str | None:
    """Why a name may never resolve to this address; None if it may."""
    what = next((what for what, is_so in _NEVER if is_so(address)), None)
    return f"{address} is {what}" if what else None


def _hides_another(address: Address) -> bool:
    return isinstance(address, IPv6Address) and bool(
        address.ipv4_mapped or address.sixtofour or address.teredo or address.scope_id
    )


_NEVER: tuple[tuple[str, Callable[[Address], bool]], ...] = (
    ("an address that embeds another one", _hides_another),
    ("a metadata service", lambda a: str(a) in _METADATA),
    ("link-local", lambda a: a.is_link_local),
    ("not a host address", lambda a: a.is_unspecified or a.is_multicast),
    ("reserved", lambda a: a.is_reserved and not a.is_loopback),
)
LOOK_UP_S = 2.0
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)\.?", re.IGNORECASE)
"""A host whose last label matches would be parsed as an IPv4 address in an unusual spelling."""
_LABELS = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*\.?")


class ForbiddenAddressError(ValueError):
    """The address may not be used; the text is the reason."""


async def check(
    spec: InstanceSpec,
    allowed: Networks | None,
    configured: Iterable[InstanceSpec],
    own_ports: Collection[int],
    resolver: Resolver,
) -> None:
    """Raise ForbiddenAddressError unless every address of `spec` is within `allowed`.

    If `allowed` is None, only the addresses of the configured instances are. `own_ports`: the
    proxy's own ports.
    """
    if here := next((s for s in spec.sensors if s.kind == "file"), None):
        raise ForbiddenAddressError(f"{here.kind} is a sensor for --instances only")
    urls = spec.urls
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
    # No fence for configured instances, which an operator may move. From here on there is no await
    # until `spec` is added.
    trusted = {urlsplit(other.url).hostname for other in configured}
    for host in hosts:
        if literal(host) is None and host not in trusted:
            resolver.fence(host, networks)


def _check_form(host: str) -> None:
    if literal(host) is None:
        if _NUMBER.fullmatch(host.rpartition(".")[2] or host.rstrip(".").rpartition(".")[2]):
            raise ForbiddenAddressError(f"{host!r} is not an address in its usual form")
        if len(host) > 253 or not _LABELS.fullmatch(host):
            raise ForbiddenAddressError(f"{host!r} is not a host name")


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
    if why := refused(address, port, networks, own_ports):
        raise ForbiddenAddressError(why)


def refused(
    address: Address, port: int, networks: Networks | None, own_ports: Collection[int]
) -> str | None:
    """Why an instance may not be at an address; None if it may. `networks` None: all of them."""
    if why := never(address):
        return why
    if networks is not None and not within(address, networks):
        return f"{address} is outside the allowed networks (--allow-cidr)"
    return f"{address}:{port} is this proxy" if port in own_ports and _is_here(address) else None


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
    """The addresses that the configured instances name, as networks of one."""
    found = []
    for spec in configured:
        for url in spec.urls:
            parts = urlsplit(url)
            try:
                addresses = await _look_up(parts.hostname or "", parts.port or 0, resolver)
            except ForbiddenAddressError:
                continue  # an unknown name allows no address
            found += [ip_network(address) for address in addresses]
    return found


def party(address: str) -> str:
    """Whom a client's address stands for: of IPv6 its /64, which one subscriber has whole."""
    if ":" not in address:
        return address
    try:
        parsed = IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ip_network((int(parsed) >> 64 << 64, 64)))
