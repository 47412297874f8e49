"""The HTTP face: what a client of vLLM relies on, over real sockets."""

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest
from openai import AsyncOpenAI, NotFoundError

from replayer.simulator.host import SimEngine, SimFleet

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "one two three " * 30}]


@pytest.fixture
async def fleet():
    """What is pinned stays so for 20 s, far longer than any test needs to fetch it."""
    async with SimFleet(2, speed=50.0, abort_timeout=1000.0) as fleet:
        yield fleet


@pytest.fixture
async def engine(fleet):
    return fleet.engines[0]


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


async def _post(http: aiohttp.ClientSession, engine: SimEngine, path: str, **body: Any):
    async with http.post(engine.url + path, data=orjson.dumps(body)) as answer:
        return answer.status, orjson.loads(await answer.read())


async def _events(http: aiohttp.ClientSession, engine: SimEngine, path: str, **body: Any):
    body["stream"] = True
    async with http.post(engine.url + path, data=orjson.dumps(body)) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        raw = await answer.read()
    *events, done, rest = raw.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events]


async def _until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def _idle(engine: SimEngine) -> bool:
    stats = engine.stats()
    return not (stats["running"] or stats["waiting"] or stats["fetching"] or stats["kv_usage"])


def _leg(transfer_id: str = "x1") -> dict[str, Any]:
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    return {"messages": MESSAGES, "max_tokens": 1, "kv_transfer_params": params}


def _decode(sender: SimEngine, transfer_id: str = "x1", **more: Any) -> dict[str, Any]:
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": sender.bootstrap_url,
        "remote_engine_id": sender.engine_id,
        "transfer_id": transfer_id,
    }
    return {"messages": MESSAGES, "max_tokens": 5, "kv_transfer_params": params | more}


async def test_whole_chat(http, engine):
    status, body = await _post(http, engine, CHAT, messages=MESSAGES, max_tokens=12)
    assert status == 200
    (choice,) = body["choices"]
    assert len(choice["message"]["content"].split(" ")) == 12
    assert choice["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 95,
        "total_tokens": 107,
        "completion_tokens": 12,
        "prompt_tokens_details": {
            "cached_tokens": 0,
            "created_cache_tokens": 80,
            "multimodal_tokens": None,
        },
        "completion_tokens_details": None,
    }
    assert body["kv_transfer_params"] is None


async def test_streamed_chat_begins_with_the_role_and_ends_with_usage(http, engine):
    _status, whole = await _post(http, engine, CHAT, messages=MESSAGES, max_tokens=40)
    role, *content, usage = await _events(
        http,
        engine,
        CHAT,
        messages=MESSAGES,
        max_completion_tokens=40,
        stream_options={"include_usage": True},
    )
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(event["choices"][0]["delta"]["content"] for event in content)
    assert text == whole["choices"][0]["message"]["content"]
    finishes = [event["choices"][0]["finish_reason"] for event in content]
    assert finishes == [None] * (len(content) - 1) + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 40
    assert usage["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 80,
        "created_cache_tokens": 0,
    }


async def test_no_usage_chunk_unless_asked_for(http, engine):
    events = await _events(http, engine, TEXT, prompt="a b c", max_tokens=3)
    assert all(event["choices"] and "usage" not in event for event in events)
    assert "".join(event["choices"][0]["text"] for event in events).count(" ") == 3


async def test_completions_default_to_sixteen_tokens_and_take_ids(http, engine):
    _status, by_text = await _post(http, engine, TEXT, prompt="a b c", return_token_ids=True)
    (choice,) = by_text["choices"]
    assert len(choice["token_ids"]) == 16
    _status, by_ids = await _post(http, engine, TEXT, prompt=choice["prompt_token_ids"])
    assert by_ids["choices"][0]["text"] == choice["text"]
    head = choice["prompt_token_ids"] + choice["token_ids"][:6]
    _status, rest = await _post(http, engine, TEXT, prompt=head, max_tokens=10)
    assert choice["text"].endswith(rest["choices"][0]["text"])


async def test_the_next_turn_hits_the_answer_of_the_last(http, engine):
    _status, first = await _post(http, engine, CHAT, messages=MESSAGES, max_tokens=100)
    answer = first["choices"][0]["message"]
    turn = [*MESSAGES, answer, {"role": "user", "content": "go on"}]
    _status, second = await _post(http, engine, CHAT, messages=turn, max_tokens=1)
    # 95 prompt and 99 generated tokens have KV: twelve blocks of 16.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 192


async def test_several_prompts_and_several_choices(http, engine):
    _status, body = await _post(http, engine, TEXT, prompt=["a b", "c d e"], n=2, max_tokens=4)
    texts = [choice["text"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (5, 16)
    events = await _events(http, engine, TEXT, prompt=["a b", "c d e"], max_tokens=4)
    streamed = ["", ""]
    for event in events:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == [texts[0], texts[2]]


async def test_outputs_without_a_limit_end_by_themselves(http, engine):
    _status, body = await _post(http, engine, CHAT, messages=MESSAGES)
    assert body["choices"][0]["finish_reason"] == "stop"
    _status, again = await _post(http, engine, CHAT, messages=MESSAGES, min_tokens=2_000)
    assert again["usage"]["completion_tokens"] > 2_000


async def test_request_ids_are_echoed(http, engine):
    headers = {"X-Request-Id": "abc"}
    for path, body, expected in (
        (CHAT, {"messages": MESSAGES, "max_tokens": 1}, "chatcmpl-abc"),
        (TEXT, {"prompt": "a", "max_tokens": 1}, "cmpl-abc"),
    ):
        async with http.post(engine.url + path, json=body, headers=headers) as answer:
            assert answer.headers["X-Request-Id"] == "abc"
            assert (await answer.json())["id"] == expected


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (CHAT, {"model": "zz", "messages": MESSAGES}, 404, "model"),
        (CHAT, {}, 400, "body.messages"),
        (CHAT, {"messages": [{"content": "x"}]}, 400, "body.messages.role"),
        (CHAT, {"messages": MESSAGES, "stream_options": {}}, 400, "stream_options"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_tokens": "one"}, 400, "body.max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 131_073}, 400, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 1, "min_tokens": 5}, 400, None),
        (CHAT, {"messages": MESSAGES, "stream": "maybe"}, 400, "body.stream"),
        (CHAT, {"messages": MESSAGES, "kv_transfer_params": 7}, 400, "body.kv_transfer_params"),
        (CHAT, {"messages": MESSAGES, "n": 1_000}, 400, "n"),
        (TEXT, {"prompt": ""}, 400, "prompt"),
        (TEXT, {"prompt": {}}, 400, "body.prompt"),
        (TEXT, {"prompt": [-1]}, 400, "prompt"),
        (TEXT, {"prompt": "w " * 131_072}, 400, "input_tokens"),
    ],
)
async def test_errors_have_vllms_shape(http, engine, path, body, status, param):
    found, answer = await _post(http, engine, path, **body)
    assert found == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, status)


async def test_bodies_that_are_no_objects_and_unknown_paths(http, engine):
    for raw in (b"{", b"[]"):
        async with http.post(engine.url + CHAT, data=raw) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["type"] == "Bad Request"
    async with http.get(engine.url + "/nothing") as answer:
        assert (answer.status, await answer.json()) == (404, {"detail": "Not Found"})
    async with http.get(engine.url + CHAT) as answer:
        assert answer.status == 405


async def test_prompt_and_limit_beyond_the_context_are_clamped(http):
    async with SimFleet(1, speed=50.0, max_model_len=64) as fleet:
        body = {"prompt": "w " * 60, "max_tokens": 64}
        status, answer = await _post(http, fleet.engines[0], TEXT, **body)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)


async def test_small_endpoints(http, engine):
    async with http.get(engine.url + "/v1/models") as answer:
        (card,) = (await answer.json())["data"]
    assert (card["id"], card["max_model_len"]) == ("sim-8b", 131_072)
    async with http.get(engine.url + "/health") as answer:
        assert (answer.status, await answer.read()) == (200, b"")
    async with http.get(engine.url + "/version") as answer:
        assert "version" in await answer.json()
    _status, counted = await _post(http, engine, "/tokenize", messages=MESSAGES)
    assert counted["count"] == len(counted["tokens"]) == 95
    _status, text = await _post(http, engine, "/detokenize", tokens=[0, 1])
    assert len(text["prompt"].split()) == 2


async def test_a_full_queue_answers_503_without_retry_after(http):
    options: dict[str, Any] = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
    async with SimFleet(1, **options) as fleet, asyncio.TaskGroup() as tasks:
        (engine,) = fleet.engines
        body = {"prompt": "a", "max_tokens": 10_000}
        first = tasks.create_task(_post(http, engine, TEXT, **body))
        await _until(lambda: engine.stats()["running"] == 1)
        second = tasks.create_task(_post(http, engine, TEXT, **body))
        await _until(lambda: engine.stats()["waiting"] == 1)
        async with http.post(engine.url + TEXT, json=body) as answer:
            assert answer.status == 503
            assert "Retry-After" not in answer.headers
            error = (await answer.json())["error"]
        assert error["type"] == "Service Unavailable"
        assert error["message"].startswith("The engine is currently busy")
        assert engine.stats()["rejected"] == 1
        first.cancel()
        second.cancel()
        await _until(lambda: _idle(engine))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(http, engine, stream):
    body = {"prompt": "a b c", "max_tokens": 100_000, "stream": stream}
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(http.post(engine.url + TEXT, json=body))
        await _until(lambda: engine.stats()["running"] == 1)
        if stream:
            (await call).close()
        else:
            call.cancel()
        await _until(lambda: _idle(engine))
    assert engine.stats()["aborted"] == 1


async def test_headers_of_a_stream_come_before_the_first_token(http):
    async with SimFleet(1, a0=1_000.0) as fleet:
        body = {"prompt": "a", "max_tokens": 1, "stream": True}
        async with http.post(fleet.engines[0].url + TEXT, json=body) as answer:
            assert answer.status == 200
            assert fleet.engines[0].stats()["generated_tokens"] == 0


async def test_an_offload_gives_the_same_answer_and_moves_the_prompt_once(http, fleet):
    p, d = fleet.engines
    _status, leg = await _post(http, p, CHAT, **_leg())
    assert leg["choices"][0]["finish_reason"] == "length"
    assert p.stats()["pinned"] == 1
    _status, there = await _post(http, d, CHAT, **_decode(p))
    _status, local = await _post(http, p, CHAT, messages=MESSAGES, max_tokens=5)
    assert there["choices"] == local["choices"]
    assert there["usage"]["prompt_tokens_details"]["cached_tokens"] == 95
    assert local["usage"]["prompt_tokens_details"]["cached_tokens"] == 80
    assert p.stats()["bytes_sent"] == 95 * 131_072
    assert d.stats()["prompt_external_tokens"] == 95
    assert _idle(p)
    assert _idle(d)
    sent, received, _own = fleet.records
    assert (sent["sent_tokens"], received["external_tokens"]) == (95, 95)
    assert sent["transfer_id"] == received["transfer_id"] == "x1"


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_engine_id": "another"},
        {"remote_bootstrap_addr": "http://127.0.0.1:1"},
        {"remote_bootstrap_addr": "nonsense"},
        {"transfer_id": None},
    ],
)
async def test_what_cannot_be_fetched_is_computed_at_once(http, fleet, wrong):
    p, d = fleet.engines
    status, body = await _post(http, d, CHAT, **_decode(p, **wrong))
    assert (status, body["usage"]["prompt_tokens_details"]["cached_tokens"]) == (200, 0)
    assert d.stats()["prompt_computed_tokens"] == 95


async def test_the_fail_policy_is_an_error_of_the_request(http):
    async with SimFleet(2, speed=50.0, kv_load_failure_policy="fail") as fleet:
        p, d = fleet.engines
        body = _decode(p, remote_engine_id="another")
        status, answer = await _post(http, d, CHAT, **body)
        assert (status, answer["error"]["code"]) == (500, 500)
        (event,) = await _events(http, d, CHAT, **body)
        assert event["error"]["code"] == 500


async def test_an_engine_refuses_to_fetch_from_itself(http, engine):
    status, answer = await _post(http, engine, CHAT, **_decode(engine))
    assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")


async def test_a_rejected_decode_leg_lets_the_sender_go(http, fleet):
    p, d = fleet.engines
    await _post(http, p, CHAT, **_leg())
    status, _body = await _post(http, d, CHAT, model="unknown", **_decode(p))
    assert status == 404
    await _until(lambda: _idle(p))
    assert p.stats()["pinned"] == 0


async def test_a_restarted_engine_has_a_new_id_and_an_empty_cache(http, fleet):
    p, d = fleet.engines
    await _post(http, p, CHAT, **_leg())
    stale, url = _decode(p), p.url
    await p.restart()
    assert p.url == url
    assert p.engine_id != stale["kv_transfer_params"]["remote_engine_id"]
    async with http.get(p.bootstrap_url + "/query") as answer:
        ranks = await answer.json()
    assert ranks["0"]["engine_id"] == p.engine_id
    _status, body = await _post(http, d, CHAT, **stale)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert p.stats()["finished"] == 0


async def test_a_sender_killed_after_first_contact_makes_the_receiver_wait(http):
    async with SimFleet(2, speed=50.0, abort_timeout=50.0) as fleet:
        p, d = fleet.engines
        await _post(http, p, CHAT, **_leg("x0"))
        await _post(http, d, CHAT, **_decode(p, "x0"))
        body = _decode(p, "x2")
        body["messages"] = [{"role": "user", "content": "other " * 100}]
        await p.kill()
        _status, answer = await _post(http, d, CHAT, **body)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        last = fleet.records[-1]
        waited_s = (last["t_first_token"] - last["t_arrived"]) * fleet.options.speed
        assert waited_s > 50.0 + 60.0


async def test_a_killed_engine_cuts_its_streams(http, engine):
    body = {"prompt": "a", "max_tokens": 100_000, "stream": True}
    async with http.post(engine.url + TEXT, json=body) as answer:
        await answer.content.readany()
        await engine.kill()
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
    with pytest.raises(aiohttp.ClientConnectorError):
        await http.get(engine.url + "/health")


async def test_a_stopped_engine_ends_its_streams_with_abort(http, engine):
    body = {"prompt": "a", "max_tokens": 100_000, "stream": True}
    async with http.post(engine.url + TEXT, json=body) as answer:
        await answer.content.readany()
        await engine.stop()
        raw = await answer.read()
    assert b'"finish_reason":"abort"' in raw
    assert raw.endswith(b"data: [DONE]\n\n")


async def test_metrics_have_vllms_names_and_add_up(http, fleet):
    p, d = fleet.engines
    await _post(http, p, CHAT, **_leg())
    await _post(http, d, CHAT, **_decode(p))
    await _post(http, d, CHAT, messages=MESSAGES, max_tokens=5)
    async with http.get(d.url + "/metrics") as answer:
        text = await answer.text()
    labels = 'engine="0",model_name="sim-8b"'
    for line in (
        f"vllm:num_requests_running{{{labels}}} 0.0",
        f"vllm:num_requests_waiting{{{labels}}} 0.0",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.0",
        f"vllm:prompt_tokens_total{{{labels}}} 190.0",
        f"vllm:generation_tokens_total{{{labels}}} 10.0",
        f"vllm:prefix_cache_queries_total{{{labels}}} 190.0",
        f"vllm:prefix_cache_hits_total{{{labels}}} 80.0",
        f"vllm:external_prefix_cache_hits_total{{{labels}}} 95.0",
        f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}} 15.0',
        f'vllm:prompt_tokens_by_source_total{{{labels},source="local_cache_hit"}} 80.0',
        f'vllm:prompt_tokens_by_source_total{{{labels},source="external_kv_transfer"}} 95.0',
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 2.0",
        f"vllm:num_preemptions_total{{{labels}}} 0.0",
    ):
        assert line in text
    assert 'finished_reason="length"' in text
    assert 'kv_cache_size_tokens="393232"' in text
    async with http.get(p.url + "/metrics") as answer:
        found = [
            line for line in (await answer.text()).splitlines() if "bytes_transferred_t" in line
        ]
    assert float(found[-1].split()[-1]) == 95 * 131_072


async def test_the_openai_client_is_served(engine):
    client = AsyncOpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0)
    async with client:
        whole = await client.chat.completions.create(
            model="sim-8b", messages=[{"role": "user", "content": "hello"}], max_tokens=7
        )
        stream = await client.chat.completions.create(
            model="sim-8b",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=7,
            stream=True,
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
        assert text == whole.choices[0].message.content
        plain = await client.completions.create(model="sim-8b", prompt="hello", max_tokens=3)
        assert plain.usage is not None
        assert plain.usage.completion_tokens == 3
        with pytest.raises(NotFoundError):
            await client.completions.create(model="other", prompt="hello")
