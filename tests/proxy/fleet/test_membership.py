"""What sources want of one instance, against each other: the table, and any order of wishes."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import proxy
from proxy.config.in_force import OptionsInForce, router_config
from proxy.config.options import Settings
from proxy.config.values import InstanceSpec
from proxy.core.accounts.lease import Lease, Phase
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.router import Router
from proxy.fleet.instances import Instances
from proxy.fleet.membership import (
    DISCOVERY,
    DRAINED_S,
    MOST_DRAINED,
    OPERATORS,
    OPTIONS,
    RIGHTS,
    STEP,
    Membership,
    Rights,
    Verdict,
)
from proxy.net.timeouts import Clock
from proxy.net.upstream.pool import ConnectOptions

PROXY = Path(proxy.__file__).parent
PLANNER = "planner"
PRETENDED = {
    DISCOVERY: Rights(drains=frozenset(), heeds=frozenset({OPERATORS, PLANNER})),
    PLANNER: Rights(drains=frozenset({DISCOVERY}), heeds=frozenset({OPERATORS, OPTIONS})),
}
"""A source that comes later: it needs a row of rights, and whoever heeds it another word."""

TABLE = """
| stands           | options name | options drop | operators name | operators drain | discovery names | discovery drops |
|------------------|--------------|--------------|----------------|-----------------|-----------------|-----------------|
| options name     | serves       | drains       | serves         | drains          | serves          | serves          |
| options drop     | serves       | drains       | serves         | drains          | serves          | drains          |
| operators name   | serves       | drains       | serves         | drains          | serves          | serves          |
| operators drain  | drains       | drains       | serves         | drains          | drains          | drains          |
| discovery names  | serves       | serves       | serves         | drains          | serves          | drains          |
| discovery drops  | serves       | drains       | serves         | drains          | serves          | drains          |
"""  # noqa: E501
"""What becomes of an instance of which one source wants the row, and then another the column."""


def spec(name: str, port: int) -> InstanceSpec:
    return InstanceSpec.parse(f"{name}=127.0.0.1:{port}")


SPECS = {name: spec(name, port) for port, name in enumerate("abc", 11)}


@pytest.fixture(autouse=True)
def _sources(monkeypatch: pytest.MonkeyPatch) -> None:
    for source, rights in PRETENDED.items():
        monkeypatch.setitem(RIGHTS, source, rights)


class House:
    """A membership without a proxy around it, and the wishes of its sources."""

    def __init__(self) -> None:
        options = Settings(instances=["z=127.0.0.1:9"], bootstrap_port=None)
        self.router, self.clock, self.back = Router(FleetState(router_config(options))), Clock(), 0
        self.instances = Instances(
            self.router.known, self.clock, ConnectOptions(), lambda: None, lambda name: None
        )
        self.members = Membership(self.instances, OptionsInForce(options), self._is_back)
        self.lists: dict[str, dict[str, InstanceSpec]] = {}

    def _is_back(self) -> None:
        self.back += 1

    async def names(self, source: str, one: InstanceSpec) -> list[Verdict]:
        if source == OPERATORS:
            return [(await self.members.admit(one)).verdict]
        before = self.lists.get(source, {})
        answers = self.members.want(source, [*(before | {one.name: one}).values()])
        if not any(answer.verdict is Verdict.REFUSED for answer in answers):
            self.lists[source] = before | {one.name: one}
        return [answer.verdict for answer in answers]

    def drops(self, source: str, name: str) -> None:
        if source == OPERATORS:
            if self.router.known.fleet.get(name) is not None:
                self.members.drain(source, name)
            return
        self.lists[source] = {n: s for n, s in self.lists.get(source, {}).items() if n != name}
        self.members.want(source, [*self.lists[source].values()])

    def state(self, name: str) -> str:
        member = self.router.known.fleet.get(name)
        return "absent" if member is None else "drains" if member.is_draining else "serves"


def _cells() -> Iterator[tuple[str, str, str]]:
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.strip().splitlines()
    ]
    for stands, *cells in rows:
        for wish, outcome in zip(head[1:], cells, strict=True):
            yield stands, wish, outcome


@pytest.mark.parametrize(("stands", "wish", "outcome"), [*_cells()])
async def test_what_two_sources_want_of_one_instance(stands: str, wish: str, outcome: str) -> None:
    (first, one), (then, other) = stands.split(), wish.split()
    house = House()
    await house.names(first, SPECS["a"])
    if other in ("drop", "drops") and then != first:
        await house.names(then, SPECS["a"])
    if not one.startswith("name"):
        house.drops(first, "a")
    if other.startswith("name"):
        await house.names(then, SPECS["a"])
    else:
        house.drops(then, "a")
    assert house.state("a") == outcome


def test_the_table_has_every_pair_of_wishes() -> None:
    wishes = [
        f"{source} {wish}"
        for source, drop in ((OPTIONS, "drop"), (OPERATORS, "drain"), (DISCOVERY, "drops"))
        for wish in ("names" if source == DISCOVERY else "name", drop)
    ]
    assert [cell[:2] for cell in _cells()] == [(a, b) for a in wishes for b in wishes]


SOURCES = (OPTIONS, OPERATORS, DISCOVERY, PLANNER)
KINDS = {
    "names": 6,
    "drops": 6,
    "begin": 3,
    "end": 2,
    "sweep": 3,
    "moved": 1,
    "doubled": 1,
    "remove": 1,
}
"""What happens, and how often."""


class Story:
    """Wishes as they came, and what they ask for by the rights alone."""

    def __init__(self) -> None:
        self.house = House()
        self.said: dict[str, list[tuple[str, str]]] = {name: [] for name in "abc"}
        """Wishes for each instance since it came, as (source, wish)."""
        self.leases: dict[str, list[Lease]] = {name: [] for name in "abc"}

    def naming(self, name: str, upto: int | None = None) -> set[str]:
        last = dict(self.said[name][:upto])
        return {source for source, wish in last.items() if wish == "names"}

    def drainers(self, name: str) -> set[str]:
        """Who drains it: who dropped it with the right to, and was not told otherwise since."""
        found: set[str] = set()
        for at, (source, wish) in enumerate(self.said[name]):
            if wish == "names":
                found = {d for d in found if d in RIGHTS[source].heeds}
                continue
            others, overruled = self.naming(name, at) - {source}, RIGHTS[source].drains
            if overruled is None or others <= overruled:
                found.add(source)
        return found

    async def go(self, what: str, source: str, name: str) -> None:
        await getattr(self, what)(source, name)
        self.check()

    async def names(self, source: str, name: str) -> None:
        before = self.house.state(name)
        verdicts = await self.house.names(source, SPECS[name])
        if before == "absent" and verdicts == [Verdict.NEW]:
            listed = [s for s, of in self.house.lists.items() if name in of]
            self.said[name] = [(s, "names") for s in {*listed, source}]
        elif verdicts and verdicts != [Verdict.REFUSED]:
            self.said[name].append((source, "names"))

    async def drops(self, source: str, name: str) -> None:
        is_there = self.house.state(name) != "absent"
        was_listed = source == OPERATORS or name in self.house.lists.get(source, {})
        self.house.drops(source, name)
        if is_there and was_listed:
            self.said[name].append((source, "drops"))

    async def moved(self, source: str, name: str) -> None:
        """The same name at another address: refused where it is there."""
        if self.house.state(name) != "absent":
            assert Verdict.REFUSED in await self.house.names(source, spec(name, 99))

    async def doubled(self, source: str, name: str) -> None:
        """Another name at the same address: refused where it is there."""
        if self.house.state(name) != "absent":
            port = int(SPECS[name].url.rpartition(":")[2])
            assert Verdict.REFUSED in await self.house.names(source, spec("other", port))

    async def remove(self, source: str, name: str) -> None:
        if self.house.state(name) != "absent":
            self.house.members.remove(name)
            self.said[name], self.leases[name] = [], []

    async def begin(self, source: str, name: str) -> None:
        """A request comes, if the fleet lets it go there."""
        if name in {m.instance.name for m in self.house.router.known.fleet.usable()}:
            assert not self.drainers(name), "new work while somebody drains it"
            charges = self.house.router.known.ledger.charge(name, Phase.DECODE, 9)
            self.leases[name].append(self.house.router.known.ledger.open(charges))

    async def end(self, source: str, name: str) -> None:
        if self.leases[name]:
            self.leases[name].pop().close()

    async def sweep(self, source: str, name: str) -> None:
        before = {n: (self.drainers(n), bool(self.leases[n])) for n in "abc"}
        there = {n for n in "abc" if self.house.state(n) != "absent"}
        await self.house.members.sweep()
        for n in there:
            drainers, is_busy = before[n]
            assert (self.house.state(n) == "absent") == (bool(drainers) and not is_busy), n
            if self.house.state(n) == "absent":
                assert self.house.members.drained_for_s(n) is not None
                self.said[n] = []

    def check(self) -> None:
        members = self.house.router.known.fleet.members()
        urls = [m.instance.url for m in members]
        assert len(set(urls)) == len(urls), "doubled"
        assert {m.instance.name for m in members} == set(self.house.instances.by_name)
        for name, said in self.said.items():
            assert (self.house.state(name) != "absent") == bool(said), "lost, or come by itself"
            if said:
                assert (self.house.state(name) == "drains") == bool(self.drainers(name)), name


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
async def test_no_instance_is_lost_or_doubled_or_works_while_somebody_drains_it(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        story = Story()
        for what in chance.choices([*KINDS], [*KINDS.values()], k=60):
            await story.go(what, chance.choice(SOURCES), chance.choice("abc"))


async def test_who_waits_is_told_when_an_instance_serves_again() -> None:
    house = House()
    await house.names(OPERATORS, SPECS["a"])
    house.drops(OPERATORS, "a")
    assert house.back == 0
    await house.names(OPERATORS, SPECS["a"])
    await house.names(OPTIONS, SPECS["a"])
    assert house.back == 1


@pytest.mark.parametrize("source", [OPERATORS, DISCOVERY])
async def test_sensors_of_the_options_stay_where_others_name_none(source: str) -> None:
    house = House()
    with_sensor = InstanceSpec.parse("a=127.0.0.1:11;dcgm=9400")
    house.members.want(OPTIONS, [with_sensor])
    await house.names(source, SPECS["a"])
    assert house.instances.specs["a"] == with_sensor
    house.members.want(OPTIONS, [SPECS["a"]])
    assert house.instances.specs["a"] == SPECS["a"]


async def test_a_list_that_names_one_twice_adds_it_once() -> None:
    house = House()
    twice = [SPECS["a"], spec("d", 11), SPECS["a"]]
    answers = house.members.want(DISCOVERY, twice)
    assert [a.verdict for a in answers] == [Verdict.NEW, Verdict.REFUSED, Verdict.REFUSED]
    assert len(house.router.known.fleet.members()) == 1


async def test_what_was_refused_is_tried_again_with_the_next_list() -> None:
    house = House()
    await house.names(OPERATORS, SPECS["a"])
    at_b = spec("d", 11)
    assert await house.names(DISCOVERY, at_b) == [Verdict.REFUSED]
    house.members.remove("a")
    assert await house.names(DISCOVERY, at_b) == [Verdict.NEW]


async def test_what_operators_changed_is_carried_on_by_a_successor() -> None:
    first = House()
    first.members.want(OPTIONS, [SPECS["a"], SPECS["b"]])
    first.members.remove("b")
    await first.members.admit(spec("x", 31), "x=127.0.0.1:31")
    await first.members.admit(spec("y", 32), "y=127.0.0.1:32")
    first.members.drain(OPERATORS, "y")
    told = first.members.of_operators()
    assert told == {"added": ["x=127.0.0.1:31"], "gone": ["b", "y"]}
    second = House()
    second.members.want(OPTIONS, [SPECS["a"], SPECS["b"]])
    await second.members.carry_on(told | {"added": [*told["added"], "what?:is:this"]})
    second.members.want(DISCOVERY, [SPECS["b"], SPECS["c"]])
    assert sorted(m.instance.name for m in second.router.known.fleet.members()) == ["a", "c", "x"]
    assert second.members.of_operators() == {"added": ["x=127.0.0.1:31"], "gone": ["b"]}
    await second.members.admit(SPECS["b"], "b=127.0.0.1:12")
    assert second.members.of_operators()["gone"] == []
    second.members.remove("x")
    assert second.members.of_operators()["added"] == ["b=127.0.0.1:12"]


async def test_a_list_that_is_broken_off_has_said_what_is_carried_out() -> None:
    house = House()
    house.members.want(OPTIONS, [SPECS["c"]])
    await house.members.carry_on({"gone": ["c", "n5"]})
    many = [spec(f"n{n}", 20 + n) for n in range(2 * STEP)]
    steps = house.members.steps(DISCOVERY, many)
    assert len(next(steps)) == STEP
    assert [*house.members.listed(DISCOVERY)] == [one.name for one in many[:STEP]]
    house.members.remove("n1")
    for answers in house.members.steps(DISCOVERY, [*many[1:], spec("n0", 99)]):
        assert len(answers) <= STEP
    assert house.members.listed(DISCOVERY)["n0"] == many[0], "it is there with another address"
    names = {m.instance.name for m in house.router.known.fleet.members()}
    assert names == {one.name for one in many} - {"n1", "n5"}, "the first whole list has them too"
    house.members.want(DISCOVERY, many[1:5])
    house.members.want(DISCOVERY, many[1:])
    assert house.state("n5") == "serves", "named anew"


async def test_drained_instances_are_told_of_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    house, now_s = House(), 100.0
    monkeypatch.setattr(house.clock, "now_s", lambda: now_s)
    for turn in range(MOST_DRAINED + 2):
        await house.names(OPERATORS, spec(f"n{turn}", 11))
        house.drops(OPERATORS, f"n{turn}")
        await house.members.sweep()
    told = house.members.drained_for_s
    assert (told("n0"), told("n1"), told("n2"), told("x")) == (None, None, 0.0, None)
    await house.names(OPERATORS, spec("n2", 11))
    assert told("n2") is None, "it is there again"
    now_s += DRAINED_S
    assert told("n3") is None
    house.drops(OPERATORS, "n2")
    await house.members.sweep()
    assert [*house.members._drained] == ["n2"]


async def test_many_that_have_drained_go_a_few_in_each_turn() -> None:
    house, many = House(), [spec(f"n{n}", 20 + n) for n in range(5 * STEP)]
    house.members.want(DISCOVERY, many)
    house.members.want(DISCOVERY, [])
    fleet, left = house.router.known.fleet, [len(many)]
    async with asyncio.TaskGroup() as group:
        sweep = group.create_task(house.members.sweep())
        while left[-1] > STEP:
            await asyncio.sleep(0)
            left.append(len(fleet))
        house.members.want(DISCOVERY, many[-1:])
    assert left == [5 * STEP, 4 * STEP, 3 * STEP, 2 * STEP, STEP]
    assert sweep.result()
    assert [m.instance.name for m in fleet.members()] == [many[-1].name], "it was named again"


WRITES = re.compile(r"(?<!in_flight)(?<!self)\.is_draining(?:, [\w.]+)? = ")
"""Of an instance; that the whole proxy drains is another thing (`InFlight.is_draining`)."""
CHANGES = re.compile(r"\b_?(router|known|fleet|instances)\.(add|remove)\(")
DOORS = {
    "fleet/membership.py": {"instances"},
    "fleet/instances.py": {"known"},
    "core/known/fleet_state.py": {"fleet"},
}
"""Who may call what: the membership the connections, these what is known, and it the fleet."""


def test_nobody_else_drains_adds_or_removes_instances() -> None:
    writers = set()
    for path in PROXY.rglob("*.py"):
        name, text = path.relative_to(PROXY).as_posix(), path.read_text("utf-8")
        if WRITES.search(text):
            writers.add(name)
        called = {match[1] for match in CHANGES.finditer(text)}
        assert called <= DOORS.get(name, set()), f"{name} changes the fleet by itself"
    assert writers == {"fleet/membership.py"}
