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
AT_ONCE = 64
"""Addresses that are read in one turn of the loop; one takes 25 us."""


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
        found: dict[int, dict[str, InstanceSpec]] = {4: {}, 6: {}}
        for turn, text in enumerate(texts, 1):
            address = ipaddress.ip_address(text.partition("%")[0])
            host = f"[{address}]" if address.version == 6 else str(address)
            found[address.version][host] = InstanceSpec.parse(f"{host}:{self._port}")
            if not turn % AT_ONCE:
                await asyncio.sleep(0)
        alike = found[4] or found[6]
        if len(alike) > MOST_FOUND:
            raise DiscoveryError(f"it has more than {MOST_FOUND} addresses")
        return Found(tuple(alike[host] for host in sorted(alike)))

    async def follow(self, tell: Tell) -> None:
        """Look once, then wait for the next time; raises DiscoveryError."""
        await tell(await self.look())
        await asyncio.sleep(self._every_s)
