"""Several proxies as one fleet: who knows whom, who is away, and what none of them may say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import orjson
import pytest

from planner.config.components import Component
from planner.core.types import COMPONENT
from planner.scalers.base import Failure, ScalerError
from planner.sources.proxy import ABSENT_S, Proxies
from tests.support.harness import RawEngine, plain, says


def row(name: str, **more: object) -> dict[str, object]:
    load = dict.fromkeys(("prefill_requests", "inbound_requests", "decode_requests"), 1)
    told = {"is_up": True, "is_draining": False, "heat": {}, "url": f"http://{name}:1"}
    return {"name": name, "load": load | {"prefill_tokens": 5, "decode_tokens": 7}, **told, **more}


def tells(fake: RawEngine, rows: object, metrics: str = "", started_at: float = 1.5) -> None:
    fake.gets = {
        "/metrics": plain(f"cache_proxy_issued_total 5\n{metrics}".encode()),
        "/instances": plain(orjson.dumps(rows)),
        "/health": plain(orjson.dumps({"started_at": started_at}), "503 None"),
    }


@asynccontextmanager
async def two(*more: str) -> AsyncIterator[tuple[Proxies, RawEngine, RawEngine]]:
    """Proxies that know nobody yet and take every order."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        fakes = [
            await stack.enter_async_context(RawEngine(says(plain(b"{}", "202 Yes"))))
            for _ in range(2)
        ]
        for fake in fakes:
            tells(fake, [])
        urls = [*(fake.address for fake in fakes), *more]
        yield Proxies(session, urls, None, [Component()]), *fakes  # type: ignore[misc]


async def names(proxies: Proxies, now_s: float) -> dict[str, bool]:
    """Who is known, and whether everywhere."""
    assert await proxies.look(now_s) is not None
    return {one.name: one.is_everywhere for one in proxies.members(COMPONENT)}


async def test_an_instance_is_the_sum_of_its_rows_and_may_be_missing_somewhere() -> None:
    async with two() as (proxies, a, b):
        tells(a, [row("x"), row("y", is_up=False)])
        tells(b, [row("x")])
        assert await names(proxies, 0.0) == {"x": True, "y": False}
        x, y = proxies.members(COMPONENT)
        assert (x.requests, x.held_tokens, x.is_ready) == (6, 24, True)
        assert (y.requests, y.is_ready) == (3, False)
        tells(b, [row("x", is_draining=True)])
        await proxies.look(1.0)
        x, _ = proxies.members(COMPONENT)
        assert (x.is_draining, x.is_ready) == (True, False)


async def test_while_one_is_away_nobody_is_drained_and_who_comes_is_told_to_the_others() -> None:
    async with two() as (proxies, a, b):
        tells(a, [row("x")])
        tells(b, [row("x"), row("y")])
        await proxies.look(0.0)
        began = proxies.generation()
        b.gets = {}
        tells(a, [])
        assert await proxies.look(1.0) is None
        assert await proxies.look(ABSENT_S) is not None
        with pytest.raises(ScalerError, match=r"x cannot be drained: GET .*: status 404") as caught:
            await proxies.drain("x")
        assert caught.value.failure is Failure.UNREACHABLE
        assert not a.posts, "none was told"
        assert not await proxies.has_left("x"), "it may still send there"
        assert await proxies.has_left("z")
        a.scripts = [says(plain(b"{}", "201 Yes"))]
        await proxies.add("z", "https://[::1]:9")
        assert orjson.loads(a.posts[-1]) == {"instance": "z=https://[::1]:9"}
        assert proxies.generation() == began
        tells(a, [row("z")])
        tells(b, [row("x")])
        assert await names(proxies, ABSENT_S + 1) == {"x": False, "z": False}
        assert proxies.generation() != began, "it has not heard of all"


async def test_one_that_was_never_read_may_know_anybody() -> None:
    async with two("http://127.0.0.1:1") as (proxies, _, _):
        await proxies.look(0.0)
        await proxies.look(ABSENT_S)
        assert not await proxies.has_left("x")
        with pytest.raises(ScalerError, match=r"127\.0\.0\.1:1"):
            await proxies.drain("x")


@pytest.mark.parametrize(
    "answer",
    [
        b'[{"name": "x", "more": ' + b"[" * 100_000,
        orjson.dumps([row("x", live_kv_tokens=1e300)]),
        orjson.dumps([row("x", live_kv_tokens=-1)]),
        orjson.dumps([row("x") | {"load": {}}]),
        orjson.dumps([row("x")]).replace(b":5,", b":1e999,"),
        b"\xff\xfe",
        b"",
    ],
)
async def test_rows_that_cannot_be_are_another_form(answer: bytes) -> None:
    async with two() as (proxies, a, _):
        await proxies.look(0.0)
        a.gets["/instances"] = plain(answer)
        assert await proxies.look(1.0) is None
        (said,) = proxies.failures()
        assert said.startswith(f"{a.address}: an answer of another form")
        assert said.isprintable()


async def test_counters_that_fall_are_those_of_another_process() -> None:
    async with two() as (proxies, a, _):
        tells(a, [], "cache_proxy_isl_tokens_count 100\n")
        await proxies.look(0.0)
        tells(a, [], "cache_proxy_isl_tokens_count 3\ncache_proxy_queued_requests NaN\n", 9.5)
        told = await proxies.look(1.0)
        assert told is not None
        assert (told.totals.prompts, told.queued) == (3.0, 0.0)


async def test_a_counter_in_parts_is_their_sum() -> None:
    """The times of first tokens are told by the route."""

    def parts(*values: float) -> str:
        names = [f"cache_proxy_ttft_seconds_{part}" for part in ("count", "sum")]
        keys = [f'{name}{{route_class="{r}"}}' for name in names for r in ("WARM", "HEAVY_P2P")]
        return "".join(f"{key} {value}\n" for key, value in zip(keys, values, strict=True))

    async with two() as (proxies, a, _):
        tells(a, [], parts(10, 20, 1.0, 2.0))
        await proxies.look(0.0)
        tells(a, [], parts(11, 23, 1.5, 4.5))
        told = await proxies.look(1.0)
        assert told is not None
        assert (told.totals.first_tokens, told.totals.ttft_s) == (4.0, 3.0)


async def test_a_password_in_an_address_is_shown_nowhere() -> None:
    async with two() as (_, a, _), aiohttp.ClientSession() as session:
        url = a.address.replace("http://", "http://user:secret@")
        proxies = Proxies(session, [url], None, [Component()])
        await proxies.look(0.0)
        for rows, metrics in (([], b"x 1\n"), ({}, None)):
            tells(a, rows)
            if metrics is not None:
                a.gets["/metrics"] = plain(metrics)
            assert await proxies.look(1.0) is None
            assert "secret" not in "".join(proxies.failures())
        assert "secret" not in "".join(proxies.ages_s(1.0))
