"""Requests that were made to hurt: refused in words of ours, or harmless behind."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import threading
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import uvicorn
from uvicorn.server import ServerState

from proxy.admin import endpoints
from proxy.protocol.body import SMALL_COMMAS
from proxy.protocol.headers import ACTS_BEYOND
from proxy.request import content_coding
from proxy.request.content_coding import AT_ONCE, Unpacking
from proxy.request.large_bodies import LargeBodies
from tests.bad_input.cases import cases, variants
from tests.bad_input.run import PROBES
from tests.bad_input.run import run as send_all
from tests.chaos.client import Got, request
from tests.chaos.invariants import samples
from tests.chaos.rig import CANARIES, MODEL, SLOW_PROBES, Floor, Rig
from tests.support.admin import call
from tests.support.harness import (
    DONE,
    GOOD,
    STREAM_HEAD,
    WAIT_S,
    RawEngine,
    chat,
    chunk,
    event,
    plain,
    resets,
    says,
    until,
    words,
)
from tests.support.turns import TURN_S, Turns

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: p\r\nContent-Type: application/json\r\n"
MESSAGE = b'{"role":"user","content":"hi"}'
SMALL = orjson.dumps(chat("hi"))
MEDIA: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
    {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0="}},
]


def is_fine(got: Got) -> bool:
    return got.status == 200 and got.is_clean and got.text == "fine"


def refused(got: Got) -> int:
    """The status of an answer in OpenAI's or Anthropic's form, which it must be."""
    assert got.error["message"], got.body[:300]
    own = set() if b'"type":"error"' in got.body else {"code", "param"}
    assert {"message", "type"} | own <= set(got.error)
    return got.status


async def still_serves(r: Rig) -> None:
    assert is_fine(await r.ask())


@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
async def test_f84_a_length_of_10_to_the_11(rig: Floor, expect: str) -> None:
    async with rig([GOOD], **SLOW_PROBES) as r:
        got = await r.raw(HEAD + f"Content-Length: 99999999999\r\n{expect}\r\n".encode())
        assert refused(got) == 413
        assert got.interim == [], "no 100 for what is refused"
        assert not r.links[0].posts
        await still_serves(r)


@pytest.mark.parametrize("how", ["big chunks", "one byte each"])
async def test_f85_a_chunked_body_without_end(rig: Floor, how: str) -> None:
    piece = (
        b"1\r\n \r\n" * 10_000 if how == "one byte each" else b"10000\r\n" + b" " * 65536 + b"\r\n"
    )
    options: dict[str, Any] = {"max_body_bytes": 1 << 20, "body_timeout": 2.0}
    async with rig([GOOD], **options, **SLOW_PROBES) as r:
        connection = await r.connection()
        connection.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        taken = 0

        async def feed() -> None:
            nonlocal taken
            while not connection.writer.is_closing():
                connection.send(piece)
                await connection.writer.drain()
                taken += len(piece)
                await asyncio.sleep(0)

        feeding = asyncio.create_task(feed())
        try:
            got = await connection.get()
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        assert refused(got) == (400 if how == "one byte each" else 413)
        assert taken < 16 << 20, "the cap, and what the kernel buffers"
        assert not r.links[0].posts
        await still_serves(r)


PACKED = {
    "gzip": (gzip.compress(b" " * (1 << 28)), 413),
    "deflate": (zlib.compress(b" " * (1 << 28)), 413),
    "br": (b"\x00" * 100, 415),
    "zstd": (b"\x28\xb5\x2f\xfd" + b"\x00" * 100, 400),
    "gzip, gzip": (gzip.compress(gzip.compress(b" " * (1 << 24))), 415),
    "x-gzip": (gzip.compress(b"{}" * (1 << 20)), 400),
}


@pytest.mark.parametrize("coding", PACKED)
async def test_f86_compressed_bodies(rig: Floor, coding: str) -> None:
    async with rig([GOOD], **SLOW_PROBES) as r:
        body, status = PACKED[coding]
        got = await r.raw(request(body, {"Content-Encoding": coding}))
        assert refused(got) == status
        assert not r.links[0].posts
        await still_serves(r)


def said(**fields: bytes) -> bytes:
    """A body with these values, each as its bytes."""
    ours = {"model": b'"sim-8b"', "messages": b"[%s]" % MESSAGE} | fields
    return b"{" + b",".join(b'"%s":%s' % (k.encode(), v) for k, v in ours.items()) + b"}"


ODD_JSON: dict[str, bytes] = {
    "depth": said(x=b"[" * 100_000 + b"]" * 100_000),
    "some depth": said(x=b"[" * 900 + b"]" * 900),
    "keys": b'{"model":"sim-8b","messages":[],'
    + b",".join(b'"k%d":1' % i for i in range(10**5))
    + b"}",
    "long string": said(user=b'"' + b"x" * 10_000_000 + b'"'),
    "invalid UTF-8": said(user=b'"\xff\xfe"'),
    "BOM": b"\xef\xbb\xbf" + said(),
    "UTF-16": said().decode().encode("utf-16"),
    "lone surrogate": said(user=b'"\\ud800"'),
    "NaN": said(temperature=b"NaN"),
    "1e999": said(temperature=b"1e999"),
    "twice": b'{"model":"a","model":"sim-8b","stream":false,"stream":true,"messages":[],'
    b'"messages":[%s]}' % MESSAGE,
    "huge int": said(seed=b"1" + b"0" * 400),
    "max_tokens -1": said(max_tokens=b"-1"),
    "max_tokens 1e308": said(max_tokens=b"1e308"),
    "max_tokens text": said(max_tokens=b'"7"'),
    "max_tokens true": said(max_tokens=b"true"),
    "n": said(n=b"1000000000"),
    "stream text": said(stream=b'"yes"'),
    "messages text": said(messages=b'"hi"'),
    "messages of numbers": said(messages=b"[1,2,null,[]]"),
    "content of objects": said(messages=b'[{"role":7,"content":{"a":[{"text":[]}]}}]'),
    "model list": said(model=b'["sim-8b"]'),
    "model null": said(model=b"null"),
    "metadata": said(metadata=b'{"session_id":{"a":1}}', session_id=b"[1]", prompt_cache_key=b"7"),
    "array": b"[]",
    "number": b"7",
    "nothing": b"",
    "cut": said()[:-3],
    "many messages": said(messages=b"[" + b",".join([MESSAGE] * 20_000) + b"]"),
}


@pytest.mark.parametrize("what", ODD_JSON)
async def test_f87_odd_json(rig: Floor, timed: Turns, what: str) -> None:
    """400 in OpenAI's shape, or byte for byte what the client said."""
    engine, body = RawEngine(), ODD_JSON[what]
    async with rig([engine], **SLOW_PROBES) as r:
        r.lag.forgive()
        got = await r.raw(request(body, CANARIES))
        if got.status == 200:
            to_any = [b for b in r.calm.posts if b == body]  # where no model is named
            assert {*engine.posts, *to_any} == {body}
        else:
            assert refused(got) in (400, 413)
            assert engine.posts == []
        await still_serves(r)


def full_of(piece: bytes, size: int, times: int = 10**9) -> bytes:
    """A body of this size with the piece again and again, and one long text."""
    times = min(times, size // len(piece))
    text = b"x" * (size - times * len(piece))
    return said(x=b"[" + piece * times + b'"%s"]' % text, do_remote_prefill=b"true")


NESTS = {
    "as deep as is allowed": b"[" * 120 + b"]" * 120 + b",",
    "deeper": b"[" * 130 + b"]" * 130 + b",",
    "flat": b"[],",
    "objects": b'{"a":{}},',
    "letters": b'"a",',
    "numbers": b"1.5,",
}
KIB = 1 << 10


@pytest.mark.parametrize("size", [120 * KIB, 500 * KIB, 12_000 * KIB])
@pytest.mark.parametrize("steers", [False, True])
async def test_f124_a_body_full_of_names(
    rig: Floor, timed: Turns, size: int, *, steers: bool
) -> None:
    """One name again and again, and one name as long as the body."""
    timed.bound_s = TURN_S / 2
    last = b'"do_remote_x":1,' if steers else b""
    inner = (b'"":1,' * (size // 5), b'"%s":1,' % (b"\\n" * (size // 2)))
    async with rig([GOOD], **SLOW_PROBES) as r:
        for names in inner:
            got = await r.raw(request(b"{" + names + last + said()[1:], {}))
            assert got.status == 200 or refused(got) == 400


@pytest.mark.parametrize("place", ["x", "messages"])
@pytest.mark.parametrize("piece", NESTS)
async def test_f124_a_body_full_of_values(rig: Floor, timed: Turns, piece: str, place: str) -> None:
    """Of any size, refused or not, edited or not: no turn of the event loop is long."""
    timed.bound_s = TURN_S / 2
    sizes = (4 * KIB, 120 * KIB, 500 * KIB, 12_000 * KIB)
    async with rig([GOOD], **SLOW_PROBES) as r:
        for size in sizes:
            for times in (1000, 10**9):
                body = full_of(NESTS[piece], size, times).replace(
                    b'"x":', b'"%s":' % place.encode()
                )
                got = await r.raw(request(body, {}))
                assert got.status == 200 or refused(got) == 400


STEERING: dict[str, bytes] = {
    "kv_transfer_params": said(kv_transfer_params=b'{"do_remote_prefill":true,"remote_host":"x"}'),
    "null": said(kv_transfer_params=b"null"),
    "escaped": b'{"model":"sim-8b","messages":[%s],"\\u006bv_transfer_params":{"a":1}}' % MESSAGE,
    "twice": b'{"kv_transfer_params":{},"model":"sim-8b","messages":[%s],'
    b'"kv_transfer_params":{"a":1}}' % MESSAGE,
    "xargs": said(vllm_xargs=b'{"kv_transfer_params":"{}"}'),
    "nested": said(extra_body=b'{"kv_transfer_params":{"a":1}}'),
    "ec_transfer_params": said(ec_transfer_params=b'{"a":1}'),
    "data_parallel_rank": said(data_parallel_rank=b"3"),
    "cache_salt": said(cache_salt=b'"a/b@\\u0000' + b"x" * 10_240 + b'"'),
}
FOR_ENGINES = {
    "X-data-parallel-rank": "3",
    "X-Prefiller-Host-Port": "169.254.169.254:80",
    "x-prefiller-url": "http://169.254.169.254",
}


@pytest.mark.parametrize("what", STEERING)
async def test_f88_clients_steer_the_engine(rig: Floor, what: str) -> None:
    engine = RawEngine()
    async with rig([engine], **SLOW_PROBES) as r:
        got = await r.raw(request(STEERING[what], CANARIES | FOR_ENGINES))
        if got.status != 200:
            assert refused(got) == 400
            assert engine.posts == []
            return
        told = orjson.loads(engine.posts[0])
        assert not {"kv_transfer_params", "ec_transfer_params", "data_parallel_rank"} & set(told)
        assert "kv_transfer_params" not in told.get("vllm_xargs", {})
        assert len(told.get("cache_salt", "")) <= 128
        head = engine.post_heads[0].lower()
        assert b"prefiller" not in head
        assert b"data-parallel" not in head


KEY = "sk-chaos-0123456789abcdef"
SALTED: dict[str, Any] = {"api_key": f"acme:{KEY}", "cache_salt_secret": "0123456789abcdef" * 2}
FORM_HEAD = {"Content-Type": "multipart/form-data; boundary=x"}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/embeddings", "/v1/audio/translations"])
async def test_f108_what_cannot_be_salted(rig: Floor, path: str) -> None:
    engine = RawEngine()
    async with rig([engine], flow=False, **SALTED, **SLOW_PROBES) as r:
        who = {"Authorization": f"Bearer {KEY}"}
        got = await r.raw(request(SMALL, who | FORM_HEAD, path))
        assert refused(got) == 403
        assert "--cache-salt-secret" in got.error["message"]
        assert engine.posts == []
        assert is_fine(await r.raw(request(SMALL, who)))
        assert b"cache_salt" in engine.posts[-1]


@pytest.mark.parametrize(("given", "streams"), [('"false"', False), ("0.0", False), ('"On"', True)])
async def test_f109_a_flag_that_engines_coerce(rig: Floor, given: str, streams: bool) -> None:
    """Taken for a stream, an answer in one piece would be called late, and asked for again."""
    async with rig([GOOD], **SLOW_PROBES) as r:
        body = SMALL[:-1] + b',"stream":%s}' % given.encode()
        assert is_fine(await r.raw(request(body, {})))
        assert (await r.record())["stream"] is streams


async def test_f89_a_prompt_of_a_million_tokens(rig: Floor, timed: Turns) -> None:
    engine = RawEngine()
    many = b'{"model":"sim-8b","prompt":[' + b"7," * 999_999 + b"7],%s}"
    async with rig([engine], max_body_bytes=4 << 20, **SLOW_PROBES) as r:
        for body in (many % b'"max_tokens":1', many % b'"stream":true'):
            got = await r.raw(request(body, {}, "/v1/completions"))
            assert got.status == 200
            assert engine.posts[-1] == body
        tokens = [record["isl_tokens"] for record in await r.records(2)]
        assert tokens == [1_000_000] * 2
        odd = said(prompt=b"[-1,-2,99999999999999999999]")
        assert (await r.raw(request(odd, {}, "/v1/completions"))).status in (200, 400)
        got = await r.raw(request(b'{"prompt":[' + b"7," * (3 << 20), {}, "/v1/completions"))
        assert refused(got) == 413
        await still_serves(r)


PLANTED = {"type": "function", "name": "f", "usage": {"prompt_tokens": 100, "total_tokens": 101}}
"""A tool of a client's request, which the answers of /v1/responses repeat."""


async def test_f110_planted_usage(rig: Floor) -> None:
    """Nor is anything learned from an answer that breaks off, though its engine told so far."""
    echo = orjson.dumps({"object": "response", "status": "completed", "tools": [PLANTED]})
    completed = b'event: response.completed\ndata: {"type":"response.completed","response":%s}\n\n'
    so_far = event("fine")[:-3] + b',"usage":%s}\n\n' % orjson.dumps(PLANTED["usage"])
    streamed = says(STREAM_HEAD + chunk(completed % echo) + DONE)

    async def breaks_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_cut = b"0000499" in engine.posts[-1] and words(500, "w").encode() not in engine.posts[-1]
        await (resets(STREAM_HEAD + chunk(so_far)) if is_cut else GOOD)(reader, writer)

    engine = RawEngine(*[says(plain(echo)), streamed] * 10)
    engine.scripts += [breaks_off]  # the proxy's own trial gets a good answer
    async with rig([engine], **SLOW_PROBES) as r:
        before = r.router.known.bytes_per_token.of(MODEL)
        for i in range(20):
            hostile: dict[str, Any] = {
                "model": MODEL,
                "input": words(500, f"{i:02}"),
                "tools": [PLANTED],
            }
            hostile |= {"stream": i % 2 == 1}
            assert (await r.ask(path="/v1/responses", body=hostile)).status == 200
        for i in range(3):
            assert not (await r.ask(words(500, f"{i}"))).is_clean
        assert is_fine(await r.ask(words(500, "w")))
        records = await r.records(24)
        assert r.router.known.bytes_per_token.of(MODEL) == before
        assert [record["prompt_tokens"] for record in records[:20]] == [None] * 20


async def test_f90_header_and_log_injection(rig: Floor) -> None:
    evil = ["\x1b[31mred", "a\u2028b", "x" * 300, "a b", '{"a":1}', "%0d%0aX-Evil: 1"]
    evil += ["a\u202eb", "a\u200bb"]
    async with rig([GOOD], **SLOW_PROBES) as r:
        for i, text in enumerate(evil):
            headers = {"X-Session-ID": text, "X-Request-Id": text, "X-Correlation-ID": text}
            raw = request(orjson.dumps(chat("x") | {"model": f"{text}{i}"}), {})
            lines = "".join(f"{k}: {v}\r\n" for k, v in headers.items()).encode()
            got = await r.raw(raw.replace(b"\r\n", b"\r\n" + lines, 1))
            assert "x-evil" not in got.headers
            assert all(c.isprintable() for c in got.headers.get("x-request-id", ""))
        for i in range(100):
            await r.ask(body=chat("x") | {"model": f"model-{i}"})
        path = r.proxy.settings.request_log
        assert path is not None
        told = [(name, labels) for name, labels, _ in samples(r.exposition)]
        assert not any("\x1b" in repr(labels) or "model-" in repr(labels) for _, labels in told)
        assert len(told) < 3000, "labels are closed sets"
        logged = path.read_text("utf-8") + "".join(r.log.lines)
        assert not [char for char in logged if char in "\x1b\u2028\u202e\u200b"]


Framed = tuple[str, bytes, bytes]
"""Method, target and body of a request."""


class Uvicorn:
    """A real uvicorn as the engine: vLLM's own HTTP server. `got`: each request as it framed it."""

    def __init__(self, parser: Any) -> None:
        self.got: list[Framed] = []
        config = uvicorn.Config(self._app, http=parser, interface="asgi3", log_config=None)
        config.load()
        self._config, self._state = config, ServerState()

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Its URL, while it listens."""
        loop: Any = asyncio.get_running_loop()
        server = await loop.create_server(self._protocol, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for protocol in list(self._state.connections):
                protocol.transport.close()

    def _protocol(self) -> Any:
        made: Any = self._config.http_protocol_class
        return made(config=self._config, server_state=self._state, app_state={})

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                self.got.append((scope["method"], scope["raw_path"], body))
                break
        else:
            return
        answer = MODELS if scope["path"] == "/v1/models" else b"{}"
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": answer})


MODELS = b'{"data":[{"id":"sim-8b"}]}'


def meant(streams: Iterable[bytearray]) -> list[Framed]:
    """The whole requests of what the proxy sent, framed by the one rule that it may use."""
    found: list[Framed] = []
    for stream in streams:
        rest = bytes(stream)
        while b"\r\n\r\n" in rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            first, *lines = head.split(b"\r\n")
            fields = [line.partition(b":") for line in lines]
            assert all(name.strip() == name and name for name, _, _ in fields), head
            lengths = [int(v) for name, _, v in fields if name.lower() == b"content-length"]
            assert b"transfer-encoding" not in [name.lower() for name, _, _ in fields], head
            assert len(lengths) <= 1, head
            size = sum(lengths)
            if len(rest) >= size:
                method, target, _ = first.split(b" ")
                found.append((method.decode(), target.partition(b"?")[0], rest[:size]))
            rest = rest[size:]
    return found


def asked(requests: Iterable[Framed]) -> Counter[Framed]:
    """Without the probes, one of which may be under way at the end."""
    probes = [tuple(probe.split()) for probe in PROBES]
    return Counter(r for r in requests if (r[0].encode(), r[1]) not in probes)


@pytest.mark.parametrize("parser", ["h11", "httptools"])
async def test_f121_a_real_uvicorn_frames_what_is_forwarded_as_it_was_meant(
    rig: Floor, tmp_path: Path, parser: str
) -> None:
    """Every case of bad_input, and its variants: nothing is smuggled past the proxy."""
    everything = cases()
    everything += [v for case in everything if case.expect != "refuse" for v in variants(case)]
    engine = Uvicorn(parser)
    async with engine.served() as url:
        result = await send_all(everything, tmp_path, url)
    sent = asked(meant(result.streams))
    assert sent.total() > 400, "most that are served go on to the engine"
    assert asked(engine.got) == sent
    assert result.leaked == []
    assert [str(outcome) for outcome in result.outcomes if "replies" in outcome.fault] == []
    rig.checked += 1


async def test_f115_anothers_stored_response(rig: Floor) -> None:
    """Read, cancelled, deleted or continued, also after one's own response was named alike."""
    path, ask = "/v1/responses", {"model": "sim-8b", "input": "x", "max_output_tokens": 2}
    keys = {name: {"Authorization": f"Bearer key-of-tenant-{name}"} for name in "ab"}
    options: dict[str, Any] = {"api_key": "a:key-of-tenant-a,b:key-of-tenant-b", "flow": False}
    async with rig(sims=2, **options) as r:

        async def tried(who: str, method: str, path: str, body: Any = None) -> Got:
            raw = None if body is None else orjson.dumps(body)
            return await r.raw(request(raw, keys[who], path, method))

        made = (await tried("a", "POST", path, ask)).json["id"]
        for named in ({}, {"store": False}):
            for _ in range(2):  # one on each instance
                mine = ask | {"request_id": f"{made}x" if not named else made} | named
                assert (await tried("b", "POST", path, mine)).status == 200
            for method, where, body in (
                ("GET", f"{path}/{made}", None),
                ("GET", f"{path}/{made}/input_items", None),
                ("GET", f"/v1/%72esponses/{made}", None),
                ("GET", f"/v1/responses%2F{made}", None),
                ("POST", f"{path}/{made}/cancel", {}),
                ("DELETE", f"{path}/{made}", None),
                ("POST", path, ask | {"previous_response_id": made}),
            ):
                got = await tried("b", method, where, body)
                assert (refused(got), got.error["code"]) == (404, "response_not_found"), where
        assert (await tried("a", "GET", f"{path}/{made}")).json["id"] == made


TENANTS = {name: {"Authorization": f"Bearer key-of-tenant-{name}"} for name in "ab"}
SHARED: dict[str, Any] = {
    "api_key": "a:key-of-tenant-a,b:key-of-tenant-b",
    "flow": False,
    "max_sessions": 60,
}


async def test_f136_one_tenant_fills_the_table_of_stored_responses(rig: Floor) -> None:
    path, ask = "/v1/responses", {"model": "sim-8b", "input": "x", "max_output_tokens": 1}
    async with rig(sims=2, **SHARED) as r:

        async def made(who: str) -> str:
            got = await r.raw(request(orjson.dumps(ask), TENANTS[who], path))
            return str(got.json["id"])

        mine = [await made("a") for _ in range(5)]
        for _ in range(100):
            await made("b")
        assert len(r.router.known.responses) == 60
        for one in mine:
            got = await r.raw(request(None, TENANTS["a"], f"{path}/{one}", "GET"))
            assert (got.status, got.json["id"]) == (200, one)


@pytest.mark.parametrize("is_served", [True, False])
async def test_f137_one_tenant_fills_the_table_of_sessions(rig: Floor, *, is_served: bool) -> None:
    """Also with requests that the engine refuses."""
    engine = RawEngine(GOOD)
    async with rig([engine], **SHARED, **SLOW_PROBES) as r:

        async def ask(who: str, name: str) -> Got:
            return await r.ask(headers=TENANTS[who] | {"X-Session-ID": name})

        for n in range(10):
            assert (await ask("a", f"s{n}")).status == 200
        engine.scripts[:] = [GOOD if is_served else says(plain(b'{"error":{}}', "400 No"))]
        for n in range(100):
            assert (await ask("b", f"s{n}")).status == (200 if is_served else 400)
        engine.scripts[:] = [GOOD]
        assert len(r.router.known.sessions) == 60
        for n in range(10):
            assert (await ask("a", f"s{n}")).status == 200
        records = (await r.records(120))[-10:]
        turns = [(record["session_id"], record["turn"]) for record in records]
        assert turns == [(f"a/s{n}", 1) for n in range(10)]


LAST_NAMES = ['["a"]', "{}", '{"a":["b"]}', "[]", "null", "7", '"y"', "true"]


@pytest.mark.parametrize("large", [False, True])
async def test_f141_a_response_is_named_twice(rig: Floor, *, large: bool) -> None:
    """Whatever the last one holds, and however the names are spelled: none reaches an engine."""
    engine = RawEngine(GOOD)
    async with rig([engine], **SHARED, **SLOW_PROBES) as r:
        rest = b'"model":"sim-8b","input":"%b"' % (b"x" * ((2 << 20) if large else 1))
        for last in LAST_NAMES[: 2 if large else None]:
            for first, second in (
                (b"request_id", b"request_id"),
                (b"\\u0072equest_id", b"request_i\\u0064"),
            ):
                names = (b'"%b":"resp_x"' % first, b'"%b":%b' % (second, last.encode()))
                for body in (
                    b",".join((names[0], rest, names[1])),
                    b",".join((names[1], rest, names[0])),
                ):
                    raw = request(b"{%b}" % body, TENANTS["a"], "/v1/responses")
                    assert (await r.raw(raw)).status == 200
        assert len(engine.posts) == (2 if large else len(LAST_NAMES)) * 4
        for sent in engine.posts:
            pairs = json.loads(sent, object_pairs_hook=list)
            assert [name for name, _ in pairs] == ["model", "input"]


KEYS = {"hog": "sk-hog-0123456789abcdef", "few": "sk-few-0123456789abcdef"}


@pytest.mark.parametrize("kind", ["packed", "large"])
async def test_f154_bodies_of_two_tenants_take_turns(
    rig: Floor, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that wait to be unpacked, or for the process that examines large ones."""
    may_begin, came, turns = threading.Event(), 0, list[str]()
    rest, ask = content_coding._Steps.whole, LargeBodies._ask

    def unpacks(steps: Any) -> bytes:
        assert may_begin.wait(WAIT_S)
        at = len(turns)
        turns.append("it begins")
        plain = rest(steps)
        turns[at] = orjson.loads(plain)["user"]
        return plain

    async def asks(large: LargeBodies, task: Any) -> Any:
        await until(may_begin.is_set)
        turns.append(orjson.loads(task.raw)["user"])
        return await ask(large, task)

    def counted(waits: Any) -> Any:
        async def waits_counted(*args: Any) -> Any:
            nonlocal came
            came += 1
            return await waits(*args)

        return waits_counted

    monkeypatch.setattr(content_coding._Steps, "whole", unpacks)
    monkeypatch.setattr(LargeBodies, "_ask", asks)
    monkeypatch.setattr(Unpacking, "plain", counted(Unpacking.plain))
    monkeypatch.setattr(LargeBodies, "examine", counted(LargeBodies.examine))
    size = 40_000 if kind == "packed" else 600_000

    def asked(tenant: str) -> asyncio.Task[Got]:
        raw = orjson.dumps(chat("hi", user=tenant) | {"junk": os.urandom(size).hex()})
        headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
        if kind == "packed":
            raw, headers = gzip.compress(raw), headers | {"Content-Encoding": "gzip"}
        return asyncio.create_task(r.ask(body=raw, headers=headers))

    keys = ",".join(f"{tenant}:{key}" for tenant, key in KEYS.items())
    engine = RawEngine(GOOD)
    async with rig([engine], flow=False, api_key=keys, **SLOW_PROBES) as r:
        hogs = [asked("hog") for _ in range(8)]
        await until(lambda: came == 8, "they wait")
        few = asked("few")
        await until(lambda: came == 9, "it waits")
        may_begin.set()
        assert all(map(is_fine, await asyncio.gather(few, *hogs)))
        assert len(turns) == len(engine.posts) == 9
        assert turns.index("few") <= AT_ONCE + 1, turns


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_f157_one_id_of_two_tenants(rig: Floor, path: str) -> None:
    """Engines abort requests by id. A repeat has another one, too."""
    fails = says(plain(b'{"error":{"message":"no"}}', "500 Internal Server Error"))
    whole = GOOD if "chat" in path else says(plain(b'{"data":[{"embedding":[1.0]}]}'))
    engines = [RawEngine(fails, whole), RawEngine(whole)]
    async with rig(engines, **SHARED, **SLOW_PROBES) as r:
        for named in ("job-17", "job-17-0123456789ab", "j" * 256, ""):
            for who in "abab":
                headers = TENANTS[who] | ({"X-Request-Id": named} if named else {})
                got = await r.raw(request(SMALL, headers, path))
                assert named in ("", got.headers["x-request-id"])
        heads = [*engines[0].post_heads, *engines[1].post_heads]
        told = [re.search(rb"X-Request-Id: (\S+)", head) for head in heads]
        ids = [found[1].decode() for found in told if found]
        assert len(ids) == len(set(ids)) == 17
        assert all(re.fullmatch(r"\S+-[0-9a-f]{12}", one) for one in ids)
        assert sum(one.startswith("job-17-0123456789ab-") for one in ids) == 4


PAGE = b"<script>fetch('/instances/i0',{method:'DELETE'})</script>"


@pytest.mark.parametrize("status", ["200 OK", "400 No", "404 No", "418 No", "500 No", "503 No"])
async def test_f158_a_page_in_the_proxys_name(rig: Floor, status: str) -> None:
    """Passed on, or the last answer where every instance has failed."""
    beyond = [name for names in ACTS_BEYOND.values() for name in names]
    more = b"".join(b"%b: x\r\n" % name for name in (*beyond, b"X-Cache-Proxy-Session"))
    head = b"HTTP/1.1 %b\r\nContent-Type: text/html\r\nX-Mine: 1\r\n" % status.encode()
    page = head + more + b"Content-Length: %d\r\n\r\n" % len(PAGE) + PAGE
    engines = [RawEngine(says(page)), RawEngine(says(page))]
    async with rig(engines, max_queue=0, **SLOW_PROBES) as r:
        for engine in (*engines, r.calm):
            engine.gets["/v1/responses/x"] = page
        for raw in (request(SMALL, {}), request(None, {}, "/v1/responses/x", "GET")):
            got = await r.raw(raw)
            assert got.status == int(status[:3])
            if got.body == PAGE:
                assert got.headers["x-content-type-options"] == "nosniff"
                assert got.headers["content-security-policy"] == "sandbox"
            else:
                assert got.headers["content-type"].startswith("application/json")
            assert not {name.decode() for name in beyond} & got.headers.keys()
            assert "x-cache-proxy-session" not in got.headers


async def test_f165_models_under_new_keys(rig: Floor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "KEPT_S", 600.0)
    async with rig([GOOD], **SLOW_PROBES) as r:
        told, asked = r.engines[0].gets["/v1/models"], list[None]()
        assert isinstance(told, bytes)

        async def tells(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(None)
            await says(told)(reader, writer)

        r.engines[0].gets["/v1/models"] = tells

        async def asks(key: int) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return (await call(r.proxy, "GET", "/v1/models", headers=headers))[0]

        tasks = [asyncio.create_task(asks(key)) for key in range(40)]
        try:
            await until(lambda: sum(task.done() for task in tasks) == endpoints.KEPT_LISTS)
            kept = [key for key, task in enumerate(tasks) if task.done()]
            assert [await asks(key) for key in kept] == [200] * len(kept), "they are kept"
            assert len(asked) == endpoints.KEPT_LISTS
            assert is_fine(await r.ask())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@pytest.mark.parametrize("part", MEDIA, ids=lambda part: part["type"])
async def test_f174_media_in_a_body_for_another_process(rig: Floor, part: dict[str, Any]) -> None:
    text = {"type": "text", "text": words(30_000, "a") + "," * SMALL_COMMAS}
    message = {"role": "user", "content": [text, part]}
    async with rig([GOOD], flow=False, **SLOW_PROBES) as r:
        assert is_fine(await r.ask(body=chat("x") | {"messages": [message]}))
        assert is_fine(await r.ask(body=chat("x") | {"messages": [message] * 2}))


def _spaces() -> dict[str, Any]:
    tools = [{"name": "a"}] * 3000
    return {"input": "hi", "tools": [{"type": "namespace", "name": "n" * 100_000, "tools": tools}]}


LONG_TO_WORK_OUT: dict[str, tuple[str, dict[str, Any]]] = {
    "tools of a namespace": ("/v1/responses", _spaces()),
    "media": ("", {"messages": [{"role": "user", "content": [MEDIA[0]] * 8000}]}),
    "nearly data": (
        "",
        {"messages": [{"role": "user", "content": [{"type": "zz", "zz": "A" * 1_000_000 + "!"}]}]},
    ),
    "arguments that steer": (
        "",
        {"vllm_xargs": {f"{name}{at}": 1 for at in range(250) for name in ("do_remote_", "x")}},
    ),
}


@pytest.mark.parametrize("kind", LONG_TO_WORK_OUT)
@pytest.mark.parametrize("limit", [0, 1])
async def test_f176_bodies_that_are_long_to_work_out(rig: Floor, kind: str, limit: int) -> None:
    path, fields = LONG_TO_WORK_OUT[kind]
    async with rig([GOOD], flow=False, migration_limit=limit, **SLOW_PROBES) as r:
        for _ in range(3):
            got = await r.ask(body=chat("x") | fields, path=path or "/v1/chat/completions")
            assert got.status == 200
