"""/v1/admin/batch: every field with its bounds, what it changes, and who may ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.core.thermal.readings import GpuReading
from replayer.simulator.host import SimFleet
from tests.support.harness import ServedProxy, chat, proxied, until

TOKEN = "operators-token-0123456789"
GOOD = {"Authorization": f"Bearer {TOKEN}"}
PATH = "/v1/admin/batch"
STREAM = chat("go on", max_tokens=4000)


@asynccontextmanager
async def operated(
    tmp_path: Path, engines: int = 2, **options: Any
) -> AsyncIterator[tuple[ServedProxy, SimFleet]]:
    """A proxy with the admin API, whose orders are not limited in time."""
    more = {"admin_port": 0, "admin_token": TOKEN, "enable_admin_api": True} | options
    async with proxied(tmp_path, engines, sim={"speed": 1.0}, **more) as (proxy, fleet):
        yield proxy, fleet


async def ask(
    proxy: ServedProxy, method: str, body: Any = None, query: str = "", **headers: str
) -> tuple[int, Any]:
    url = f"{proxy.server.admin_url}{PATH}{query}"
    sent = GOOD | {"Content-Type": "application/json"} | headers
    async with proxy.http.request(method, url, data=orjson.dumps(body), headers=sent) as response:
        return response.status, orjson.loads(await response.read())


async def heard(proxy: ServedProxy, request_id: str, priority: str) -> bytes:
    """What the client of a stream got, whether or not it ended well."""
    headers = {"X-Request-Id": request_id, "X-Request-Priority": priority}
    body = b""
    with suppress(aiohttp.ClientPayloadError):
        async with proxy.http.post("/v1/chat/completions", json=STREAM, headers=headers) as answer:
            assert answer.status == 200
            async for piece in answer.content.iter_any():
                body += piece
    return body


class Turns:
    """Lets orders follow one another as if a second had passed between them."""

    def __init__(self, proxy: ServedProxy) -> None:
        self._clock, self._real = proxy.server.state.clock, proxy.server.state.clock.now_s
        self._ahead_s = 0.0

    def next(self) -> None:
        self._ahead_s += 1.5
        self._clock.now_s = lambda: self._real() + self._ahead_s


async def test_who_may_ask_and_where(tmp_path: Path) -> None:
    async with operated(tmp_path, 1) as (proxy, _):
        assert (await ask(proxy, "GET", Authorization="Bearer wrong"))[0] == 401
        assert (await ask(proxy, "POST", {"max_num_seqs": 1}, Authorization=""))[0] == 401
        assert (await ask(proxy, "PUT", {}))[0] == 405
        assert (await ask(proxy, "GET"))[0] == 200
        assert proxy.router.known.heat.is_cool
        for path in (PATH, "/v1/admin/", "/v1/admin/other", "/v1//admin/batch"):
            for method in ("GET", "POST", "DELETE"):
                async with proxy.http.request(method, path, headers=GOOD, data=b"{}") as response:
                    assert response.status == 404, (method, path)


async def test_it_is_not_there_unless_enabled(tmp_path: Path) -> None:
    async with operated(tmp_path, 1, enable_admin_api=False) as (proxy, _):
        assert (await ask(proxy, "GET"))[0] == 404


REFUSED: list[tuple[Any, int, str]] = [
    ({}, 400, "one of them is needed"),
    ([], 400, "an object"),
    ({"max_num_seqs": 0}, 400, "max_num_seqs: a whole number, 1 to"),
    ({"max_num_seqs": 2.5}, 400, "got 2.5"),
    ({"max_num_seqs": True}, 400, "got True"),
    ({"force_evict": -1}, 400, "force_evict: a whole number, 0 to"),
    ({"target_temp_c": 95.1}, 400, "target_temp_c: a number, 30 to 95"),
    ({"target_temp_c": 0}, 400, "target_temp_c"),
    ({"target_temp_c": 80}, 400, "no GPU sensor"),
    ({"max_num_seqs": 1, "policy": "fifo"}, 400, "policy: one of lru, largest_kv, lowest"),
    ({"max_num_seqs": 1, "policy": ["lru"]}, 400, "policy"),
    ({"max_num_seqs": 1, "dry_run": 1}, 400, "dry_run: true or false"),
    ({"max_num_seqs": 1, "ttl_s": 0}, 400, "ttl_s"),
    ({"max_num_seqs": 1, "ttl_s": 86401}, 400, "ttl_s"),
    ({"max_num_seqs": 1, "reason": "a\nb"}, 400, "reason"),
    ({"max_num_seqs": 1, "reason": "a" * 201}, 400, "reason"),
    ({"max_num_seqs": 1, "max": 1}, 400, "max: unknown; known: max_num_seqs, force_evict"),
    ({"max_num_seqs": 1, "instance": []}, 400, "instance"),
    ({"max_num_seqs": 1, "instance": 7}, 400, "instance"),
    ({"max_num_seqs": 1, "instance": ["who"]}, 404, "instance: who is not known"),
    ({"max_num_seqs": 1, "if_version": 7}, 409, "if_version: the version is 0, not 7"),
    ({"max_num_seqs": 1, "if_version": -1}, 400, "if_version"),
]


async def test_what_is_refused(tmp_path: Path) -> None:
    async with operated(tmp_path, 1) as (proxy, _):
        for body, status, words in REFUSED:
            got, said = await ask(proxy, "POST", body)
            assert got == status, body
            assert words in said["error"]["message"], body
            assert "\n" not in said["error"]["message"]
        assert proxy.router.known.heat.is_cool
        assert proxy.server.state.thermal.control.version == 0


async def test_a_cap_holds_at_once_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with operated(tmp_path, 1, max_queue=0) as (proxy, _):
        turns = Turns(proxy)
        streams = [asyncio.create_task(proxy.post(STREAM)) for _ in range(3)]
        (name,) = [m.instance.name for m in proxy.router.known.fleet.members()]
        await until(lambda: proxy.router.known.ledger.load(name).decode_requests == 3)
        order = {"max_num_seqs": 2, "reason": "hot aisle", "ttl_s": 60, "if_version": 0}
        status, dry = await ask(proxy, "POST", order | {"dry_run": True})
        assert (status, dry["dry_run"], dry["version"]) == (200, True, 0)
        assert proxy.router.known.heat.is_cool
        status, said = await ask(proxy, "POST", order)
        assert status == 200
        assert (said["previous_running"], said["new_running"]) == (3, 3)
        assert (said["new_max_num_seqs"], said["evicted_request_ids"]) == (2, [])
        assert (said["version"], said["state"], said["plan"]) == (1, "MANUAL", [])
        same = ("previous_running", "new_running", "new_max_num_seqs", "plan")
        assert [dry[key] for key in same] == [said[key] for key in same]
        busy = await proxy.post(chat("one more", stream=False))
        assert busy.status == 503
        assert proxy.rejected("heat_cap") == 1
        assert (await ask(proxy, "POST", order))[0] == 409
        assert (await ask(proxy, "POST", {"max_num_seqs": 1}))[0] == 429
        async with proxy.http.get(f"{proxy.server.admin_url}/instances", headers=GOOD) as response:
            (shown,) = orjson.loads(await response.read())
        assert (shown["heat"]["state"], shown["heat"]["cap"], shown["busy"]) == (
            *("MANUAL", 2, "heat_cap"),
        )
        _, listed = await ask(proxy, "GET")
        assert listed["instances"][0]["order"]["reason"] == "hot aisle"
        assert listed["instances"][0]["running"] == 3
        assert (await ask(proxy, "DELETE"))[0] == 400
        status, ended = await ask(proxy, "DELETE", query=f"?instance={name}")
        assert (status, ended["cleared"], ended["version"]) == (200, [name], 2)
        assert proxy.router.known.heat.is_cool
        assert (await proxy.post(chat("one more", stream=False))).status == 200
        turns.next()
        assert (await ask(proxy, "POST", {"max_num_seqs": 1, "ttl_s": 1.0}))[0] == 200
        turns.next()
        await until(lambda: proxy.router.known.heat.is_cool, "the order has ended by itself")
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        lines = [r.getMessage() for r in caplog.records if "batch" in r.getMessage()]
        assert any("hot aisle" in line and "cap 2" in line for line in lines)
        await proxy.at_rest()


async def test_who_cannot_be_moved_is_waited_for(tmp_path: Path) -> None:
    async with operated(tmp_path, 1) as (proxy, _):
        streams = [asyncio.create_task(proxy.post(STREAM)) for _ in range(3)]
        (name,) = [m.instance.name for m in proxy.router.known.fleet.members()]
        await until(lambda: proxy.router.known.ledger.load(name).decode_requests == 3)
        status, said = await ask(proxy, "POST", {"force_evict": 2, "policy": "largest_kv"})
        assert status == 200
        assert (said["previous_running"], said["new_running"]) == (3, 3)
        assert (said["new_max_num_seqs"], said["estimated_watts_saved"]) == (1, 0.0)
        assert [row["skip_reason"] for row in said["plan"]] == ["migration is off"] * 2
        assert proxy.metric("thermal_evictions_total", policy="largest_kv", outcome="skipped") == 2
        assert not any(stream.done() for stream in streams)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def test_force_evict_may_end_streams_in_words(tmp_path: Path) -> None:
    async with operated(tmp_path, 1, thermal_may_abort=True) as (proxy, _):
        ids = [f"r{i}" for i in range(3)]
        streams = {
            one: asyncio.create_task(heard(proxy, one, priority))
            for one, priority in zip(ids, ("high", "low", "normal"), strict=True)
        }
        (name,) = [m.instance.name for m in proxy.router.known.fleet.members()]
        await until(lambda: proxy.router.known.ledger.load(name).decode_requests == 3)
        order = {"force_evict": 2, "policy": "lowest_priority", "instance": [name]}
        _, dry = await ask(proxy, "POST", order | {"dry_run": True})
        status, said = await ask(proxy, "POST", order)
        assert status == 200
        assert said["evicted_request_ids"] == dry["evicted_request_ids"] == ["r1", "r2"]
        assert said["estimated_watts_saved"] == pytest.approx(6.4)
        assert (said["new_running"], said["new_max_num_seqs"]) == (1, 1)
        for one in ("r1", "r2"):
            body = await streams[one]
            error = orjson.loads(body.split(b"data: ")[-1])["error"]
            assert error["code"] == "too_hot"
            assert "too hot" in error["message"]
            assert b"[DONE]" not in body
        assert not streams["r0"].done()
        aborted = {"policy": "lowest_priority", "outcome": "aborted"}
        assert proxy.metric("thermal_evictions_total", **aborted) == 2
        streams["r0"].cancel()
        await asyncio.gather(*streams.values(), return_exceptions=True)
        records = {record["request_id"]: record for record in await proxy.records(3)}
        assert records["r1"]["outcome"] == "upstream_truncated"
        await proxy.at_rest()


async def test_a_request_without_its_first_byte_is_told_when_to_come_again(tmp_path: Path) -> None:
    async with operated(tmp_path, 1, thermal_may_abort=True) as (proxy, _):
        whole = chat("go on", max_tokens=4000, stream=False)
        asked = asyncio.create_task(proxy.post(whole))
        await until(lambda: proxy.router.known.ledger.live == 1)
        assert (await ask(proxy, "POST", {"force_evict": 1}))[0] == 200
        answer = await asked
        assert (answer.status, answer.json["error"]["code"]) == (503, "too_hot")
        assert int(answer.headers["Retry-After"]) > 0
        await proxy.at_rest()


async def test_a_target_is_followed_while_readings_come(tmp_path: Path) -> None:
    async with operated(tmp_path, 2) as (proxy, _):
        turns, thermal = Turns(proxy), proxy.server.state.thermal
        names = [m.instance.name for m in proxy.router.known.fleet.members()]
        celsius = {names[0]: 90.0, names[1]: 70.0}

        def read() -> None:
            now_s = proxy.server.state.clock.now_s()
            for name in names:
                found = [GpuReading("h:0", now_s, celsius[name])]
                proxy.server.state.gpus.observe(name, found, is_idle=False)

        for name in names:
            proxy.server.state.gpus.watch(name, (), 0.0)
        read()
        streams = [asyncio.create_task(proxy.post(STREAM)) for _ in range(8)]
        ledger = proxy.router.known.ledger
        await until(lambda: sum(ledger.load(n).decode_requests for n in names) == 8)
        before = ledger.load(names[0]).running_requests
        turns.next()
        assert (await ask(proxy, "POST", {"target_temp_c": 80.0}))[0] == 200
        read()
        thermal.tick()
        assert proxy.router.known.heat.of(names[0]).cap == max(1, before - 5)
        assert proxy.router.known.heat.of(names[1]).cap is None
        celsius[names[0]] = 79.0
        read()
        thermal.tick()
        _, listed = await ask(proxy, "GET")
        assert [row["order"]["is_reached"] for row in listed["instances"]] == [True, True]
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
