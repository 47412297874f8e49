"""What the client gets is what the instance sent; what an instance gets is what the client sent."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import orjson
import pytest

from tests.support.harness import (
    ANSWER,
    STREAM_HEAD,
    RawEngine,
    ServedProxy,
    chat,
    chunk,
    event,
    plain,
    proxied,
    says,
    words,
)


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_a_stream_arrives_byte_for_byte(tmp_path: Path, size: int) -> None:
    """However the instance cuts it into chunks, comments and odd spacing included."""
    said = b": ping\n\n" + b"".join(event(f"w{i}") for i in range(40)) + b"data: [DONE]\n\n"
    pieces = [chunk(said[i : i + size]) for i in range(0, len(said), size)]
    async with RawEngine(says(STREAM_HEAD + b"".join(pieces) + b"0\r\n\r\n")) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            answer = await proxy.post(chat("x"), headers={"X-Request-Id": "same"})
            assert answer.body == said
            assert answer.headers["Content-Type"] == "text/event-stream"
            assert answer.headers["X-Request-Id"] == "same"
            assert answer.headers["X-Cache-Proxy-Route"] == "WARM"
            await proxy.at_rest()


async def test_the_record_of_a_stream(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        await proxy.post(chat("one two three", max_tokens=5), headers={"X-Session-ID": "s"})
        (record,) = await proxy.records(1)
        assert record["outcome"] == "ok"
        assert (record["session_id"], record["turn"], record["stream"]) == ("s", 0, True)
        assert (record["osl_tokens"], record["cached_tokens"]) == (5, 0)
        assert record["t_proxy_recv"] <= record["t_decided"] <= record["t_decode_sent"]
        assert record["t_decode_sent"] < record["t_first_token"] <= record["t_done"]


@pytest.mark.parametrize(("slo_s", "ttft"), [(60.0, "kept"), (1e-6, "missed")])
async def test_goodput_is_counted(tmp_path: Path, slo_s: float, ttft: str) -> None:
    # In the engine's own time: a first token after milliseconds, not within 0.1 ms per new token.
    real_time = {"speed": 1.0}
    async with proxied(tmp_path, 1, sim=real_time, ttft_slo=slo_s, tpot_slo=60.0) as (proxy, _):
        await proxy.post(chat("x"))
        await proxy.post(chat("x", stream=False))
        await proxy.records(2)
        assert proxy.metric("slo_total", ttft=ttft, tpot="kept") == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_without_streaming(tmp_path: Path, path: str) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        body = chat("hello", stream=False) | {"prompt": "hello"}
        answer = await proxy.post(body, path)
        assert answer.status == 200
        assert answer.json["usage"]["completion_tokens"] == 8
        (record,) = await proxy.records(1)
        assert (record["outcome"], record["osl_tokens"]) == ("ok", 8)
        assert record["t_first_token"] is None
        await proxy.at_rest()


async def test_the_second_turn_hits(tmp_path: Path) -> None:
    """Prediction and engine agree to within a block: the token estimate is learned by then."""
    async with proxied(tmp_path, 2, warm_threshold=300) as (proxy, _):
        text = words(3000)
        await proxy.post(chat(text), headers={"X-Session-ID": "s"})
        await proxy.post(chat(text + " and more"), headers={"X-Session-ID": "s"})
        first, second = await proxy.records(2)
        assert first["decode_instance"] == second["decode_instance"]
        assert second["route_class"] == "WARM"
        assert abs(second["cached_tokens"] - second["hit_tokens"]) < 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "sim-8b"}, 400),
        (chat("x", stream=False) | {"stream_options": {"include_usage": True}}, 400),
    ],
)
async def test_an_engines_refusal_passes_unchanged(
    tmp_path: Path, body: dict[str, object], status: int
) -> None:
    async with proxied(tmp_path, 1) as (proxy, fleet):
        answer = await proxy.post(body)
        async with aiohttp.ClientSession() as direct:
            url = fleet.engines[0].url + "/v1/chat/completions"
            async with direct.post(url, json=body) as response:
                assert (answer.status, answer.body) == (response.status, await response.read())
        assert answer.status == status
        (record,) = await proxy.records(1)
        assert record["outcome"] == "bad_request"
        await proxy.at_rest()


@pytest.mark.parametrize(
    ("body", "headers", "status", "words_"),
    [
        (b"{", {}, 400, "not valid JSON"),
        (b"[1]", {}, 400, "must be a JSON object"),
        (b"{}", {"Content-Encoding": "br"}, 415, "identity"),
        (b"{}", {"Content-Encoding": "gzip"}, 400, "not one whole gzip stream"),
        (b"x" * 2000, {}, 413, "--max-body-bytes"),
    ],
)
async def test_bad_requests_are_ours(
    tmp_path: Path, body: bytes, headers: dict[str, str], status: int, words_: str
) -> None:
    async with proxied(tmp_path, 1, max_body_bytes=1024) as (proxy, _):
        answer = await proxy.post(body, headers=headers)
        assert answer.status == status
        assert answer.json["error"]["code"] == status
        assert words_ in answer.json["error"]["message"]
        await proxy.at_rest()


async def test_an_instance_gets_the_clients_own_bytes(tmp_path: Path) -> None:
    """Numbers that a parser would change, key order, white space."""
    raw = b'{ "model":"sim-8b", "seed":123456789012345678901234567890, "temperature":1.0,\n'
    raw += b'"messages":[{"role":"user","content":"\\u00e4"}], "stream":true }'
    async with RawEngine(says(ANSWER)) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            await proxy.post(raw)
            assert engine.posts == [raw]


@pytest.mark.parametrize(
    "key", ['"kv_transfer_params"', '"\\u006bv_transfer_params"', '"kv_transfer\\u005fparams"']
)
async def test_a_clients_kv_transfer_params_never_reach_an_engine(tmp_path: Path, key: str) -> None:
    raw = f'{{"model":"sim-8b",{key}:{{"do_remote_prefill":true}},"messages":[],{key}:1}}'
    async with RawEngine(says(plain(b"{}"))) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            await proxy.post(raw.encode())
            assert orjson.loads(engine.posts[0]) == {"model": "sim-8b", "messages": []}


async def test_nor_among_the_arguments_of_plug_ins(tmp_path: Path) -> None:
    """vLLM takes the field from there too, as text, and answers 500: every retry would."""
    hidden = b'"vllm_xargs":{"a":[1],"kv_transfer_params":"x"}'
    async with RawEngine(says(plain(b"{}"))) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            await proxy.post(b'{"model":"sim-8b","messages":[],' + hidden + b"}")
            asked = orjson.loads(engine.posts[0])
            assert asked == {"model": "sim-8b", "messages": [], "vllm_xargs": {"a": [1]}}


async def test_other_paths_are_routed_and_unknown_ones_refused(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        tokens = await proxy.post({"model": "sim-8b", "prompt": "a b c"}, "/tokenize")
        assert tokens.json["count"] == 3
        for path in ("/reset_prefix_cache", "/sleep", "/x"):
            answer = await proxy.post({}, path)
            assert (answer.status, answer.json["error"]["code"]) == (404, 404)
        await proxy.at_rest()
