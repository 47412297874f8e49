"""Requests about a stored response reach the instance that holds it, and nobody else's response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.support.harness import (
    RawEngine,
    ServedProxy,
    chunk,
    plain,
    proxied,
    resets,
    says,
)

PATH = "/v1/responses"
ASK: dict[str, Any] = {"model": "sim-8b", "input": "hello there", "max_output_tokens": 4}
KEYS = "a:key-of-tenant-a,b:key-of-tenant-b"
A = {"Authorization": "Bearer key-of-tenant-a"}
B = {"Authorization": "Bearer key-of-tenant-b"}


async def call(
    proxy: ServedProxy, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    async with proxy.http.request(method, path, json=body, headers=headers) as response:
        return response.status, orjson.loads(await response.read())


async def made(proxy: ServedProxy, body: Any = ASK, **headers: str) -> dict[str, Any]:
    status, response = await call(proxy, "POST", PATH, body, **headers)
    assert status == 200
    assert isinstance(response, dict)
    return response


@pytest.mark.parametrize("streams", [False, True])
async def test_it_is_found_continued_and_changed_where_it_was_made(
    tmp_path: Path, *, streams: bool
) -> None:
    """Of four instances each holds some: ids are learned from bodies and from streams."""
    in_turn = proxied(tmp_path, 4, offload_policy="never", placement="round-robin")
    async with in_turn as (proxy, _):
        asks = (proxy.post(ASK | {"stream": streams}, PATH) for _ in range(8))
        answers = await asyncio.gather(*asks)
        ids = [answer.body.split(b'"id":"')[1].split(b'"')[0].decode() for answer in answers]
        homes = {record["decode_instance"] for record in await proxy.records(8)}
        assert len(homes) == 4
        for made_id in ids:
            status, found = await call(proxy, "GET", f"{PATH}/{made_id}")
            assert (status, found["id"]) == (200, made_id)
            more = ASK | {"previous_response_id": made_id}
            status, second = await call(proxy, "POST", PATH, more)
            assert (status, second["previous_response_id"]) == (200, made_id)
            assert (await call(proxy, "GET", f"{PATH}/{second['id']}"))[0] == 200
            status, refused = await call(proxy, "POST", f"{PATH}/{made_id}/cancel")
            assert (status, refused["error"]["param"]) == (400, "response_id"), "its own instance"
            assert (await call(proxy, "DELETE", f"{PATH}/{made_id}"))[0] == 405
        await proxy.at_rest()


async def test_an_unknown_id_without_keys_is_asked_for_like_anything(tmp_path: Path) -> None:
    """As after a start: the engine that is asked says whether it holds it."""
    async with proxied(tmp_path, 1) as (proxy, _):
        response = await made(proxy)
        proxy.router.known.responses.forget(response["id"])
        assert await call(proxy, "GET", f"{PATH}/{response['id']}") == (200, response)
        status, error = await call(proxy, "GET", f"{PATH}/resp_x")
        assert (status, error["error"]["message"]) == (404, "Response with id 'resp_x' not found.")


async def test_no_tenant_finds_anothers(tmp_path: Path) -> None:
    """Nor continues it, nor gets at it by naming a response of its own alike."""
    async with proxied(tmp_path, 2, api_key=KEYS) as (proxy, fleet):
        response = await made(proxy, **A)
        path = f"{PATH}/{response['id']}"
        mine = ASK | {"previous_response_id": response["id"]}
        planted = ASK | {"request_id": response["id"]}

        async def refused(method: str, path: str, body: Any = None) -> None:
            status, said = await call(proxy, method, path, body, **B)
            error = said["error"]
            assert (status, error["type"]) == (404, "invalid_request_error")
            assert error["code"] == "response_not_found"
            assert response["id"] not in error["message"]

        for _ in fleet.engines:
            own = await made(proxy, planted, **B)
            assert own["id"] != response["id"]
            assert await call(proxy, "GET", f"{PATH}/{own['id']}", **B) == (200, own)
            await refused("GET", path)
            await refused("GET", path.replace("resp_", "%72esp_"))
            await refused("POST", f"{path}/cancel")
            await refused("DELETE", path)
            await refused("POST", PATH, mine)
        assert await call(proxy, "GET", path, **A) == (200, response)
        assert (await call(proxy, "POST", PATH, mine, **A))[0] == 200


async def test_its_instance_is_gone(tmp_path: Path) -> None:
    """Removed or dead: a 404 that says so, not that of an instance that never held it."""
    async with proxied(tmp_path, 2) as (proxy, _):
        first, second = await made(proxy), await made(proxy)
        homes = [record["decode_instance"] for record in await proxy.records(2)]
        async with proxy.http.delete(f"/instances/{homes[0]}") as response:
            assert response.status == 200
        for method, path, body, param in (
            ("GET", f"{PATH}/{first['id']}", None, "response_id"),
            ("POST", f"{PATH}/{first['id']}/cancel", None, "response_id"),
            ("POST", PATH, ASK | {"previous_response_id": first["id"]}, "previous_response_id"),
        ):
            status, said = await call(proxy, method, path, body)
            assert (status, said["error"]["param"]) == (404, param)
            assert "is gone" in said["error"]["message"]
        assert (await call(proxy, "GET", f"{PATH}/{second['id']}"))[0] == 200


BODY = b'{"id":"resp_1","object":"response","output":[]}'
CREATED = (
    b'event: response.created\ndata: {"response":{"id":"resp_1"},"type":"response.created"}\n\n'
)


@asynccontextmanager
async def held_by_one(tmp_path: Path, *later: Any) -> AsyncIterator[tuple[ServedProxy, RawEngine]]:
    """Two engines; the first holds resp_1 and then does as its scripts say."""
    async with RawEngine(says(plain(BODY)), *later) as one, RawEngine(says(plain(BODY))) as other:
        instances = [one.address, other.address]
        async with ServedProxy(tmp_path / "log", instances, health_interval=60) as proxy:
            await proxy.up()
            names = [member.instance.name for member in proxy.router.known.fleet.members()]
            while not one.posts:
                await proxy.post(ASK, PATH)
            asked = len(other.posts)
            cache = proxy.router.known.fleet.states[names[0]].cache
            proxy.router.known.responses.note("resp_1", cache, proxy.server.state.clock.now_s())
            yield proxy, one
            assert len(other.posts) == asked, "nobody else was asked"


async def test_only_its_instance_is_asked_whatever_that_one_says(tmp_path: Path) -> None:
    more = ASK | {"previous_response_id": "resp_1"}
    failed = says(plain(b'{"error":{}}', "500 Internal Server Error"))
    async with held_by_one(tmp_path, failed, resets(), failed) as (proxy, one):
        assert (await proxy.post(more, PATH)).status == 500
        assert (await proxy.post(more, PATH)).status in (500, 502)
        assert len(one.posts) >= 3
        await proxy.at_rest()


async def test_an_answer_as_a_stream_is_learned_from_its_first_event(tmp_path: Path) -> None:
    ending = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    stream = head + chunk(CREATED) + chunk(ending) + b"0\r\n\r\n"
    async with RawEngine(says(stream)) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], health_interval=60) as proxy:
            await proxy.up()
            assert (await proxy.post(ASK | {"stream": True}, PATH)).body == CREATED + ending
            assert len(proxy.router.known.responses) == 1
            assert (await proxy.post(ASK | {"stream": True, "store": False}, PATH)).status == 200
            assert len(proxy.router.known.responses) == 1


@pytest.mark.parametrize("word", ["compact", "input_tokens"])
async def test_a_computing_path_below_is_no_stored_response(tmp_path: Path, word: str) -> None:
    """Also where tenants have keys; `request_id`, which would name a response, is taken out."""
    body = ASK | {"request_id": "another-tenants"}
    async with RawEngine(says(plain(b'{"object":"x"}'))) as engine:
        own: dict[str, Any] = {"kv_connector": "none", "api_key": KEYS}
        async with ServedProxy(tmp_path / "log", [engine.address], **own) as proxy:
            status, found = await call(proxy, "POST", f"{PATH}/{word}", body, **A)
            assert (status, found) == (200, {"object": "x"})
            (sent,) = map(orjson.loads, engine.posts)
            assert sent == (ASK if word == "compact" else body)
            ask = ASK | {"previous_response_id": "of-nobody"}
            status, found = await call(proxy, "POST", f"{PATH}/{word}", ask, **A)
            assert (status, found["error"]["param"]) == (404, "previous_response_id")
            status, _ = await call(proxy, "GET", f"{PATH}/{word}", **A)
            assert status == 405
            (record, *_) = await proxy.records(3)
            assert (record["endpoint"], record["outcome"]) == (f"{PATH}/{word}", "ok")


async def test_an_engine_without_it_says_so_itself(tmp_path: Path) -> None:
    lacks = says(plain(b'{"detail":"Not Found"}', "404 Not Found"))
    async with RawEngine(lacks) as engine:
        own: dict[str, Any] = {"kv_connector": "none", "api_key": KEYS}
        async with ServedProxy(tmp_path / "log", [engine.address], **own) as proxy:
            status, found = await call(proxy, "POST", f"{PATH}/compact", ASK, **A)
            assert (status, found) == (404, {"detail": "Not Found"})
