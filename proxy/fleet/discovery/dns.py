"""Instances by the addresses of a name, such as that of a headless service.

Of a name with both kinds of addresses those of IPv4 count: an engine of two kinds has both.
"""

from __future__ import annotations

import asyncio
import ipaddress

from proxy.config.values import DiscoverAt, InstanceSpec
from proxy.fleet.discovery.base import MOST_FOUND, DiscoveryError, Found, Tell
from proxy.net.addresses import Resolver
from proxy.net.timeouts import Limit

EVERY_S = 5.0
"""Time between two looks."""
ANSWER_S = 2.0
"""Longest wait for the name service."""


class Dns:
    """The addresses of one name, at one port."""

    def __init__(self, at: DiscoverAt, resolver: Resolver, every_s: float = EVERY_S) -> None:
        self._host, self._port = at.scope, int(at.what)
        self._resolver, self._every_s = resolver, every_s

    async def look(self) -> Found:
        """Ask the name service once; raises DiscoveryError."""
        try:
            with Limit(ANSWER_S):
                texts = await self._resolver.look_up(self._host, self._port)
        except TimeoutError as error:
            raise DiscoveryError(f"no answer in {ANSWER_S:g} s") from error
        except (OSError, UnicodeError) as error:
            raise DiscoveryError("its name has no address") from error
        found = sorted({ipaddress.ip_address(text.partition("%")[0]) for text in texts}, key=str)
        kind = min((address.version for address in found), default=4)
        alike = [address for address in found if address.version == kind]
        if len(alike) > MOST_FOUND:
            raise DiscoveryError(f"it has more than {MOST_FOUND} addresses")
        hosts = [f"[{address}]" if kind == 6 else str(address) for address in alike]
        return Found(tuple(InstanceSpec.parse(f"{host}:{self._port}") for host in hosts))

    async def follow(self, tell: Tell) -> None:
        """Look once, then wait for the next time; raises DiscoveryError."""
        await tell(await self.look())
        await asyncio.sleep(self._every_s)
