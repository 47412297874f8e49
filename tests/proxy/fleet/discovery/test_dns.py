"""The addresses of a name as instances."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from proxy.config.values import DiscoverAt
from proxy.fleet.discovery import dns
from proxy.fleet.discovery.base import MOST_FOUND, DiscoveryError
from proxy.fleet.discovery.dns import Dns
from proxy.net.addresses import Resolver
from tests.proxy.fleet.discovery.conftest import Begins
from tests.support.harness import until

AT = DiscoverAt("dns", "engines.example", "8000")


class Names:
    """A name service: addresses, or an error."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] = addresses
        self.error: Exception | None = None
        self.asked: list[tuple[str, int]] = []

    async def look_up(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        if self.error is not None:
            raise self.error
        return self.addresses

    def source(self, every_s: float = 0.01) -> Dns:
        return Dns(AT, Resolver(self.look_up), every_s)


@pytest.mark.parametrize(
    ("addresses", "instances"),
    [
        (["10.0.0.2", "10.0.0.1", "10.0.0.2"], ["10.0.0.1:8000", "10.0.0.2:8000"]),
        (["fd00::1", "10.0.0.1"], ["10.0.0.1:8000"]),
        (["fd00::1", "fd00::2%3"], ["[fd00::1]:8000", "[fd00::2]:8000"]),
        ([], []),
    ],
)
async def test_addresses(addresses: list[str], instances: list[str]) -> None:
    names = Names(*addresses)
    assert [spec.name for spec in (await names.source().look()).instances] == instances
    assert names.asked == [("engines.example", 8000)]


@pytest.mark.parametrize("error", [OSError("no such name"), UnicodeError("label too long")])
async def test_a_name_without_an_address(error: Exception) -> None:
    names = Names()
    names.error = error
    with pytest.raises(DiscoveryError, match="its name has no address"):
        await names.source().look()


async def test_more_addresses_than_instances() -> None:
    many = Names(*(f"10.0.{n >> 8}.{n & 255}" for n in range(MOST_FOUND + 1)))
    with pytest.raises(DiscoveryError, match="more than 1024"):
        await many.source().look()


async def test_many_addresses_are_read_in_turns_with_other_tasks() -> None:
    names = Names(*(f"10.0.{n >> 8}.{n & 255}" for n in range(MOST_FOUND)))
    look, turns = asyncio.create_task(names.source().look()), 0
    while not look.done():
        await asyncio.sleep(0)
        turns += 1
    assert len((await look).instances) == MOST_FOUND
    assert turns >= MOST_FOUND // dns.AT_ONCE


async def test_a_name_service_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return ()

    monkeypatch.setattr(dns, "ANSWER_S", 0.05)
    with pytest.raises(DiscoveryError, match=r"no answer in 0\.05 s"):
        await Dns(AT, Resolver(hang)).look()


Change = Callable[[Names], None]


def nothing(names: Names) -> None:
    names.addresses = ()


def fails(names: Names) -> None:
    names.error = OSError()


@pytest.mark.parametrize("change", [nothing, fails])
async def test_a_name_that_resolves_to_nothing(change: Change, discovering: Begins) -> None:
    names = Names("10.0.0.1", "10.0.0.2")
    async with discovering({str(AT): names.source()}) as found:
        names.addresses = ("10.0.0.1", "10.0.0.3")
        await found.becomes("10.0.0.1:8000 10.0.0.3:8000")
        change(names)
        await until(lambda: found.discovery.faults)
        assert found.fleet == "10.0.0.1:8000 10.0.0.3:8000"
        names.addresses, names.error = ("10.0.0.4",), None
        await found.becomes("10.0.0.4:8000")
        assert not found.discovery.faults
