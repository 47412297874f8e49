"""A command starts and stops instances; proxies that forget, operators, and ends at any step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from planner.config.components import Component
from planner.core.types import COMPONENT
from planner.scalers.base import Applied, Decision, Failure, Member, ScalerError
from planner.scalers.exec import ExecScaler

PART = Component(match="gpu-*")
SCRIPT = """#!/bin/sh
cd "$(dirname "$0")"
echo "$@" >> calls
test -e fail-$1 && { echo "no $1 today" >&2; exit 3; }
case $1 in
list) cat running/* 2>/dev/null; true;;
start) mkdir -p running; test -e running/$2 || echo "$2=127.0.0.1:900${2#gpu-}" > running/$2;;
stop) rm -f running/$2;;
esac
"""


@dataclass
class Known:
    """An instance as one proxy has it."""

    url: str
    is_draining: bool = False
    is_up: bool = True
    requests: int = 0


@dataclass
class Proxied:
    """Proxies by their answers: they forget at a restart, refuse another address, end drains."""

    each: list[dict[str, Known]] = field(default_factory=lambda: [{}])
    starts: int = 1
    is_away: bool = False
    told: list[str] = field(default_factory=list)

    @property
    def one(self) -> dict[str, Known]:
        return self.each[0]

    def settle(self) -> None:
        """What proxies do between two ticks: who drains and has no request left is removed."""
        for known in self.each:
            for name in [n for n, k in known.items() if k.is_draining and not k.requests]:
                del known[name]

    def restart(self, which: int = 0) -> None:
        self.each[which] = {}
        self.starts += 1

    def members(self, component: str) -> list[Member]:
        del component
        found = []
        for name in sorted({name for known in self.each for name in known}):
            rows = [known[name] for known in self.each if name in known]
            found.append(
                Member(
                    name,
                    rows[0].url,
                    is_ready=all(row.is_up and not row.is_draining for row in rows),
                    is_draining=any(row.is_draining for row in rows),
                    requests=sum(row.requests for row in rows),
                    is_everywhere=len(rows) == len(self.each),
                )
            )
        return found

    async def drain(self, name: str) -> None:
        if self.is_away:
            raise ScalerError(Failure.UNREACHABLE, f"{name} cannot be drained")
        self.told.append(f"drain {name}")
        for known in self.each:
            if name in known:
                known[name].is_draining = True

    async def has_left(self, name: str) -> bool:
        return not self.is_away and all(name not in known for known in self.each)

    async def add(self, name: str, url: str) -> None:
        self.told.append(f"add {name}")
        for known in self.each:
            address = url if "://" in url else f"http://{url}"
            one = known.setdefault(name, Known(address.partition(";")[0]))
            if one.url == address.partition(";")[0]:
                one.is_draining = False

    def generation(self) -> str:
        return str(self.starts)


class Site:
    """The scaler, its command, and proxies; a step of it is a tick of the planner."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.proxies = folder, Proxied()
        self.script = folder / "fleet"
        self.script.write_text(SCRIPT)
        self.script.chmod(0o755)
        self.scaler = ExecScaler([str(self.script)])

    async def begin(self) -> None:
        await self.scaler.validate([PART])

    async def step(self, target: int) -> Applied:
        done = await self.scaler.apply(Decision(0, {COMPONENT: target}, 0.0), self.proxies)
        self.proxies.settle()
        return done

    async def until_done(self, target: int) -> None:
        for _ in range(8):
            if (await self.step(target)).is_done:
                return
        raise AssertionError("it is never done")

    async def successor(self) -> None:
        """Another process, with what was kept."""
        notes = self.scaler.notes()
        self.scaler = ExecScaler([str(self.script)])
        self.scaler.recall(notes)
        await self.begin()

    def run(self, **addresses: str) -> None:
        """Instances that run without the planner's doing, or at another address than before."""
        (self.folder / "running").mkdir(exist_ok=True)
        for word, address in addresses.items():
            name = word.replace("_", "-")
            (self.folder / "running" / name).write_text(f"{name}={address}\n")

    @property
    def running(self) -> set[str]:
        return {path.name for path in (self.folder / "running").glob("*")}

    @property
    def calls(self) -> list[str]:
        """All calls but those of `list`."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [line for line in lines if line != "list"]


@pytest.fixture
async def site(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    await made.begin()
    return made


def urls(known: Mapping[str, Known]) -> dict[str, str]:
    return {name: one.url for name, one in known.items()}


async def test_the_fleet_follows_the_target_up_and_down(site: Site) -> None:
    assert (await site.step(2)).waits_for == "2 of combined start"
    assert site.calls == ["start gpu-0", "start gpu-1"]
    assert not site.proxies.one, "they are brought in once they are listed"
    assert (await site.step(2)).waits_for == "gpu-0 joins; gpu-1 joins"
    assert urls(site.proxies.one) == {
        "gpu-0": "http://127.0.0.1:9000",
        "gpu-1": "http://127.0.0.1:9001",
    }
    assert (await site.step(2)).is_done
    assert await site.scaler.observe() == {COMPONENT: 2}
    site.proxies.one["gpu-0"].requests = 3
    assert (await site.step(1)).waits_for == "gpu-1 drains"
    assert "drain gpu-1" not in site.proxies.told, "it is noted first"
    assert await site.scaler.observe() == {COMPONENT: 1}
    assert (await site.step(1)).waits_for == "gpu-1 drains"
    assert "stop gpu-1" not in site.calls, "the proxy has it still"
    assert (await site.step(1)).waits_for == "gpu-1 stops"
    assert (await site.step(1)).is_done
    assert site.running == {"gpu-0"} == site.proxies.one.keys()


async def test_one_with_requests_is_not_stopped(site: Site) -> None:
    await site.until_done(2)
    for known in site.proxies.one.values():
        known.requests = 1
    for _ in range(4):
        assert not (await site.step(1)).is_done
    assert site.running == {"gpu-0", "gpu-1"}
    (gone,) = (name for name, known in site.proxies.one.items() if known.is_draining)
    site.proxies.one[gone].requests = 0
    site.proxies.settle()
    await site.until_done(1)
    assert site.calls[-1] == f"stop {gone}"


async def test_a_target_that_is_raised_brings_back_who_drains(site: Site) -> None:
    await site.until_done(2)
    for known in site.proxies.one.values():
        known.requests = 1
    await site.step(1)
    await site.step(1)
    assert site.proxies.told[-1].startswith("drain")
    gone = site.proxies.told[-1].removeprefix("drain ")
    waits = (await site.step(3)).waits_for
    assert waits == f"{gone} comes back; 1 of combined start", "no GPU more than of three"
    await site.until_done(3)
    assert site.running == site.proxies.one.keys() == {"gpu-0", "gpu-1", "gpu-2"}
    assert not any(known.is_draining for known in site.proxies.one.values())
    assert not any(call.startswith("stop") for call in site.calls)


async def test_whom_an_operator_drains_is_left_alone_and_replaced(site: Site) -> None:
    await site.until_done(2)
    site.proxies.one["gpu-0"].requests = 1
    site.proxies.one["gpu-0"].is_draining = True
    await site.until_done(2)
    assert site.running == {"gpu-0", "gpu-1", "gpu-2"}
    assert site.proxies.one["gpu-0"].is_draining
    site.proxies.one["gpu-0"].requests = 0
    site.proxies.settle()
    await site.until_done(2)
    await site.successor()
    await site.until_done(2)
    assert site.proxies.one.keys() == {"gpu-1", "gpu-2"}, "neither is it brought back"
    assert site.running == {"gpu-0", "gpu-1", "gpu-2"}, "nor stopped"
    await site.proxies.add("gpu-0", "127.0.0.1:9000")
    await site.until_done(2)
    assert len(site.running) == 2, "the operator has brought it back"


async def test_a_proxy_that_begins_anew_is_told_of_all(site: Site) -> None:
    await site.until_done(2)
    site.proxies.restart()
    await site.until_done(2)
    assert site.proxies.one.keys() == {"gpu-0", "gpu-1"}
    assert site.calls == ["start gpu-0", "start gpu-1"]


async def test_one_of_two_proxies_begins_anew(site: Site) -> None:
    site.proxies.each.append({})
    await site.until_done(2)
    site.proxies.restart(1)
    await site.until_done(2)
    assert [known.keys() for known in site.proxies.each] == [{"gpu-0", "gpu-1"}] * 2
    del site.proxies.each[1]["gpu-0"]
    await site.until_done(2)
    assert "gpu-0" not in site.proxies.each[1], "an operator has taken it out there"
    assert site.running == {"gpu-0", "gpu-1", "gpu-2"}


async def test_one_that_still_has_requests_behind_another_proxy_is_not_stopped(site: Site) -> None:
    site.proxies.each.append({})
    await site.until_done(2)
    for name in ("gpu-0", "gpu-1"):
        site.proxies.each[1][name].requests = 1
    for _ in range(4):
        await site.step(1)
    assert len(site.proxies.one) == 1
    assert site.running == {"gpu-0", "gpu-1"}


async def test_one_that_never_becomes_ready_is_no_end_of_the_step_and_goes_first(
    site: Site,
) -> None:
    await site.until_done(2)
    site.proxies.one["gpu-1"].is_up = False
    assert (await site.step(2)).is_done, "who looks at the fleet sees that it is absent"
    site.proxies.one["gpu-0"].requests = 0
    await site.until_done(1)
    assert site.running == {"gpu-0"}


async def test_what_starts_too_much_is_stopped_and_was_never_brought_in(site: Site) -> None:
    await site.until_done(1)
    site.run(gpu_1="127.0.0.1:9001", gpu_2="127.0.0.1:9002")
    await site.until_done(1)
    assert site.running == {"gpu-0"}
    assert site.proxies.told == ["add gpu-0"]


async def test_one_that_comes_again_at_another_address_replaces_its_entry(site: Site) -> None:
    await site.until_done(2)
    (site.folder / "running" / "gpu-1").unlink()
    site.proxies.one["gpu-1"].is_up = False
    site.run(gpu_1="127.0.0.1:7777")
    await site.until_done(2)
    assert urls(site.proxies.one)["gpu-1"] == "http://127.0.0.1:7777"
    assert site.running == {"gpu-0", "gpu-1"}


async def test_one_that_died_is_started_again_or_its_entry_goes(site: Site) -> None:
    await site.until_done(2)
    (site.folder / "running" / "gpu-1").unlink()
    site.proxies.one["gpu-1"].is_up = False
    await site.until_done(1)
    await site.step(1)
    assert site.proxies.one.keys() == {"gpu-0"}
    await site.until_done(2)
    assert site.running == site.proxies.one.keys() == {"gpu-0", "gpu-1"}


async def test_an_instance_that_is_written_otherwise_is_the_same(site: Site) -> None:
    site.run(gpu_0="localhost:9000")
    await site.proxies.add("gpu-0", "127.0.0.1:9000")
    await site.until_done(1)
    site.proxies.one["gpu-0"].is_up = False
    await site.until_done(1)
    assert site.proxies.told == ["add gpu-0"]
    assert site.calls == []


async def test_an_absent_proxy_stops_no_start_and_takes_nobody_away(site: Site) -> None:
    await site.until_done(2)
    await site.step(1)
    site.proxies.is_away = True
    with pytest.raises(ScalerError, match="cannot be drained"):
        await site.step(1)
    assert (await site.step(3)).waits_for == "gpu-0 comes back; 1 of combined start"
    await site.until_done(3)
    assert site.running == {"gpu-0", "gpu-1", "gpu-2"} == site.proxies.one.keys()


async def test_a_list_that_is_empty_for_once_forgets_nobody_who_leaves(site: Site) -> None:
    await site.until_done(2)
    for known in site.proxies.one.values():
        known.requests = 1
    await site.step(1)
    await site.step(1)
    (site.folder / "running").rename(site.folder / "aside")
    await site.step(1)
    for path in (site.folder / "running").glob("*"):
        path.unlink()
    (site.folder / "running").rmdir()
    (site.folder / "aside").rename(site.folder / "running")
    for known in site.proxies.one.values():
        known.requests = 0
    site.proxies.settle()
    await site.until_done(1)
    assert len(site.running) == 1
    assert site.running == site.proxies.one.keys()


async def test_what_is_told_beside_an_address_reaches_the_proxies(site: Site) -> None:
    heard = []

    async def add(name: str, url: str) -> None:
        heard.append(f"{name}={url}")

    site.proxies.add = add  # type: ignore[method-assign]
    site.run(gpu_0="[::1]:9000;bootstrap=8998")
    await site.step(1)
    assert heard == ["gpu-0=http://[::1]:9000;bootstrap=http://[::1]:8998"]


@pytest.mark.parametrize("word", ["list", "start", "stop"])
async def test_a_call_that_fails_is_named_and_the_next_step_goes_on(site: Site, word: str) -> None:
    await site.until_done(2)
    target = 3 if word == "start" else 1
    for _ in range(2 if word == "stop" else 0):
        await site.step(target)
    (site.folder / f"fail-{word}").touch()
    with pytest.raises(ScalerError, match=f"fleet {word}.*: exit status 3: no {word} today"):
        await site.step(target)
    (site.folder / f"fail-{word}").unlink()
    await site.until_done(target)
    assert len(site.running) == target
    assert site.running == site.proxies.one.keys()


async def test_a_start_that_fails_half_way_is_not_done_twice(site: Site) -> None:
    """It has started the instance, and ended badly then."""
    site.script.write_text(SCRIPT + 'test "$1" = start && exit 1 || true\n')
    with pytest.raises(ScalerError):
        await site.step(1)
    site.script.write_text(SCRIPT)
    await site.until_done(1)
    assert site.running == {"gpu-0"}


async def test_other_components_and_names_are_not_its_own(site: Site) -> None:
    site.run(other="127.0.0.1:9999")
    site.proxies.one["other"] = Known("http://127.0.0.1:9999")
    done = await site.scaler.apply(Decision(0, {"another": 5}, 0.0), site.proxies)
    assert done.is_done
    await site.until_done(1)
    assert site.running == {"other", "gpu-0"}
    assert not any("other" in told for told in site.proxies.told)


async def test_notes_of_another_form_are_refused(site: Site) -> None:
    with pytest.raises(ValueError, match="sequence"):
        site.scaler.recall({"joined": ["gpu-0"]})
    await site.scaler.aclose()
