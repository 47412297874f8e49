"""What several sources tell, and what of it the fleet takes."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import Counter
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from proxy.config.options import Settings
from proxy.config.values import InstanceSpec
from proxy.fleet.discovery import discovery
from proxy.fleet.discovery.base import DiscoveryError, Found, Tell
from proxy.fleet.discovery.discovery import DiscoveryCollector
from proxy.fleet.membership import OPERATORS, OPTIONS, STEP
from proxy.telemetry.log import EACH
from tests.proxy.fleet.discovery.conftest import Begins
from tests.support.harness import until


class Told:
    """A source that tells what the test says."""

    def __init__(self, *entries: str, error: str | None = None) -> None:
        self.entries, self.error = entries, error
        self.leaving: frozenset[str] = frozenset()
        self._changed = asyncio.Event()

    def say(self, *entries: str, error: str | None = None) -> None:
        self.entries, self.error = entries, error
        self._changed.set()

    async def look(self) -> Found:
        if self.error is not None:
            raise DiscoveryError(self.error)
        return Found(tuple(map(InstanceSpec.parse, self.entries)), self.leaving)

    async def follow(self, tell: Tell) -> None:
        await tell(await self.look())
        await self._changed.wait()
        self._changed.clear()


A, B, C = "a=10.0.0.1:8000", "b=10.0.0.2:8000", "c=10.0.0.3:8000"


async def test_sources_are_merged_with_the_options_and_each_other(discovering: Begins) -> None:
    one, two = Told(A, B), Told("b=10.0.0.9:8000", "z=10.0.0.1:8000", C)
    async with discovering({"one": one, "two": two}, instances=["o=10.0.1.1:8000"]) as found:
        await found.becomes("a b c o")
        assert found.members.sources("o") == ["options"]
        assert found.url("b") == "http://10.0.0.2:8000"
        one.say(A)
        await until(lambda: found.url("b") == "http://10.0.0.9:8000")
        two.say(C)
        await found.becomes("a c o")


async def test_an_instance_whose_address_is_anothers_is_said_once(
    discovering: Begins, caplog: pytest.LogCaptureFixture
) -> None:
    source = Told(A)
    async with discovering({"one": source}, instances=["o=10.0.1.1:8000"]) as found:
        await found.becomes("a o")
        source.say(A, "x=10.0.1.1:8000", "o=10.0.0.5:8000")
        await until(lambda: "waits" in caplog.text)
        source.say(A, "x=10.0.1.1:8000", "o=10.0.0.5:8000", B)
        await found.becomes("a b o")
    said = [r.getMessage() for r in caplog.records if "waits" in r.getMessage()]
    assert said == [
        "discovery: instance o waits: its name or address is another's, or still drains"
    ]


async def test_the_options_keep_what_discovery_no_longer_names(discovering: Begins) -> None:
    source = Told(A, B)
    async with discovering({"one": source}, instances=[A]) as found:
        await found.becomes("a b")
        await until(lambda: found.members.sources("a") == ["discovery", "options"])
        source.say(B)
        await until(lambda: found.members.sources("a") == ["options"])
        source.say(A, B)
        await until(lambda: found.members.sources("a") == ["discovery", "options"])
        found.members.want(OPTIONS, [])
        assert found.fleet == "a b", "discovery names it still"


async def test_an_operators_drain_holds_while_discovery_names_it(discovering: Begins) -> None:
    source = Told(A, B)
    async with discovering({"one": source}) as found:
        over = found.hold("a")
        found.members.drain(OPERATORS, "a")
        source.say(A, B, C)
        await found.becomes("a- b c")
        over()
        await found.becomes("b c")
        source.say(A, B)
        await found.becomes("b")


REFUSALS = {
    "outside": ("10.9.0.1:8000", {"allow_cidr": "10.0.0.0/16,127.0.0.0/8"}, "outside the allowed"),
    "metadata": ("169.254.169.254:80", {}, "link-local"),
    "everywhere": ("0.0.0.0:8000", {}, "not a host address"),
    "itself": ("127.0.0.1:8123", {}, "127.0.0.1:8123 is this proxy"),
}


@pytest.mark.parametrize("case", REFUSALS)
async def test_an_address_that_is_refused(
    case: str, discovering: Begins, caplog: pytest.LogCaptureFixture
) -> None:
    address, options, why = REFUSALS[case]
    source = Told(A)
    async with discovering({"one": source}, **options) as found:
        found.members.own_ports = {8123}
        source.say(A, B, address)
        await found.becomes("a b")
        assert found.refused == ["one"]
        source.say(address)
        await until(lambda: found.discovery.faults)
        assert found.fleet == "a b", "the last set stays"
        source.say(B, address)
        await found.becomes("b")
    assert found.refused == ["one"], "counted once while it is told"
    told = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert len(told) == 1
    assert why in told[0]


async def test_a_source_of_which_nothing_may_be_used_from_the_start(discovering: Begins) -> None:
    async with discovering({"one": Told("0.0.0.0:8000")}) as found:
        assert found.discovery.faults == {"one": "it tells no instance that may be used"}
        assert found.fleet == ""


async def test_a_fence_that_is_narrowed_drains_what_is_outside(discovering: Begins) -> None:
    source = Told(A, "b=10.1.0.1:8000")
    async with discovering({"one": source}) as found:
        await found.becomes("a b")
        narrow: dict[str, Any] = {"discover": ["dns://x:1"], "allow_cidr": "10.0.0.0/16"}
        found.options.use(Settings(**narrow))
        source.say()
        await found.becomes("a")


MANY = tuple(f"m{n}=10.0.{2 + n // 200}.{n % 200 + 1}:8000" for n in range(64))


async def test_many_come_and_go_a_few_in_one_turn_of_the_loop(discovering: Begins) -> None:
    source, most = Told(A), 0
    everything = {spec.partition("=")[0] for spec in (A, *MANY)}
    async with discovering({"one": source}) as found:
        holds = {"a": found.hold("a")}
        for said in ((A, *MANY), (A,), (A, *MANY), (A,)):
            source.say(*said)
            wanted, before = {spec.partition("=")[0] for spec in said}, found.fleet
            while {name for name in found.fleet.split() if not name.endswith("-")} != wanted:
                await asyncio.sleep(0)
                now = found.fleet
                most = max(most, len(set(now.split()) - set(before.split())))
                before = now
            holds |= {name: found.hold(name) for name in wanted - holds.keys()}
        assert {name.rstrip("-") for name in found.fleet.split()} == everything
        for over in holds.values():
            over()
    assert 0 < most <= STEP


async def test_many_within_one_told_set_are_one_line(
    discovering: Begins, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    source = Told(A)
    async with discovering({"one": source}) as found:
        source.say(A, *MANY)
        await until(lambda: len(found.fleet.split()) == 1 + len(MANY))
        source.say(A, *MANY[:EACH])
        await until(lambda: len(found.fleet.split()) == 1 + EACH)
        source.say(A)
        await found.becomes("a")
    told = [r.getMessage() for r in caplog.records]
    counted: Counter[str] = Counter()
    many = re.compile(r"(\d+) instances (\w+).*: m\d+, m\d+, m\d+ and \d+ more")
    for match in filter(None, map(many.fullmatch, told)):
        counted[match[2]] += int(match[1])
    # A set that is told again while it is carried out has its line in two parts.
    assert counted == {"added": len(MANY), "drain": 56, "removed": 56}
    few = [f"m{n}" for n in range(EACH)]
    of_few = [f"instance {n} drains: no discovery wants it any more" for n in few]
    of_few += [f"instance {n} is removed: its last request is over" for n in few]
    assert [line for line in told if line.startswith("instance m")] == of_few
    assert len(told) - len(of_few) <= 8


@pytest.mark.parametrize("seed", range(12))
async def test_the_last_told_set_is_reached_whatever_came_between(
    seed: int, discovering: Begins
) -> None:
    chance, holds = random.Random(seed), []
    one, two = Told(A), Told(A)
    async with discovering({"one": one, "two": two}) as found:
        for _ in range(40):
            names = chance.sample(range(24), chance.randrange(1, 24))
            entries = [f"m{n}=10.0.0.{n + chance.choice((1, 1, 1, 101))}:80" for n in names]
            chance.choice((one, two)).say(*entries)
            if chance.random() < 0.3:
                found.members.want(OPTIONS, [InstanceSpec.parse(e) for e in MANY[: len(names)]])
            for _ in range(chance.choice((0, 1, 2, 5, 30))):
                await asyncio.sleep(0)
            if there := [m.instance.name for m in found.known.fleet.usable()]:
                holds.append(found.hold(chance.choice(there)))
            if len(holds) > 3:
                holds.pop(0)()
        found.members.want(OPTIONS, [])
        for over in holds:
            over()
        told = [e.partition("=") for e in (*two.entries, *one.entries)]
        wanted = {name: f"http://{address}" for name, _, address in told}
        await until(lambda: {name: found.url(name) for name in found.fleet.split()} == wanted)


class Odd(Told):
    """A source that may name an address that no URL can have."""

    is_odd = False

    async def look(self) -> Found:
        found = await super().look()
        odd = InstanceSpec("odd", "http://[fd00::1%]]:8000")
        return Found((*found.instances, odd)) if self.is_odd else found


@pytest.mark.parametrize("is_odd_first", [False, True])
async def test_what_the_proxy_cannot_take_ends_nothing(
    is_odd_first: bool, discovering: Begins, caplog: pytest.LogCaptureFixture
) -> None:
    source, before = Odd(A), "" if is_odd_first else "a"
    source.is_odd = is_odd_first
    async with discovering({"one": source}) as found:
        await found.becomes(before)
        source.is_odd = True
        source.say(A, B)
        await until(lambda: found.discovery.faults)
        assert found.discovery.faults == {"one": "it tells what the proxy cannot take"}
        assert found.fleet == before, "the last set stays"
        source.is_odd = False
        source.say(B)
        await found.becomes("b")
    told = [r for r in caplog.records if "cannot take" in r.getMessage()]
    assert len(told) == 1
    assert told[0].exc_info is not None


async def test_a_cause_is_logged_and_its_end_now_and_then(
    discovering: Begins, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    source = Told(error="it is away")
    async with discovering({"one": source}) as found:
        assert found.discovery.faults == {"one": "it is away"}
        text, since = found.discovery.fault or ("", 0.0)
        assert text == "discovery one: it is away"
        assert since <= found.clock.unix_now()
        await asyncio.sleep(0)
        source.say(A)
        await found.becomes("a")
        source.say(error="it is broken")
        await until(lambda: found.discovery.faults == {"one": "it is broken"})
        source.say(A)
        await until(lambda: found.discovery.fault is None)
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("discovery")]
    assert told == [
        "discovery one: it is away; no instance yet",
        "discovery one: it tells its instances again: 1",
        "discovery one: it is broken; the last set of 1 stays",
    ]


async def test_a_source_that_hangs_at_the_start(
    discovering: Begins, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hangs(Told):
        async def look(self) -> Found:
            await asyncio.Event().wait()
            return Found(())

    monkeypatch.setattr(discovery, "FIRST_S", 0.05)
    async with discovering({"one": Hangs(), "two": Told(B)}) as found:
        assert found.discovery.faults == {"one": "no answer in 0.05 s"}
        assert found.fleet == "b"


def test_ages_are_exported() -> None:
    registry = CollectorRegistry()
    registry.register(DiscoveryCollector(lambda: {"dns://engines:8000": 1.5}))
    line = b'cache_proxy_discovery_age_seconds{source="dns://engines:8000"} 1.5\n'
    assert line in generate_latest(registry)
