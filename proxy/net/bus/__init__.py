"""Buses that replicas tell each other by; BUSES has each by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from proxy.net.bus.base import Bus
from proxy.net.bus.memory import MemoryBus

NEEDS_REDIS: Final = "needs the package redis: pip install 'cache-proxy[share]'"


def _redis(url: str, stream: str) -> Bus:
    try:
        from proxy.net.bus.redis import RedisBus  # 6 MB that only this option needs
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        raise ValueError(NEEDS_REDIS) from error
    return RedisBus(url, stream)


BUSES: Mapping[str, Callable[[str, str], Bus]] = {"redis": _redis, "memory": MemoryBus}
"""Makes a bus of a URL and the name of a stream; raises ValueError where it cannot be one."""
