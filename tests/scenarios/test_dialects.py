"""Chats, completions, Anthropic's messages and OpenAI's responses: each is served as its own API.

What an engine says of its tokens is read and learned from, a stream ends where its API says so, and
what the proxy says itself has the API's form.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.core.types import BYTES_PER_TOKEN_PRIOR, RouteClass
from proxy.request import relay
from tests.scenarios.test_kv_events import followed, known, soon  # noqa: F401 - a fixture
from tests.support.harness import (
    STREAM_HEAD,
    Answer,
    RawEngine,
    Script,
    ServedProxy,
    apart,
    chunk,
    plain,
    proxied,
    resets,
    says,
    stalls,
    until,
    words,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
COUNT = f"{MESSAGES}/count_tokens"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def sse(name: str | None, **data: Any) -> bytes:
    """An event; with a name it is in the data too, as Anthropic's and the Responses API's are."""
    if name is None:
        return b"data: " + orjson.dumps(data) + b"\n\n"
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name} | data))


def asked(path: str, said: Any, *, stream: bool, tokens: int = 8) -> dict[str, Any]:
    """A request of an API. `said`: a text, or the turns of a conversation."""
    turns = [{"role": "user", "content": said}] if isinstance(said, str) else said
    body: dict[str, Any] = {"model": "sim-8b", "stream": stream, "ignore_eos": True}
    if path == RESPONSES:
        return body | {"input": turns, "max_output_tokens": tokens}
    if path == COMPLETIONS:
        body |= {"prompt": said}
    else:
        body |= {"messages": turns}
    if stream and path in (CHAT, COMPLETIONS):
        body["stream_options"] = {"include_usage": True}
    return body | {"max_tokens": tokens}


@asynccontextmanager
async def fed(
    tmp_path: Path, *scripts: Script, **options: Any
) -> AsyncIterator[tuple[ServedProxy, RawEngine]]:
    """A proxy in front of one engine that answers by script, at rest in the end."""
    settings = {"kv_connector": "none", "health_interval": 60} | options
    async with RawEngine(*scripts) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], **settings) as proxy:
            yield proxy, engine
            await proxy.at_rest()


def last_error(proxy: ServedProxy) -> str | None:
    (member,) = proxy.router.known.fleet.members()
    error: str | None = member.health.last_error
    return error


# What is learned


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
async def test_tokens_are_read_and_learned_from(tmp_path: Path, path: str, stream: bool) -> None:
    text = words(600)
    async with proxied(tmp_path, 1) as (proxy, _):
        for _ in range(2):
            assert (await proxy.post(asked(path, text, stream=stream), path)).status == 200
        first, second = await proxy.records(2)
        assert first["prompt_tokens"] == second["prompt_tokens"] > 600
        assert (first["cached_tokens"], first["osl_tokens"] > 1) == (0, True)
        assert second["cached_tokens"] > 0.9 * second["prompt_tokens"]
        assert proxy.router.known.bytes_per_token.of("sim-8b") != BYTES_PER_TOKEN_PRIOR
        # The estimate of the second is nearer, as the first has told.
        off = [abs(r["isl_tokens"] - r["prompt_tokens"]) for r in (first, second)]
        assert off[1] < off[0]
        counts = [proxy.metric("tpot_seconds_count", route_class=c) for c in RouteClass]
        assert sum(counts) == (2 if stream else 0)
        await proxy.at_rest()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_what_an_engine_has_lost_is_no_hit_any_more(
    tmp_path: Path, path: str, stream: bool
) -> None:
    """Prompts of several roots find nothing, so nothing is expected of one not asked about."""
    sim = {"num_gpu_blocks": 801, "max_model_len": 4096}
    prompts = [words(600, f"p{at}x") for at in range(5)]
    async with proxied(tmp_path, 1, sim=sim) as (proxy, fleet):
        for prompt in prompts:
            await proxy.post(asked(path, prompt, stream=stream), path)
        async with aiohttp.ClientSession(fleet.engines[0].url) as http:
            for start in range(1, 14_000, 3500):
                other = {"prompt": list(range(start, start + 3500)), "max_tokens": 2}
                async with http.post(COMPLETIONS, json=other) as got:
                    assert got.status == 200
        for prompt in [*prompts[1:], prompts[0]]:
            await proxy.post(asked(path, prompt, stream=stream), path)
        *again, last = (await proxy.records(10))[5:]
        assert again[0]["hit_tokens"] > 0
        assert [r["cached_tokens"] for r in (*again, last)] == [0] * 5
        assert last["hit_tokens"] == 0


async def test_several_answers_say_nothing_of_the_cache(tmp_path: Path) -> None:
    """They read it in other ways than one does."""
    usage = {"prompt_tokens": 1500, "completion_tokens": 9} | {
        "prompt_tokens_details": {"cached_tokens": 0}
    }
    answer = says(plain(orjson.dumps({"choices": [], "usage": usage})))
    first, second = (asked(CHAT, words(600, seed), stream=False) for seed in "ab")
    async with fed(tmp_path, answer) as (proxy, _):
        for body in (first, second, second | {"n": 2}, first):
            await proxy.post(body)
        *_, odd, last = await proxy.records(4)
        assert odd["hit_tokens"] > odd["cached_tokens"] == 0
        assert last["hit_tokens"] > 0


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_prompts_are_found_by_kv_events(tmp_path: Path, path: str) -> None:
    """From the second turn on, with what others have sent in between."""
    turns: list[dict[str, str]] = []
    async with followed(tmp_path) as (proxy, fleet):
        (engine,) = fleet.engines
        for turn in range(4):
            turns.append({"role": "user", "content": words(150, f"t{turn}x")})
            name = {"X-Session-ID": "s"}
            answer = await proxy.post(asked(path, turns, stream=False), path, headers=name)
            told = answer.json
            content = told["content"] if path == MESSAGES else told["output"][0]["content"]
            turns.append({"role": "assistant", "content": content[0]["text"]})
            await known(proxy, engine)
        first, *later = await proxy.records(4)
    assert first["cached_tokens"] == 0
    assert all(r["cached_tokens"] > 0 for r in later)
    assert [r["hit_tokens"] - r["cached_tokens"] for r in later] == [0] * 3


async def test_what_continues_a_stored_response_teaches_nothing(tmp_path: Path) -> None:
    """Its prompt is the whole conversation, which only the engine knows."""
    async with proxied(tmp_path, 1) as (proxy, _):
        first = asked(RESPONSES, words(300), stream=False)
        made = (await proxy.post(first, RESPONSES)).json["id"]
        known_ratio = proxy.router.known.bytes_per_token.of("sim-8b")
        more = asked(RESPONSES, words(20), stream=False) | {"previous_response_id": made}
        for _ in range(5):
            assert (await proxy.post(more, RESPONSES)).status == 200
        assert proxy.router.known.bytes_per_token.of("sim-8b") == known_ratio
        last = (await proxy.records(6))[-1]
        assert last["prompt_tokens"] > 300  # the log has it


async def test_a_stored_response_that_is_read_counts_no_tokens(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        made = (await proxy.post(asked(RESPONSES, "hi", stream=False), RESPONSES)).json["id"]
        async with proxy.http.get(f"{RESPONSES}/{made}") as again:
            assert (await again.json())["usage"]["input_tokens"] > 0
        _, read = await proxy.records(2)
        assert (read["prompt_tokens"], read["osl_tokens"]) == (None, None)


START = sse("message_start", message={"id": "m", "usage": {"input_tokens": 90, "output_tokens": 1,
            "cache_read_input_tokens": 60, "cache_creation_input_tokens": 10}})  # fmt: skip
SAID = sse("content_block_delta", index=0, delta={"type": "text_delta", "text": "hi"})
PING = sse("ping")
STOP = sse("message_stop")
CREATED = sse("response.created", response={"id": "r", "usage": None}, sequence_number=0)
TEXT = sse("response.output_text.delta", delta="hi", sequence_number=1)


def completed(**usage: Any) -> bytes:
    response = {"id": "r", "tools": [{"usage": {"input_tokens": 1}}], "usage": usage, "user": None}
    return sse("response.completed", response=response, sequence_number=2)


@pytest.mark.parametrize(
    ("path", "stream", "counts"),
    [
        # Anthropic's own servers tell the prompt at the start, the output at the end.
        (MESSAGES, START + SAID + sse("message_delta", delta={}, usage={"output_tokens": 7}) + STOP,
         (160, 60, 7)),
        (MESSAGES, PING + START + PING + SAID
         + sse("message_delta", delta={}, usage={"output_tokens": 7, "input_tokens": None}) + PING
         + STOP, (160, 60, 7)),
        # vLLM's later versions tell all of it at the end; without details the cache is unknown.
        (MESSAGES, START + SAID + sse("message_delta", delta={}, usage={
            "input_tokens": 5, "output_tokens": 7, "cache_creation_input_tokens": 5,
            "cache_read_input_tokens": 32}) + STOP, (42, 32, 7)),
        (MESSAGES, START + SAID + sse("message_delta", delta={},
         usage={"input_tokens": 42, "output_tokens": 7}) + STOP + DONE, (42, None, 7)),
        (MESSAGES, START + SAID + sse("message_delta", delta={}, usage={
            "input_tokens": 5, "output_tokens": 7, "cache_read_input_tokens": "many"}) + STOP,
         (160, 60, 7)),
        (RESPONSES, CREATED + TEXT + completed(input_tokens=42, output_tokens=7,
         input_tokens_details={"cached_tokens": 32}), (42, 32, 7)),
        (RESPONSES, CREATED + TEXT + completed(input_tokens=42, output_tokens=7) + DONE,
         (42, None, 7)),
        # Turns of built-in tools: the prompt that the request has is the first one's.
        (RESPONSES, CREATED + TEXT + completed(input_tokens=100, output_tokens=7,
         input_tokens_details={"cached_tokens": 80, "input_tokens_per_turn": [40, 60],
                               "cached_tokens_per_turn": [32, 48]}), (40, 32, 7)),
        (RESPONSES, CREATED + TEXT + completed(input_tokens=-1, output_tokens=True),
         (None, None, None)),
    ],
)  # fmt: skip
async def test_each_way_to_tell_tokens(
    tmp_path: Path, path: str, stream: bytes, counts: tuple[int | None, ...]
) -> None:
    script = says(STREAM_HEAD + chunk(stream) + END)
    async with fed(tmp_path, script) as (proxy, _):
        answer = await proxy.post(asked(path, "x", stream=True), path)
        assert answer.body == stream
        (record,) = await proxy.records(1)
        told = [record[f"{what}_tokens"] for what in ("prompt", "cached", "osl")]
        assert (record["outcome"], tuple(told)) == ("ok", counts)


# Where streams end


OVERLOADED = sse("error", error={"type": "overloaded_error", "message": "Overloaded"})
FAILED = sse("response.failed", response={"status": "failed", "tools": ["x" * 20_000],
             "error": {"code": "server_error", "message": "died"}})  # fmt: skip


@pytest.mark.parametrize(
    ("path", "events"),
    [
        ("/v1/audio/speech", sse(None, type="speech.audio.done")),
        ("/v1/images/generations", sse("image_generation.completed", b64_json="AAAA")),
        ("/v1/audio/transcriptions", sse(None, type="transcript.text.done", text="hello")),
        ("/v1/audio/translations", sse(None, choices=[{"delta": {"content": "hi"}}]) + DONE),
        ("/custom/stream", b"data: a\n\ndata: b"),
        ("/custom/stream", b"data: a\r\n\r\n: bye"),
        ("/custom/stream", b'data: {"a":1}'),
        ("/custom/stream", DONE + b"data: more\n\n"),
        ("/custom/stream", b"no events\nat all"),
    ],
)
@pytest.mark.parametrize("framing", ["chunks", "length", "close"])
async def test_a_stream_of_an_unknown_kind_ends_with_its_body(
    tmp_path: Path, path: str, events: bytes, framing: str
) -> None:
    said = sse(None, type="x", n=1) + events
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    wire = {
        "chunks": STREAM_HEAD + chunk(said[:9]) + chunk(said[9:]) + END,
        "length": head + b"Content-Length: %d\r\n\r\n" % len(said) + said,
        "close": head + b"\r\n" + said,
    }[framing]
    extra = ("/v1/audio/speech", "/v1/images/*", "/custom/stream")
    script = says(wire, close=framing == "close")
    async with fed(tmp_path, script, extra_paths=extra) as (proxy, _):
        assert (await proxy.post({"model": "sim-8b", "stream": True}, path)).body == said
        (record,) = await proxy.records(1)
        assert (record["outcome"], last_error(proxy)) == ("ok", None)


@pytest.mark.parametrize("said", [b"", b'{"a":1}\n{"a":2}\n', b": no event\n"])
async def test_a_stream_of_an_unknown_kind_may_have_no_event(tmp_path: Path, said: bytes) -> None:
    wire = STREAM_HEAD + (chunk(said) if said else b"") + END
    async with fed(tmp_path, says(wire), extra_paths=("/s",)) as (proxy, _):
        assert (await proxy.post({"stream": True}, "/s?a=1")).body == said
        (record,) = await proxy.records(1)
        assert (record["outcome"], last_error(proxy)) == ("ok", None)


@pytest.mark.parametrize("framing", ["chunks", "length"])
async def test_a_stream_of_an_unknown_kind_that_breaks_is_broken(
    tmp_path: Path, framing: str
) -> None:
    said = sse(None, type="x")
    head = STREAM_HEAD + chunk(said)
    if framing == "length":
        head = STREAM_HEAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: 999") + said
    async with fed(tmp_path, resets(head), extra_paths=("/s",)) as (proxy, _):
        with pytest.raises(aiohttp.ClientPayloadError):
            await proxy.post({"stream": True}, "/s")
        (record,) = await proxy.records(1)
        assert record["outcome"] == "upstream_truncated"


@pytest.mark.parametrize("rest", [b'data: {"a": "hal', b"event: x\ndata: [1, 2", b'data:{"a":1'])
async def test_a_connection_that_ends_within_an_event_was_cut(tmp_path: Path, rest: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    script = says(head + sse(None, type="x") + rest, close=True)
    async with fed(tmp_path, script, extra_paths=("/s",)) as (proxy, _):
        with pytest.raises(aiohttp.ClientPayloadError):
            await proxy.post({"stream": True}, "/s")
        (record,) = await proxy.records(1)
        assert record["outcome"] == "upstream_truncated"


ERROR = sse(None, error={"message": "KV load failed", "type": "InternalServerError", "code": 500})
CHUNK = sse(None, choices=[{"index": 0, "delta": {"content": "hi"}}])


@pytest.mark.parametrize(
    ("path", "stream", "is_blamed"),
    [
        (MESSAGES, START + OVERLOADED, False),
        (MESSAGES, START + SAID + OVERLOADED, False),
        (MESSAGES, START + SAID + OVERLOADED.replace(b": ", b":", 1), False),
        (MESSAGES, START + SAID + OVERLOADED + DONE, False),
        (MESSAGES, START + SAID + sse("error", error={"type": "api_error", "message": "x"}), True),
        (MESSAGES, START + SAID + sse("error", error={"type": "internal_error"}), True),
        (MESSAGES, START + SAID + sse("error", error={"type": "invalid_request_error"}), False),
        (RESPONSES, CREATED + TEXT + sse("error", code="server_error", message="x"), True),
        (RESPONSES, CREATED + TEXT + sse("error", code="invalid_prompt", message="x"), False),
        (RESPONSES, CREATED + TEXT + sse("error", error={"code": 500, "message": "x"}), True),
        (RESPONSES, CREATED + FAILED, True),
        (RESPONSES, CREATED + TEXT + ERROR, True),
        (RESPONSES, CREATED + FAILED.partition(b"\n")[2], True),
        (CHAT, CHUNK + ERROR, True),
        (COMPLETIONS, CHUNK + ERROR.replace(b"500", b"400"), False),
    ],
)
@pytest.mark.parametrize("how", ["ends", "resets", "stalls"])
async def test_an_error_of_the_engine_ends_a_stream(
    tmp_path: Path, path: str, stream: bytes, is_blamed: bool, how: str
) -> None:
    """It passes as it came and nothing is added to it, whatever the engine does then."""
    wire = STREAM_HEAD + chunk(stream)
    script = {"ends": says(wire + END), "resets": resets(wire), "stalls": stalls(wire)}[how]
    async with fed(tmp_path, script, idle_timeout=0.3) as (proxy, _):
        answer = await proxy.post(asked(path, "x", stream=True), path)
        assert answer.body == stream
        (record,) = await proxy.records(1)
        assert (record["outcome"], record["status"]) == ("upstream_error", 200)
        assert (last_error(proxy) is not None) == is_blamed


@pytest.mark.parametrize(
    ("path", "end"),
    [(MESSAGES, START + SAID + OVERLOADED), (RESPONSES, CREATED + TEXT + FAILED)],
)
async def test_no_heartbeat_follows_a_streams_end(
    tmp_path: Path, path: str, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "GRACE_S", 0.2)
    script = stalls(STREAM_HEAD + chunk(end))
    async with fed(tmp_path, script, heartbeat_interval=0.05) as (proxy, _):
        assert (await proxy.post(asked(path, "x", stream=True), path)).body == end


async def opened(proxy: ServedProxy, path: str) -> tuple[asyncio.StreamReader, Any]:
    """A request on a connection of its own, whose answer is read here."""
    host, port = proxy.server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    body = orjson.dumps(asked(path, words(200), stream=True))
    head = f"POST {path} HTTP/1.1\r\nHost: p\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


DELTA = sse("message_delta", delta={}, usage={"input_tokens": 420, "output_tokens": 7})
COMPLETED = completed(input_tokens=420, output_tokens=7)
CHAT_USAGE = sse(None, choices=[], usage={"prompt_tokens": 420, "completion_tokens": 7})
WHOLE = [
    (MESSAGES, START + SAID + DELTA + STOP, b"message_stop"),
    (RESPONSES, CREATED + TEXT + COMPLETED, b"response.completed"),
    (RESPONSES, CREATED + TEXT + COMPLETED.partition(b"\n")[2], b"response.completed"),
    (RESPONSES, CREATED + TEXT + COMPLETED.replace(b"completed", b"incomplete"), b"incomplete"),
    (CHAT, CHUNK + CHAT_USAGE + DONE, b"[DONE]"),
]


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize(("path", "stream", "end"), WHOLE)
async def test_who_leaves_with_the_end_of_the_stream_has_all_of_it(
    tmp_path: Path, path: str, stream: bytes, end: bytes, how: str
) -> None:
    """As Codex does at response.completed, before the engine has ended the answer."""
    script = stalls(STREAM_HEAD + chunk(stream))
    async with fed(tmp_path, script) as (proxy, _):
        reader, writer = await opened(proxy, path)
        await reader.readuntil(end)
        await reader.readuntil(b"\n\n")
        writer.transport.abort() if how == "RST" else writer.close()
        (record,) = await proxy.records(1)
        told = [record[name] for name in ("outcome", "status", "prompt_tokens", "osl_tokens")]
        assert told == ["ok", 200, 420, 7]
        assert proxy.metric("client_disconnects_total", phase="decode") == 0
        assert proxy.router.known.bytes_per_token.of("sim-8b") != BYTES_PER_TOKEN_PRIOR


@pytest.mark.parametrize(
    ("path", "stream"),
    [(MESSAGES, START + SAID + DELTA), (RESPONSES, CREATED + TEXT), (CHAT, CHUNK + CHAT_USAGE)],
)
async def test_who_leaves_before_it_has_left(tmp_path: Path, path: str, stream: bytes) -> None:
    async with fed(tmp_path, stalls(STREAM_HEAD + chunk(stream))) as (proxy, _):
        reader, writer = await opened(proxy, path)
        await reader.readuntil(stream[-20:])
        writer.close()
        (record,) = await proxy.records(1)
        assert (record["outcome"], record["status"]) == ("client_gone", 499)


async def test_an_end_that_its_client_never_took_is_none(tmp_path: Path) -> None:
    """It was written, but the client reads nothing, and its socket is full."""
    long = sse("response.output_text.delta", delta="x" * (1 << 20), sequence_number=1)
    wire = STREAM_HEAD + chunk(CREATED) + chunk(long) * 12 + chunk(COMPLETED)
    async with fed(tmp_path, stalls(wire)) as (proxy, _):
        reader, writer = await opened(proxy, RESPONSES)
        await reader.readuntil(b"response.created")
        writer.transport.pause_reading()
        (client,) = proxy.listener.connections
        await until(lambda: client.transport.get_write_buffer_size() > 0, "its socket is full")
        writer.transport.abort()
        (record,) = await proxy.records(1)
        assert record["outcome"] == "client_gone"


async def test_an_error_that_its_client_leaves_with_is_the_engines(tmp_path: Path) -> None:
    async with fed(tmp_path, stalls(STREAM_HEAD + chunk(START + OVERLOADED))) as (proxy, _):
        reader, writer = await opened(proxy, MESSAGES)
        await reader.readuntil(b"Overloaded")
        await reader.readuntil(b"\n\n")
        writer.close()
        (record,) = await proxy.records(1)
        assert (record["outcome"], record["status"]) == ("upstream_error", 200)


# What the proxy says itself


async def errors_of(proxy: ServedProxy, path: str, key: dict[str, str]) -> dict[int, list[Answer]]:
    """The proxy's own errors on a path, by status."""
    body = asked(path, "hi", stream=False)
    answers = [
        await proxy.post(b"{", path, headers=key),
        await proxy.post(body | {"messages": 7} if path == CHAT else b'{"a":', path, headers=key),
        await proxy.post(body, path),
        await proxy.post(body | {"x": "y" * 80_000}, path, headers=key),
        await proxy.post(body, path, headers=key | {"Content-Encoding": "br"}),
        await proxy.post(body, f"{path}/no/such", headers=key),
    ]
    for method in ("GET", "DELETE", "OPTIONS"):
        async with proxy.http.request(method, path, headers=key) as got:
            answers.append(Answer(got.status, got.headers, await got.read()))
    found: dict[int, list[Answer]] = {}
    for answer in answers:
        found.setdefault(answer.status, []).append(answer)
    return found


TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
}


@pytest.mark.parametrize("path", [MESSAGES, COUNT, RESPONSES, CHAT])
async def test_own_errors_have_the_form_of_the_path(tmp_path: Path, path: str) -> None:
    options: dict[str, Any] = {"api_key": "team:secret-key", "max_body_bytes": 1 << 16}
    async with proxied(tmp_path, 1, **options) as (proxy, _):
        found = await errors_of(proxy, path, {"Authorization": "Bearer secret-key"})
        assert found.keys() >= {400, 401, 405, 413, 415}
        for status, answers in found.items():
            for answer in answers:
                told = answer.json
                if path in (MESSAGES, COUNT):
                    assert (told["type"], told["error"]["type"]) == ("error", TYPES[status])
                else:
                    assert told.keys() == {"error"}
                    assert told["error"].keys() == {"message", "type", "param", "code"}
                assert isinstance(told["error"]["message"], str)


@pytest.mark.parametrize("status", [503, 529])
async def test_a_refusal_for_load_has_the_form_of_the_path(tmp_path: Path, status: int) -> None:
    options = {"active_prefill_tokens_threshold": 0, "max_queue": 0, "overload_status": status}
    async with fed(tmp_path, stalls(), **options) as (proxy, engine):
        taken = asyncio.create_task(proxy.post(asked(CHAT, words(500), stream=True)))
        await until(lambda: engine.posts, "the instance is busy")
        message = await proxy.post(asked(MESSAGES, "x", stream=False), MESSAGES)
        response = await proxy.post(asked(RESPONSES, "x", stream=False), RESPONSES)
        taken.cancel()
    assert (message.status, message.json["error"]["type"]) == (status, "overloaded_error")
    assert message.json["type"] == "error"
    assert "Retry-After" in message.headers
    assert response.json.keys() == {"message", "type", "code", "error"}


@pytest.mark.parametrize(
    ("script", "status", "kind", "said"),
    [
        (says(plain(b'{"error":{"message":"it broke","code":500}}', "500 Oops")), 500, "api_error",
         "it broke"),
        (says(plain(b"<html>", "502 Bad")), 502, "api_error", "upstream: status 502"),
        (says(plain(b'{"object":"error","message":"full"}', "503 Busy")), 503, "overloaded_error",
         "full"),
        (says(plain(b'{"type":"error","error":{"type":"api_error","message":"own"}}', "500 O")),
         500, "api_error", "own"),
        (resets(), 502, "api_error", None),
        (says(STREAM_HEAD + chunk(OVERLOADED) + END), 529, "overloaded_error", "Overloaded"),
    ],
)  # fmt: skip
async def test_what_instances_failed_with_has_anthropics_form(
    tmp_path: Path, script: Script, status: int, kind: str, said: str | None
) -> None:
    async with fed(tmp_path, script, max_queue=0) as (proxy, _):
        answer = await proxy.post(asked(MESSAGES, "x", stream=True), MESSAGES)
        told = answer.json
        assert (answer.status, told["type"], told["error"]["type"]) == (status, "error", kind)
        assert said is None or told["error"]["message"] == said


async def test_malformed_requests_to_a_known_path_get_its_form(tmp_path: Path) -> None:
    bad = (
        b"POST /v1/messages?beta=true HTTP/1.1\r\nHost: p\r\nExpect: x\r\nContent-Length: 2\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: a b\r\nContent-Length: 0\r\n",
    )
    async with fed(tmp_path, says(plain(b"{}"))) as (proxy, _):
        host, port = proxy.server.url.removeprefix("http://").split(":")
        forms = []
        for raw in bad:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(raw + b"\r\n")
            await reader.readuntil(b"\r\n\r\n")
            body = await reader.readuntil(b"}}")
            forms.append(orjson.loads(body).get("type"))
            writer.close()
        assert forms == ["error", "error"]


# Silence


def dispatched_at_blank_lines(body: bytes) -> list[Any]:
    """The events as openai-go before 3.43 has them: each blank line dispatches what there is."""
    found: list[Any] = []
    data: list[str] = []
    for line in body.decode().splitlines():
        if not line:
            text, data = "\n".join(data), []
            found.append(text if text == "[DONE]" else orjson.loads(text))
        elif line.startswith("data:"):
            data.append(line[5:].strip())
    return found


def split_at_blank_lines(body: bytes) -> list[Any]:
    """The events as clients have them that split at blank lines and look how a part begins."""
    parts = [part for part in body.decode().split("\n\n") if part]
    parts = [part.partition("\n")[2] if part.startswith("event:") else part for part in parts]
    datas = [part[6:] for part in parts if part.startswith("data: ")]
    return [data if data == "[DONE]" else orjson.loads(data) for data in datas]


HEAD = {"id": "c1", "object": "chat.completion.chunk", "created": 7, "model": "sim-8b"}
ROLE = sse(None, **HEAD, choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
CALL = sse(None, **HEAD, choices=[{"index": 0, "delta": {"tool_calls": [
    {"index": 0, "id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    "finish_reason": "tool_calls"}])  # fmt: skip
PIECE = sse(None, **HEAD | {"object": "text_completion"}, choices=[{"index": 0, "text": "a"}])
SILENT = [
    (CHAT, ROLE, CALL + DONE),
    (CHAT, sse(None, choices=[{"index": 0, "delta": {"content": "x"}}]), CALL + DONE),
    (COMPLETIONS, PIECE, PIECE + DONE),
    (MESSAGES, START + SAID, SAID + DELTA + STOP),
    (RESPONSES, CREATED + TEXT, COMPLETED),
]


def silent(first: bytes, then: bytes, go: asyncio.Event) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await apart(writer, [STREAM_HEAD + chunk(first)], 0)
        await go.wait()
        writer.write(chunk(then) + END)

    return script


@pytest.mark.parametrize(("path", "first", "then"), SILENT)
async def test_a_silence_is_bridged_for_every_kind_of_client(
    tmp_path: Path, path: str, first: bytes, then: bytes
) -> None:
    go = asyncio.Event()
    async with fed(tmp_path, silent(first, then, go), heartbeat_interval=0.05) as (proxy, _):
        got = b""
        body = asked(path, "x", stream=True)
        async with proxy.http.post(path, json=body) as response:
            while piece := await response.content.readany():
                got += piece
                if len(got) > len(first) + 60:
                    go.set()
    assert got.startswith(first)
    assert got.endswith(then)
    beats = got[len(first) : -len(then)]
    assert beats
    plainly = dispatched_at_blank_lines(first + then)
    harmless = dispatched_at_blank_lines(beats)
    assert dispatched_at_blank_lines(got) == [
        *plainly[: len(plainly) - len(dispatched_at_blank_lines(then))],
        *harmless,
        *dispatched_at_blank_lines(then),
    ]
    real = split_at_blank_lines(first + then)
    assert [event for event in split_at_blank_lines(got) if event != {"type": "ping"}] == real
    for event in harmless:
        if path in (CHAT, COMPLETIONS):
            (choice,) = event["choices"]
            assert (choice["finish_reason"], choice.get("delta", {}), choice.get("text", "")) == (
                None,
                {},
                "",
            )
            shared = HEAD if b'"id"' in first else {}
            assert {key: event[key] for key in shared if key != "object"} == {
                key: value for key, value in shared.items() if key != "object"
            }
        else:
            assert event["type"] == ("ping" if path == MESSAGES else "keepalive")
