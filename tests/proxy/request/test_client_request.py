"""What a client may not do, on raw sockets: aiohttp's own client would tidy it up first."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.protocol.endpoints import ENDPOINTS, RESPONSES
from tests.proxy.protocol.test_body_fields import SHAPES, pairs, shape, steers
from tests.support.harness import WAIT_S, RawEngine, ServedProxy, plain, says, until

BODY = b'{"kv_transfer_params":{"do_remote_prefill":true},"input":"x"}'


async def raw(proxy: ServedProxy, request: bytes) -> bytes:
    """Send these bytes; the whole answer, the connection closed by the request's own wish."""
    host, port = proxy.server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    await writer.drain()
    try:
        async with asyncio.timeout(WAIT_S):
            return await reader.read()
    finally:
        writer.close()


def post(path: str, body: bytes = b"{}", kind: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: p\r\nConnection: close\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def test_an_engines_own_paths_are_out_of_reach(tmp_path: Path) -> None:
    """Also where an option lets in all that is below /v1."""
    paths = (
        "/v1/../sleep",
        "/v1/%2e%2e/sleep",
        "/v1/%2E%2e/reset_prefix_cache",
        "/v1/x/../../sleep?level=2",
        "/v1/x%2f..%2f..%2fsleep",
        "/v1/./chat/completions",
        "/v1/..",
        "/v1/..%5csleep",
        "//v1/../sleep",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter/",
        "/v1/admin",
        "/v1/admin/batch",
        "/v1/%61dmin/batch?dry_run=1",
        "/v1/responses/..%2fadmin/batch",
        "/sleep",
        "/v1",
    )
    own: dict[str, Any] = {"kv_connector": "none", "health_interval": 60}
    async with RawEngine(says(plain(b"{}"))) as engine:
        for extra in ("", "/v1/*"):
            log = tmp_path / "log"
            async with ServedProxy(log, [engine.address], extra_paths=extra, **own) as proxy:
                for path in paths:
                    for method in ("POST", "GET", "OPTIONS"):
                        answer = await raw(proxy, post(path).replace(b"POST", method.encode(), 1))
                        assert answer.split(b" ", 2)[1] in (b"400", b"404", b"405"), path
                        assert b'{"error":{' in answer
        assert not engine.posts


async def test_a_path_passes_with_a_row_or_by_option(tmp_path: Path) -> None:
    """An option adds paths, below /v1 and beside it, with any method; else they are a 404."""
    asked = ("/v1/images/generations", "/v1/files/7/content", "/v1/files", "/invocations")
    own: dict[str, Any] = {"kv_connector": "none", "health_interval": 60}
    async with RawEngine(says(plain(b'{"ok":1}'))) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], **own) as proxy:
            for path in (*ENDPOINTS, f"{RESPONSES}/r/cancel"):
                assert (await raw(proxy, post(path))).startswith(b"HTTP/1.1 200 "), path
            served = len(engine.posts)
            for path in asked:
                answer = await raw(proxy, post(path))
                assert answer.startswith(b"HTTP/1.1 404 ")
                assert (
                    b"path: not relayed; docs/reference/http-api.md lists what is, --extra-paths"
                    in answer
                )
            assert len(engine.posts) == served == len(ENDPOINTS) + 1
        extra = "/v1/images/generations,/v1/files/*,/invocations"
        async with ServedProxy(tmp_path / "log", [engine.address], extra_paths=extra, **own) as p:
            got = [(await raw(p, post(path))).split(b" ", 2)[1] for path in asked]
            assert got == [b"200", b"200", b"404", b"200"]


async def test_what_is_asked_of_an_engine_is_what_the_client_wrote(tmp_path: Path) -> None:
    """No normalisation on the way: query and escapes arrive as they came."""
    engine = RawEngine(says(plain(b"{}")))
    async with (
        engine,
        ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy,
    ):
        await raw(proxy, post("/v1/embeddings?q=%2B%2f&a=b%20c"))
        assert engine.post_heads[0].startswith(b"POST /v1/embeddings?q=%2B%2f&a=b%20c HTTP/1.1\r\n")


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "", "application/octet-stream"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions/batch", "/v1/messages"])
async def test_kv_transfer_params_do_not_hide_behind_a_content_type(
    tmp_path: Path, path: str, kind: str
) -> None:
    async with RawEngine(says(plain(b"{}"))) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            await raw(proxy, post(path, BODY, kind))
            assert engine.posts == [b'{"input":"x"}']


@pytest.mark.parametrize(
    "body", [BODY.decode().encode("utf-16"), BODY.decode().encode("utf-16-le"), b"{'a':1}"]
)
async def test_nor_behind_an_encoding(tmp_path: Path, body: bytes) -> None:
    """Python's JSON reads UTF-16; what was not looked at is not sent."""
    async with RawEngine(says(plain(b"{}"))) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            answer = await raw(proxy, post("/v1/responses", body))
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert not engine.posts


ODD = {
    "a mark": b"\xef\xbb\xbf" + BODY,
    "half a pair": BODY.replace(b'"x"', rb'"\ud83d"'),
    "half a pair as bytes": BODY.replace(b'"x"', b'"\xed\xa0\xbd"'),
    "NaN": BODY.replace(b'"x"', b'[{"a":NaN}]'),
}


@pytest.mark.parametrize("what", ODD)
async def test_nor_in_what_only_an_engines_parser_takes(tmp_path: Path, what: str) -> None:
    async with RawEngine(says(plain(b"{}"))) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            answer = await raw(proxy, post("/v1/responses", ODD[what]))
            assert answer.startswith(b"HTTP/1.1 200 ")
            (got,) = engine.posts
            assert json.loads(got).keys() == {"input"}
            assert json.dumps(json.loads(got)["input"]) in json.dumps(json.loads(ODD[what]))


HALF = rb"$ ls \ud83d"
AS_THEY_COME = {
    "chat": ("/v1/chat/completions", b'{"model":"m","messages":[{"role":"tool","content":"%s"}]}'),
    "stream": ("/v1/completions", b'{"stream":true,"prompt":"%s","stop":["%s"],"user":"%s"}'),
    "messages": ("/v1/messages", b'{"messages":[{"content":[{"type":"text","text":"%s"}]}]}'),
    "responses": ("/v1/responses", b'{"input":[{"type":"function_call_output","output":"%s"}]}'),
    "metadata": ("/v1/chat/completions", b'{"messages":[],"metadata":{"title":"%s"}}'),
    "names": ("/v1/responses", b'{"model":"%s","session_id":"%s","prompt_cache_key":"%s"}'),
    "more than is parsed here": ("/v1/responses", b'{"input":"' + b"x" * 40_000 + b'%s"}'),
}


@pytest.mark.parametrize("what", AS_THEY_COME)
async def test_half_a_surrogate_pair_arrives_as_it_came(tmp_path: Path, what: str) -> None:
    path, form = AS_THEY_COME[what]
    body = form.replace(b"%s", HALF)
    log = tmp_path / "log"
    async with RawEngine(says(plain(b"{}"))) as engine:
        engine.tells(plain(b"{}"))  # no list of models, in which none of these would be
        async with ServedProxy(log, [engine.address], kv_connector="none") as proxy:
            assert (await proxy.post(body, path)).status == 200
            assert engine.posts == [body]
            (record,) = await proxy.records(1)
            assert record["outcome"] == "ok"


@pytest.mark.long
@pytest.mark.parametrize("count", [4_097, 20_000])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/messages", "messages"),
        ("/v1/responses", "input"),
    ],
)
async def test_messages_are_not_counted(tmp_path: Path, path: str, field: str, count: int) -> None:
    turns = [{"role": "user", "content": f"turn {i}"} for i in range(count)]
    body = orjson.dumps({"model": "m", "max_tokens": 9, field: turns})
    async with RawEngine(says(plain(b"{}"))) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            assert (await proxy.post(body, path)).status == 200
            assert engine.posts == [body]


async def test_a_form_upload_passes(tmp_path: Path) -> None:
    form = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n\xff\xfe\r\n--b--\r\n'
    async with RawEngine(says(plain(b"{}"))) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            kind = "multipart/form-data; boundary=b"
            answer = await raw(proxy, post("/v1/audio/transcriptions", form, kind))
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert engine.posts == [form]


@pytest.mark.parametrize("path", ["/v1/completions/", "/v1/responses//", "/v1/messages%2F"])
async def test_a_slash_behind_a_known_path_is_404_and_asks_no_engine(
    tmp_path: Path, path: str
) -> None:
    """Engines would redirect it."""
    async with RawEngine(says(plain(b"{}"))) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            answer = await raw(proxy, post(path, BODY))
            assert answer.startswith(b"HTTP/1.1 404 ")
            assert b"path: without the slash at its end" in answer
            assert not engine.posts


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS"])
async def test_other_methods_are_405(tmp_path: Path, method: str) -> None:
    async with RawEngine(says(plain(b"{}"))) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            request = (
                f"{method} /v1/chat/completions HTTP/1.1\r\nHost: p\r\nConnection: close\r\n\r\n"
            )
            answer = await raw(proxy, request.encode())
            assert answer.startswith(b"HTTP/1.1 405 ")
            assert b"\r\nAllow: POST\r\n" in answer


async def test_a_body_that_does_not_come_is_408(tmp_path: Path) -> None:
    async with RawEngine(says(plain(b"{}"))) as engine:
        options = {"kv_connector": "none", "body_timeout": 0.2}
        async with ServedProxy(tmp_path / "log", [engine.address], **options) as proxy:
            answer = await raw(proxy, post("/v1/chat/completions")[:-1])  # lingers for 2 s
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"--body-timeout" in answer
            (record,) = await proxy.records(1)
            assert record["outcome"] == "bad_request"
            await until(lambda: proxy.server.state.in_flight.count == 0)


async def test_no_shape_of_steering_fields_reaches_an_engine(tmp_path: Path) -> None:
    """Every tenth of the thousand shapes of the core's test, on the wire: the rest unchanged."""
    async with RawEngine(says(plain(b"{}"))) as engine:
        engine.tells(plain(b"{}"))  # its models stay unknown, so that it is asked for any
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            for index in range(0, SHAPES, 10):
                body = shape(index).encode()
                await proxy.post(body, "/v1/responses")
                wanted = [pair for pair in pairs(body) if not steers(pair[0])]
                assert pairs(engine.posts[-1]) == wanted, body
                if not any(steers(key) for key, _ in pairs(body)):
                    assert engine.posts[-1] == body
            assert len(engine.posts) == SHAPES // 10


async def test_steering_headers_stay_here(tmp_path: Path) -> None:
    engine = RawEngine(says(plain(b"{}")))
    async with (
        engine,
        ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy,
    ):
        names = ("X-data-parallel-rank", "x-prefiller-host-port", "X-Prefiller-URL")
        more = "".join(f"{name}: 1\r\n" for name in names) + "Authorization: Bearer k\r\n"
        request = post("/v1/embeddings").replace(
            b"Connection: close\r\n", b"Connection: close, authorization\r\n" + more.encode()
        )
        await raw(proxy, request)
        (head,) = engine.post_heads
        assert b"Authorization: Bearer k\r\n" in head
        assert not any(name.lower().encode() in head.lower() for name in names)
