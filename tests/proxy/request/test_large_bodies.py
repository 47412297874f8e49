"""Large bodies: examined elsewhere, with the same result, whatever becomes of the process."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.protocol.body import (
    MAX_BRACKETS,
    MAX_COMMAS,
    MAX_FIELDS,
    SMALL_BYTES,
    SMALL_COMMAS,
    Members,
    Unfit,
    is_small,
    members,
)
from proxy.protocol.examined import (
    Examined,
    Task,
    examine,
    examine_large,
    packed,
    packed_task,
    unpacked,
    unpacked_task,
)
from proxy.protocol.prompt.facts import (
    MOST_VALUES,
    MOST_VALUES_SMALL,
    TokenEstimator,
    hash_seed,
    seed_hashes,
)
from proxy.protocol.streams.movable import Plan
from proxy.protocol.streams.parse_cost import MAX_DEPTH
from tests.chaos.client import connect
from tests.chaos.command import ROOT
from tests.proxy.protocol.prompt.test_facts import json_values
from tests.proxy.protocol.test_body_fields import as_json
from tests.support.examples import examples
from tests.support.harness import RawEngine, ServedProxy, chat, plain, proxied, says, until, words

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/x")
TOP = st.sampled_from(
    [
        "model",
        "messages",
        "prompt",
        "input",
        "n",
        "stream",
        "cache_salt",
        "session_id",
        "vllm_xargs",
        "kv_transfer_params",
        "do_remote_" + "x" * 100,
        "y" * 300,
        "metadata",
        "max_tokens",
    ]
)


def shown(found: Examined | Unfit | None) -> Any:
    """All of a result; the places of the members are looked for if they are not known."""
    if not isinstance(found, Examined):
        return found
    told = found.prompt
    # What is within them is of one type: what is compiled takes no list for a tuple.
    lists = [list(one) for one in (told.units, told.ends, told.media, told.tails)]
    one = told.model, told.bytes, told.ids, told.hashes, told.kept, told.answer, told.dialect
    prompt = *one, lists, told.offloadable
    plan = found.plan.packed() if isinstance(found.plan, Plan) else found.plan
    return found.fields, found.session, found.put, found.drop, prompt, plan


@settings(max_examples=examples(60))
@given(
    st.dictionaries(TOP, json_values, max_size=6) | json_values,
    st.sampled_from(PATHS),
    st.none() | st.just("s" * 43),
    st.sampled_from([{}, {"stream": True}]),
)
def test_both_ways_find_the_same(
    body: Any, path: str, salt: str | None, more: dict[str, bool]
) -> None:
    if isinstance(body, dict):
        body |= more
    text = as_json(body)
    task = Task(path, text, is_object=path in PATHS[:2], salt=salt, plans=bool(more))
    here = examine(task, MOST_VALUES_SMALL)
    there = unpacked(packed(examine_large(unpacked_task(packed_task(task), text))))
    assert shown(here) == shown(there)
    if isinstance(there, Examined) and there.spans is not None:
        assert there.spans == Members(text).spans
        edited = Members(text, there.spans).edited(there.put, there.drop)
        assert edited.spans == Members(edited.raw).spans


PIXELS = "data:image/png;base64,iVBORw0KGgo="
PARTS = [
    {"type": "image_url", "image_url": {"url": PIXELS}},
    {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0="}},
    {"type": "input_image", "image_url": PIXELS},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw"}},
]
MEDIA_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")


@pytest.mark.parametrize("path", MEDIA_PATHS)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part["type"])
def test_both_ways_find_the_same_media(path: str, part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}, part, part]}]
    name = "input" if path == "/v1/responses" else "messages"
    text = orjson.dumps({"model": "m", name: messages})
    task = Task(path, text, is_object=True, salt=None)
    here = examine(task, MOST_VALUES_SMALL)
    there = unpacked(packed(examine_large(unpacked_task(packed_task(task), text))))
    assert shown(here) == shown(there)
    for found in (here, there):
        assert isinstance(found, Examined)
        TokenEstimator().facts(found.prompt, {})


@pytest.mark.parametrize(
    ("inner", "times", "message"),
    [
        (b"[" * 100 + b"]" * 100 + b",", MAX_BRACKETS // 100 + 1, f"over {MAX_BRACKETS} of"),
        (b'{"a":{}},', MAX_BRACKETS // 2 + 1, f"over {MAX_BRACKETS} of"),
        (b'"a",', MAX_COMMAS + 1, f"over {MAX_COMMAS} commas"),
    ],
)
def test_what_would_take_too_much_memory_is_not_parsed(
    inner: bytes, times: int, message: str
) -> None:
    body = b'{"messages":[' + inner * times + b"1]}"
    found = examine_large(Task(PATHS[0], body, is_object=True, salt=None))
    assert isinstance(found, Unfit)
    assert message in found.message


@pytest.mark.parametrize("name", ["", "do_remote_x"])
def test_members_are_counted_each_whatever_they_are_called(name: str) -> None:
    """A parse keeps one of them; what is kept of a body must not grow with the others."""
    many = ",".join(f'"{name}":1' for _ in range(MAX_FIELDS + 1))
    raw = f'{{"prompt":"x",{many}}}'.encode()
    found = examine_large(Task(PATHS[1], raw, is_object=True, salt=None))
    assert isinstance(found, Unfit)
    assert str(MAX_FIELDS) in found.message


def test_a_long_name_is_read_as_far_as_it_is_kept() -> None:
    for char in ("\\n", "\\u0041", "\\ud83d\\ude00", "é", "😀"):
        raw = f'{{"{char * 100_000}":1,"stream":true}}'.encode()
        (long, _, _), (stream, _, _) = members(raw)
        assert orjson.loads(f'"{char * 64}"')[:64] == long
        assert stream == "stream"


def test_arguments_of_plugins_that_are_written_anew_have_a_limit() -> None:
    raw = orjson.dumps({"vllm_xargs": {"kv_transfer_params": "{}", "x": "y" * 70_000}})
    found = examine(Task(PATHS[0], raw, is_object=True, salt=None), MOST_VALUES_SMALL)
    assert isinstance(found, Unfit)
    assert found.param == "vllm_xargs"


@pytest.mark.long
def test_values_of_a_prompt_have_a_limit() -> None:
    body = orjson.dumps({"prompt": [[1.5] for _ in range(MOST_VALUES // 2)]})
    found = examine_large(Task(PATHS[1], body, is_object=True, salt=None))
    assert isinstance(found, Unfit)
    assert "values" in found.message


@pytest.mark.parametrize(
    ("raw", "small"),
    [
        (b"[" * 8192, True),
        (b"[" * 8193, False),
        (b"{" * 8193, False),
        (b"a" * SMALL_BYTES, True),
        (b"a" * (SMALL_BYTES + 1), False),
        (b"[{" * 4096 + b"a" * 60_000, True),
        (b"," * (SMALL_COMMAS + 1) + b"a" * 100_000, True),
        (b"," * SMALL_COMMAS + b"a" * 200_000, True),
        (b"," * (SMALL_COMMAS + 1) + b"a" * 200_000, False),
        (b"a" * 60_000 + b"{" * 8193, False),
    ],
    ids=range(10),
)
def test_a_body_with_many_brackets_is_not_small(raw: bytes, *, small: bool) -> None:
    assert is_small(raw) is small


def test_a_prompt_of_source_code_is_small() -> None:
    """The long prompts of coding agents are what the proxy is for."""
    sources = [path.read_text() for path in sorted((ROOT / "proxy").rglob("*.py"))]
    text = "".join(sources)[:900_000]
    assert len(text) == 900_000
    assert is_small(orjson.dumps(chat(text)))


def large(tail: str = "", **more: Any) -> bytes:
    """A body with one comma too many for the event loop."""
    prompt = words(30_000, tail) + "," * SMALL_COMMAS
    return orjson.dumps(chat(prompt, max_tokens=2) | more)


def workers(proxy: ServedProxy) -> list[int]:
    """The processes that this one has for large bodies."""
    worker = proxy.server._large_bodies._worker  # type: ignore[union-attr]
    return [] if worker is None else [worker._process.pid]


@pytest.mark.long
async def test_a_large_body_is_served_and_no_process_stays(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        assert (await proxy.post(chat("x", max_tokens=2))).status == 200
        assert not workers(proxy), "small bodies need none"
        assert (await proxy.post(large("a"))).status == 200
        (first,) = workers(proxy)
        assert (await proxy.post(large("b"))).status == 200
        assert workers(proxy) == [first]
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


@pytest.mark.long
async def test_the_process_hashes_as_the_proxy_does(tmp_path: Path) -> None:
    """With the secret that prompts' hashes begin with."""
    task = Task(PATHS[0], large(), is_object=True, salt=None, plans=False)
    before = hash_seed()
    try:
        seed_hashes(9)
        async with proxied(tmp_path, 1) as (proxy, _):
            assert proxy.server is not None
            bodies = proxy.server._large_bodies
            assert bodies is not None
            there, here = await bodies.examine(task, "somebody"), examine_large(task)
            assert workers(proxy)
    finally:
        seed_hashes(before)
    assert isinstance(there, Examined)
    assert isinstance(here, Examined)
    assert there.prompt.hashes == here.prompt.hashes
    assert there.prompt.hashes


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part["type"])
async def test_a_large_body_with_media_is_served(tmp_path: Path, part: dict[str, Any]) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        content = [{"type": "text", "text": words(30_000, "a") + "," * SMALL_COMMAS}, part]
        body = chat("x", max_tokens=2) | {"messages": [{"role": "user", "content": content}]}
        assert (await proxy.post(orjson.dumps(body))).status == 200
        assert workers(proxy)


@pytest.mark.long
async def test_a_dead_process_is_replaced_unseen(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        await proxy.post(large("a"))
        (first,) = workers(proxy)
        os.kill(first, signal.SIGKILL)
        assert (await proxy.post(large("b"))).status == 200
        assert workers(proxy) != [first]


@pytest.mark.long
async def test_the_process_gives_back_what_a_body_took(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": f"{i}" + "x" * 20_000} for i in range(200)]
    raw = orjson.dumps({"model": "m", "messages": messages})
    task = Task(PATHS[0], raw, is_object=True, salt=None)
    async with proxied(tmp_path, 1) as (proxy, _):
        assert (await proxy.post(large())).status == 200
        process = psutil.Process(workers(proxy)[0])
        before = process.memory_info().rss
        bodies = proxy.server._large_bodies
        for _ in range(3):
            assert isinstance(await bodies.examine(task, "somebody"), Examined)  # type: ignore[union-attr]
        await until(lambda: process.memory_info().rss < before + (4 << 20))


@pytest.mark.long
async def test_a_stopped_process_is_not_the_bodys_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client may send it again; the process is replaced."""
    async with proxied(tmp_path, 1) as (proxy, _):
        await proxy.post(large("a"))
        (first,) = workers(proxy)
        os.kill(first, signal.SIGSTOP)
        monkeypatch.setattr("proxy.request.large_bodies.EXAMINE_S", 0.3)
        refused = await proxy.post(large("b"))
        assert refused.status == 503
        assert int(refused.headers["Retry-After"]) >= 1
        monkeypatch.undo()
        assert (await proxy.post(large("b"))).status == 200
        assert workers(proxy) != [first]


async def test_where_no_process_can_be_had_only_large_bodies_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    async with proxied(tmp_path, 1) as (proxy, _):
        refused = await proxy.post(large())
        assert refused.status == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert (await proxy.post(chat("x", max_tokens=2))).status == 200


@pytest.mark.long
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 1000, 5000])
async def test_a_nested_body_is_refused_and_costs_nobody_else(tmp_path: Path, depth: int) -> None:
    nest = b"[" * depth + b"]" * depth + b","
    body = b'{"model":"m","messages":[' + nest * (1_000_000 // len(nest)) + b"1]}"
    async with proxied(tmp_path, 1) as (proxy, _):
        answers = await asyncio.gather(
            proxy.post(body), *(proxy.post(chat(f"x{i}", max_tokens=2)) for i in range(5))
        )
        assert [answer.status for answer in answers] == [400, *[200] * 5]
        assert b"of [ and {" in answers[0].body
        assert len(await proxy.records(6)) == 6


async def test_a_long_body_full_of_arrays_is_refused_before_all_of_it_came(tmp_path: Path) -> None:
    """Its client still sends: it learns why, and the rest is no work for anybody."""
    begun = b'{"model":"m","messages":[' + b"[" * (MAX_BRACKETS + 1)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {12_000_000}\r\n\r\n"
    async with proxied(tmp_path, 1) as (proxy, _):
        connection = await connect(proxy.server.url)
        connection.send(head.encode() + begun)
        got = await connection.get()
        assert got.status == 400
        assert b"of [ and {" in got.body
        connection.close()
        assert not workers(proxy)
        await proxy.at_rest()


@pytest.mark.long
async def test_a_client_that_leaves_holds_up_nobody(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        bodies = proxy.server._large_bodies
        assert bodies is not None
        gone = [asyncio.create_task(proxy.post(large(str(i)))) for i in range(8)]
        await until(lambda: bool(bodies.uploads.room.held_bytes), "a body waits")
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        await until(lambda: not bodies._jobs, "what nobody waits for is not kept")
        assert (await proxy.post(large("stays"))).status == 200
        assert bodies.uploads.room.held_bytes == 0
        await proxy.at_rest()


async def test_fields_of_a_large_body_are_edited_like_those_of_a_small_one(tmp_path: Path) -> None:
    async with RawEngine(says(plain(b"{}"))) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            given = large("a", kv_transfer_params={"do_remote_prefill": True})
            assert (await proxy.post(given)).status == 200
            (post,) = engine.posts
            body = orjson.loads(post)
            assert body == orjson.loads(large("a"))
