"""A fleet whose members discovery finds, without probes: nobody connects to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from proxy.config.in_force import OptionsInForce, router_config
from proxy.config.options import Settings
from proxy.core.accounts.lease import Phase
from proxy.core.known.fleet_state import FleetState
from proxy.fleet.discovery import discovery
from proxy.fleet.discovery.base import Source
from proxy.fleet.discovery.discovery import Discovery
from proxy.fleet.instances import Instances
from proxy.fleet.membership import OPTIONS, Membership
from proxy.net.timeouts import Clock
from proxy.net.upstream.pool import ConnectOptions
from tests.support.harness import until
from tests.support.slices_api import SlicesApi


class Found:
    """What discovery has brought into a fleet."""

    def __init__(self, sources: Mapping[str, Source], **options: Any) -> None:
        settings = Settings(discover=["dns://engines:8000"], bootstrap_port=None, **options)
        self.options = OptionsInForce(settings)
        self.known, self.clock = FleetState(router_config(settings)), Clock()
        self.instances = Instances(
            self.known, self.clock, ConnectOptions(), lambda: None, lambda name: None
        )
        self.members = Membership(self.instances, self.options, lambda: None)
        self.members.want(OPTIONS, settings.instances)
        self.refused: list[str] = []
        self.discovery = Discovery(
            sources, self.members, self.options, self.clock, self.refused.append
        )

    @property
    def fleet(self) -> str:
        """Names in their order, each with a minus where it drains."""
        members = self.known.fleet.members()
        return " ".join(sorted(m.instance.name + "-" * m.is_draining for m in members))

    async def becomes(self, fleet: str) -> None:
        await until(lambda: self.fleet == fleet, f"{fleet!r}, where it is {self.fleet!r}")

    def url(self, name: str) -> str | None:
        """Where an instance is, if it is in the fleet."""
        upstream = self.instances.get(name)
        return None if upstream is None else upstream.instance.url

    def hold(self, name: str) -> Callable[[], None]:
        """Give an instance a request that does not end before it is told to."""
        charges = self.known.ledger.charge(name, Phase.DECODE, 10)
        return self.known.ledger.open(charges).close


Begins = Callable[..., AbstractAsyncContextManager[Found]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAUSE_S", "MOST_PAUSE_S", "AGAIN_S"):
        monkeypatch.setattr(discovery, name, 0.02)


@pytest.fixture
def discovering() -> Begins:
    @asynccontextmanager
    async def begin(sources: Mapping[str, Source], **options: Any) -> AsyncIterator[Found]:
        found = Found(sources, **options)
        await found.discovery.begin()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(p.run()) for p in (found.members, found.discovery)]
            yield found
            for task in tasks:
                task.cancel()
        await found.instances.close()

    return begin


@pytest.fixture
async def api() -> AsyncIterator[SlicesApi]:
    async with SlicesApi() as server:
        yield server
