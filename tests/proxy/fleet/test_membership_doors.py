"""What each door answers that an instance comes and goes by: start, reload, POST and DELETE."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from proxy.app import Proxy
from proxy.config.options import Settings

A, B, C = "a=127.0.0.1:11", "b=127.0.0.1:12", "c=127.0.0.1:13"


class Doors:
    """A proxy without periodic tasks, so that nothing that drains is removed under the test."""

    def __init__(self, proxy: Proxy, http: aiohttp.ClientSession) -> None:
        self.proxy, self._http = proxy, http
        self.given: list[str] = []

    @property
    def fleet(self) -> str:
        """Names in their order, each with a minus where it drains."""
        members = self.proxy.state.router.known.fleet.members()
        return " ".join(m.instance.name + "-" * m.is_draining for m in members)

    async def ask(self, door: str, what: str) -> str:
        """Go through a door: the status of an answer, or the result of a reload."""
        if door == "reload":
            self.given = what.split()
            return await self.proxy.reloader.reload("test")
        body, path = ({"instance": what}, "/instances") if door == "POST" else (None, what)
        async with self._http.request(door, path, json=body) as response:
            return f"{response.status}"


@asynccontextmanager
async def doors(instances: str) -> AsyncIterator[Doors]:
    def settings() -> Settings:
        given = found.given if found is not None else instances.split()
        return Settings(instances=given, port=0, host="127.0.0.1", bootstrap_port=None)

    found: Doors | None = None
    proxy = Proxy(settings(), settings)
    await proxy.start()
    try:
        async with aiohttp.ClientSession(proxy.url) as http:
            found = Doors(proxy, http)
            yield found
    finally:
        await proxy.close()


CASES = {
    "an operator adds": (
        f"{A} {B}",
        [
            ("POST", C, "201", "a b c"),
            ("POST", C, "409", "a b c"),
            ("POST", "d=127.0.0.1:13", "409", "a b c"),
            ("POST", "c=127.0.0.1:14", "409", "a b c"),
            ("POST", "x", "400", "a b c"),
            ("POST", "m=169.254.169.254:80", "400", "a b c"),
        ],
    ),
    "an operator removes at once": (
        f"{A} {B}",
        [
            ("DELETE", "/instances/a", "200", "b"),
            ("DELETE", "/instances/a", "404", "b"),
            ("DELETE", "/instances/a?drain=true", "404", "b"),
            ("POST", A, "201", "b a"),
        ],
    ),
    "an operator drains and takes back": (
        f"{A};bootstrap=21 {B}",
        [
            ("DELETE", "/instances/a?drain=true", "202", "a- b"),
            ("DELETE", "/instances/a?drain=true", "202", "a- b"),
            ("POST", "a=127.0.0.1:14", "409", "a- b"),
            ("POST", f"{A};bootstrap=22", "409", "a- b"),
            ("POST", "d=127.0.0.1:11", "409", "a- b"),
            ("POST", f"{A}", "200", "a b"),
            ("DELETE", "/instances/a?drain=true", "202", "a- b"),
            ("POST", f"{A};bootstrap=21", "200", "a b"),
            ("DELETE", "/instances/b?drain=yes", "400", "a b"),
            ("DELETE", "/instances/b?mode=migrate", "400", "a b"),
            ("DELETE", "/instances/b?drain=true&mode=migrate", "400", "a b"),
        ],
    ),
    "the options drain and take back": (
        f"{A} {B}",
        [
            ("reload", f"{A} {B}", "unchanged", "a b"),
            ("reload", A, "applied", "a b-"),
            ("reload", f"{A} {C}", "applied", "a b- c"),
            ("reload", f"{A} {B} {C}", "applied", "a b c"),
            ("reload", "a=127.0.0.1:14", "refused", "a b c"),
            ("reload", "d=127.0.0.1:11", "refused", "a b c"),
            ("reload", f"{A};bootstrap=21 {B} {C}", "refused", "a b c"),
            ("reload", f"{B} {C}", "applied", "a- b c"),
            ("reload", f"d=127.0.0.1:11 {B} {C}", "refused", "a- b c"),
        ],
    ),
    "an operator takes back what the options drain": (
        f"{A} {B}",
        [
            ("reload", B, "applied", "a- b"),
            ("POST", A, "200", "a b"),
            ("reload", f"{B} {C}", "applied", "a b c"),
            ("reload", f"{A} {B} {C}", "applied", "a b c"),
            ("reload", f"{B} {C}", "applied", "a- b c"),
        ],
    ),
    "an operator's drain outlives a reload": (
        f"{A} {B}",
        [
            ("DELETE", "/instances/a?drain=true", "202", "a- b"),
            ("reload", f"{A} {B} {C}", "applied", "a- b c"),
            ("reload", f"{A};dcgm=9 {B} {C}", "applied", "a- b c"),
        ],
    ),
    "an operator's drain ends only by an operator": (
        f"{A} {B}",
        [
            ("DELETE", "/instances/a?drain=true", "202", "a- b"),
            ("reload", B, "applied", "a- b"),
            ("reload", f"{A} {B}", "applied", "a- b"),
            ("POST", A, "200", "a b"),
        ],
    ),
    "what an operator removed comes back only as something new": (
        f"{A} {B}",
        [
            ("DELETE", "/instances/a", "200", "b"),
            ("reload", f"{A} {B} {C}", "applied", "b c"),
            ("reload", f"{B} {C}", "applied", "b c"),
            ("reload", f"{A} {B} {C}", "applied", "b c a"),
        ],
    ),
    "the options may drop what an operator added, once they had it": (
        A,
        [
            ("POST", B, "201", "a b"),
            ("reload", f"{A} {C}", "applied", "a b c"),
            ("reload", f"{A} {B}", "applied", "a b c-"),
            ("reload", f"{A} {C}", "applied", "a b- c"),
        ],
    ),
}


@pytest.mark.parametrize("title", CASES)
async def test_who_comes_and_goes(title: str) -> None:
    instances, steps = CASES[title]
    async with doors(instances) as d:
        assert d.fleet == " ".join(one.partition("=")[0] for one in instances.split())
        for door, what, answer, fleet in steps:
            assert (await d.ask(door, what), d.fleet) == (answer, fleet), (door, what)


async def test_sensors_are_those_that_were_named_last() -> None:
    """An operator who names none keeps them; options that name none have none."""
    async with doors(f"{A};dcgm=9 {B}") as d:
        specs = d.proxy.state.instances.specs

        def sensors() -> list[str]:
            return [str(sensor.url) for sensor in specs["a"].sensors]

        assert len(sensors()) == 1
        await d.ask("DELETE", "/instances/a?drain=true")
        await d.ask("POST", A)
        assert len(sensors()) == 1
        await d.ask("DELETE", "/instances/a?drain=true")
        await d.ask("POST", f"{A};dcgm=10")
        assert ":10" in sensors()[0]
        await d.ask("reload", f"{A} {B}")
        assert not sensors()


async def test_what_the_log_says(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "proxy")
    async with doors(f"{A} {B}") as d:
        await d.ask("POST", C)
        await d.ask("DELETE", "/instances/c?drain=true")
        await d.ask("POST", C)
        await d.ask("DELETE", "/instances/c")
        await d.ask("reload", f"{A} {C}")
        await d.ask("reload", "a=127.0.0.1:14")
    said = [r.getMessage() for r in caplog.records if not r.name.startswith("proxy.admin.auth")]
    assert said == [
        "instance c added: http://127.0.0.1:13",
        "config reloaded (test): instances; instances added: c, removed: b",
        "config not reloaded (test), the old one stays: instances: a exists with another name,"
        " address or thermal part, and may have requests; remove it first, then add it",
    ]
