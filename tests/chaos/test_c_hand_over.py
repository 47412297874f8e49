"""Faults of a hand-over of KV: whatever breaks, the client gets a whole answer, colocated."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import orjson
import pytest

from bench.faults import black_hole
from tests.chaos.client import Connection, Got, request
from tests.chaos.rig import SLOW_PROBES, Floor, Rig
from tests.support.harness import (
    ANSWER,
    GOOD,
    STREAM_HEAD,
    RawEngine,
    Script,
    chat,
    chunk,
    event,
    plain,
    resets,
    says,
    stalls,
    until,
    words,
)

ALWAYS: dict[str, Any] = {
    "warm_threshold": 100,
    "heavy_threshold": 500,
    "offload_policy": "always",
    "boots": True,
}
LONG = words(2000)
LENGTH = b'{"choices":[{"index":0,"finish_reason":"length"}],"usage":{"prompt_tokens":9}%s}'
SESSION = {"X-Session-ID": "s"}
SHORT_PIN = {"abort_timeout": 25.0}
"""Engine seconds, half a second at speed 50: what nobody pulls does not stay pinned for long."""


def is_fine(got: Got) -> bool:
    return got.status == 200 and got.is_clean and got.is_done and not got.errors


async def colocated(r: Rig, text: str = LONG) -> dict[str, Any]:
    """A heavy request is answered whole although its offload failed: its record, with the cause."""
    got = await r.ask(text)
    assert is_fine(got), (got.status, got.body)
    record = (await r.records(len(r.sent)))[-1]
    assert record["outcome"] == "ok"
    return record


async def offload(r: Rig, text: str = "u") -> tuple[int, int]:
    """A hand-over that succeeds; the numbers of its P and D."""
    assert is_fine(await r.ask(words(2000, text), headers=SESSION))
    record = (await r.records(len(r.sent)))[-1]
    assert record["route_class"] == "HEAVY_P2P", record["fallback"]
    return int(record["prefill_instance"][1:]), int(record["decode_instance"][1:])


def peer(p: Script | RawEngine, d: Script | RawEngine = GOOD) -> list[Script | RawEngine]:
    """D is asked first: with equal loads the first instance is chosen."""
    return [d, p]


ABSENT = "absent"
P_OR_NOBODY = [(None, ABSENT), ("e-1", ABSENT)]
PARAMS = b',"kv_transfer_params":%s'
FOREIGN = (
    b'{"do_remote_prefill":true,"remote_engine_id":"somebody-else","remote_block_ids":[999999],'
    b'"remote_host":"169.254.169.254","remote_port":1}'
)
TOO_MUCH = (
    b'{"remote_block_ids":[' + b"1," * (2 << 20) + b"1]}",
    b'"text"',
    b"[[1]]",
    b'{"remote_block_ids":{"a":true},"remote_engine_id":7,"remote_host":[]}',
    b'{"remote_block_ids":' + b"[" * 1000 + b"]" * 1000 + b"}",
)


async def test_f41_no_params_in_ps_answer(rig: Floor) -> None:
    d = RawEngine()
    options = ALWAYS | SLOW_PROBES | {"boots": False, "kv_connector": "nixl"}
    async with rig(peer(says(plain(LENGTH % b"")), d), **options) as r:
        record = await colocated(r)
        assert record["fallback"] in ("kv_params", "p_finish_reason")
        assert record["decode_instance"] == "i0"
        assert b"kv_transfer_params" not in d.posts[-1]


async def told(rig: Floor, connector: str, given: bytes) -> tuple[object, object]:
    """P's answer names such params: which engine and blocks D is told of."""
    d = RawEngine()
    p = says(plain(LENGTH % (PARAMS % given)))
    options = ALWAYS | SLOW_PROBES | {"boots": connector == "mooncake", "kv_connector": connector}
    async with rig(peer(p, d), **options) as r:
        got = await r.ask(LONG)
        assert is_fine(got)
        assert len(d.posts[-1]) < 2 * len(LONG)
        params = orjson.loads(d.posts[-1]).get("kv_transfer_params") or {}
        return params.get("remote_engine_id"), params.get("remote_block_ids", ABSENT)


@pytest.mark.parametrize("connector", ["mooncake", "nixl"])
async def test_f42_params_of_somebody_else(rig: Floor, connector: str) -> None:
    assert await told(rig, connector, FOREIGN) in P_OR_NOBODY


@pytest.mark.parametrize("given", TOO_MUCH, ids=["huge", "text", "list", "types", "nested"])
@pytest.mark.parametrize("connector", ["mooncake", "nixl"])
async def test_f43_params_that_are_too_much(rig: Floor, connector: str, given: bytes) -> None:
    assert await told(rig, connector, given) in P_OR_NOBODY


async def test_f44_d_cannot_load_the_kv(rig: Floor) -> None:
    sim = {"kv_load_failure_policy": "fail"} | SHORT_PIN
    async with rig(sims=2, sim=sim, **ALWAYS) as r:
        await offload(r)
        for gate in r.boots:
            await gate.accept("reset")
        record = await colocated(r)
        assert record["fallback"] in ("d_failed", "transfer_timeout", "transfer_failed")
        assert record["retries"] <= 1


async def test_f45_d_waits_for_ever(rig: Floor) -> None:
    async with rig(sims=2, sim=SHORT_PIN, transfer_timeout=0.3, **ALWAYS) as r:
        p, _ = await offload(r)
        for gate in r.boots:
            gate.down.stalls = True
        assert (await colocated(r))["fallback"] == "transfer_timeout"
        assert p in (0, 1)


async def test_f46_p_dies_before_the_pull(rig: Floor) -> None:
    options = ALWAYS | {"transfer_timeout": 20.0, "health_timeout": 0.2}
    async with rig(sims=2, sim={"abort_timeout": 100.0}, **options) as r:
        await offload(r)
        for gate in r.boots:
            gate.up.stalls = True
        asked = asyncio.create_task(r.ask(LONG, headers=SESSION))
        engines = r.engines
        await until(lambda: any(e.driver.engine.sender.pinned for e in engines), "pinned")
        await until(lambda: any(e.driver.engine.fetching for e in engines), "D waits")
        (p,) = (e for e in engines if e.driver.engine.sender.pinned)
        await r.kill(engines.index(p))
        assert is_fine(await asked)
        record = (await r.records(2))[-1]
        assert (record["fallback"], record["outcome"]) == ("p_gone", "ok")


async def test_f47_p_dies_while_d_computes(rig: Floor) -> None:
    p_is_gone = asyncio.Event()

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await p_is_gone.wait()
        writer.write(ANSWER)

    d = RawEngine(slowly)
    async with rig(peer(stalls(), d), **ALWAYS, **SLOW_PROBES) as r:
        asked = asyncio.create_task(r.ask(LONG, headers={"X-Session-ID": "s"}))
        await until(lambda: d.posts, "D computes as well")
        r.links[1].cut(resets=True)
        await until(lambda: not r.state.instances.by_name["i1"].in_use, "the proxy knows of it")
        p_is_gone.set()
        assert is_fine(await asked)
        record = await r.record()
        assert (record["hedge"], record["outcome"]) == ("local", "ok")
        assert len(d.posts) == 1, "D is not asked twice"


async def test_f48_p_is_far_too_slow(rig: Floor) -> None:
    options = ALWAYS | {"prefill_timeout": 0.3, "hedge": False}
    async with rig(peer(stalls()), **options, **SLOW_PROBES) as r:
        assert (await colocated(r))["fallback"] == "p_timeout"
        await until(lambda: r.engines[1].busy == 0, "P's leg is closed")


async def test_f49_the_engine_has_a_new_id(rig: Floor) -> None:
    async with rig(sims=2, sim=SHORT_PIN, transfer_timeout=0.5, **ALWAYS) as r:
        p, _ = await offload(r)
        await r.kill(p)
        await r.start(p)
        for i in range(6):
            assert is_fine(await r.ask(words(2000, f"n{i}")))
        await until(lambda: r.is_up(f"i{p}"), "it is back")
        moved: list[str] = []
        while "HEAVY_P2P" not in moved:
            assert len(moved) < 10, f"KV never moves again: {moved}"
            assert is_fine(await r.ask(words(2000, f"m{len(moved)}")))
            moved = [record["route_class"] for record in await r.records(len(r.sent))][7:]
        assert all(record["retries"] <= 1 for record in await r.records(8))


BOOTS: dict[str, bytes | Script] = {
    "hangs": stalls(),
    "500": plain(b"{}", "500 Oops"),
    "no JSON": plain(b"<html>"),
    "wrong JSON": plain(b'{"0":{"engine_id":7}}'),
    "list": plain(b"[1,2]"),
    "no engine": plain(b"{}"),
}


@pytest.mark.parametrize("how", BOOTS)
async def test_f50_the_bootstrap_server_fails(rig: Floor, how: str) -> None:
    p = RawEngine(says(plain(LENGTH % b"")))
    p.gets["/query"] = BOOTS[how]
    options = ALWAYS | {"connect_timeout": 0.2}
    async with rig(peer(p), **options, **SLOW_PROBES) as r:
        record = await colocated(r)
        assert record["fallback"] == "engine_id_unknown"
        assert record["decode_instance"] == "i0"


async def sends(r: Rig, text: str = LONG, **fields: Any) -> Connection:
    """A heavy request whose client may leave."""
    connection = await r.connection()
    connection.send(request(orjson.dumps(chat(text, **fields)), SESSION))
    return connection


def running(r: Rig) -> int:
    return sum(len(e.driver.engine.running) for e in r.engines)


async def test_f51_client_leaves_during_prefill(rig: Floor) -> None:
    async with rig(sims=2, sim={"speed": 0.2}, **ALWAYS) as r:
        connection = await sends(r)
        await until(lambda: running(r), "P computes")
        connection.close()
        await until(lambda: not running(r), "P's work ends")
        record = await r.record()
        assert record["outcome"] == "client_gone"
        assert sum(e.stats()["generated_tokens"] for e in r.engines) == 0


async def test_f52_client_leaves_between_the_legs(rig: Floor) -> None:
    async with rig(sims=2, sim={"abort_timeout": 2000.0}, **ALWAYS) as r:
        p, d = await offload(r)
        before = r.engines[d].stats()["generated_tokens"]
        r.links[d].up.stalls = True
        connection = await sends(r)
        await until(lambda: r.engines[p].stats()["pinned"], "P's KV waits")
        connection.close()
        await until(lambda: r.state.in_flight.count - len(r.flow.bad) <= 1)
        r.links[d].heal()
        await until(lambda: not r.engines[p].stats()["pinned"], "P's KV is released")
        assert r.engines[d].stats()["generated_tokens"] - before <= 8


async def test_f53_client_leaves_during_the_pull(rig: Floor) -> None:
    async with rig(sims=2, sim={"x0": 25.0} | SHORT_PIN, **ALWAYS) as r:
        connection = await sends(r)
        await until(lambda: any(e.driver.engine.fetching for e in r.engines), "D fetches")
        connection.close()
        record = await r.record()
        assert record["outcome"] == "client_gone"
        await until(lambda: not r.sim_work(), "nothing stays behind")


async def test_f54_one_instance_left(rig: Floor) -> None:
    async with rig(sims=2, **ALWAYS) as r:
        await r.kill(1)
        await until(lambda: not r.is_up("i1"), "down")
        record = await colocated(r)
        assert record["fallback"] is None
        assert (record["prefill_instance"], record["decode_instance"]) == (None, "i0")


async def test_f55_no_p_is_healthy(rig: Floor) -> None:
    async with rig(sims=3, **ALWAYS) as r:
        for i in (1, 2):
            await r.kill(i)
        await until(lambda: not r.is_up("i1") and not r.is_up("i2"), "down")
        for i in range(3):
            record = await colocated(r, text=words(2000, f"t{i}"))
            assert record["fallback"] is None
            assert record["route_class"] == "HEAVY_COLO"
            assert record["offload_decision_reason"] == "no_peer"


async def test_f56_p_says_more_than_it_was_asked(rig: Floor) -> None:
    five = b'{"choices":[{"index":0,"finish_reason":"length","message":{"content":"a b c d e"}}]}'
    for script in (
        says(plain(five)),
        says(STREAM_HEAD + chunk(event("from P")) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"),
        says(STREAM_HEAD + chunk(event("from P") * 100_000)),
    ):
        async with rig(peer(script), **ALWAYS, **SLOW_PROBES) as r:
            got = await r.ask(LONG)
            assert (got.text, got.is_clean) == ("fine", True)


async def test_f57_each_token_once(rig: Floor) -> None:
    said = []
    for policy in ("always", "never"):
        async with rig(sims=2, **(ALWAYS | {"offload_policy": policy})) as r:
            for link in r.links:
                link.down.slice_bytes = 7
            got = await r.ask(LONG, max_tokens=40)
            record = await r.record()
            assert (record["route_class"] == "HEAVY_P2P") is (policy == "always")
            assert record["osl_tokens"] == 40
            said.append(got.text)
    assert said[0] == said[1]


async def test_f58_roles_change_in_mid_flight(rig: Floor) -> None:
    async with rig(sims=2, sim={"x0": 5.0}, **ALWAYS) as r:
        asked = [asyncio.create_task(r.ask(words(2000, f"r{i}"))) for i in range(6)]
        await until(lambda: r.sim_work() > 2, "legs in both directions")
        async with r.proxy.http.delete("/instances/i1?drain=true") as answer:
            assert answer.status < 300
        with contextlib.suppress(AssertionError):
            await until(lambda: not r.is_up("i1"), "drained")
        assert all([is_fine(await task) for task in asked])
        records = await r.records(6)
        pairs = {(rec["prefill_instance"], rec["decode_instance"]) for rec in records}
        assert all(p != d for p, d in pairs)
        assert {rec["outcome"] for rec in records} == {"ok"}


TOLD_LATE: dict[str, dict[str, Any]] = {
    "options without a stream": {"stream": False, "stream_options": {"include_usage": True}},
    "a number that is none": {"min_tokens": "many"},
    "a flag that is none": {"stream": "maybe"},
}


@pytest.mark.parametrize("how", TOLD_LATE)
async def test_f104_a_request_that_d_alone_refuses(rig: Floor, how: str) -> None:
    """P's leg lacks the field; an engine that refuses it while parsing tells its P nothing."""
    async with rig(sims=2, sim={"abort_timeout": 2000.0}, **ALWAYS) as r:
        got = await r.ask(LONG, **TOLD_LATE[how])
        assert got.status == 400, got.body
        assert (await r.record())["prefill_instance"] is None
        assert not r.sim_work()


@pytest.mark.parametrize("how", ["garbage", "huge"])
@pytest.mark.parametrize("connector", ["mooncake", "nixl"])
async def test_f105_an_answer_of_no_use_holds_kv(rig: Floor, connector: str, how: str) -> None:
    """Mooncake's KV has the proxy's own name; which blocks NIXL's P holds only P could say."""
    is_named = connector == "mooncake"
    sim = {"kv_connector": connector, "abort_timeout": 2000.0 if is_named else 25.0}
    async with rig(sims=2, sim=sim, **ALWAYS | {"kv_connector": connector}) as r:
        for engine in r.engines:
            engine.faults.change(prefill=how)
        record = await colocated(r)
        assert record["fallback"] == "p_error"
        p = record["prefill_instance"]
        if is_named:
            await until(lambda: not r.sim_work(), "P's KV is released")
        booked = r.router.known.unreleased_kv.on(p, r.state.clock.now_s())[1]
        assert bool(booked) is not is_named
        result = "released" if is_named else "stranded"
        await until(lambda: r.metric("kv_releases_total", result=result) == 1)
        await until(lambda: not r.sim_work(), "or its lease ends")


async def test_f105_an_answer_that_is_cut(rig: Floor) -> None:
    """The head is there: the prompt is computed, and its KV may be pinned."""
    p = resets(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{")
    async with rig(peer(p), **ALWAYS, **SLOW_PROBES) as r:
        record = await colocated(r)
        assert record["fallback"] == "p_error"
        assert r.router.known.unreleased_kv.on("i1", r.state.clock.now_s())[1]
        assert r.metric("kv_releases_total", result="stranded") == 1


async def test_f184_answers_of_p_without_an_end(rig: Floor) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2000000\r\n\r\n"
    p = stalls(head + b'{"id":"' + b"x" * 400_000)
    async with rig(peer(p), **ALWAYS, **SLOW_PROBES) as r:
        room = r.state.instances.pending
        room.max_bytes = 200_000
        assert (await colocated(r))["fallback"] == "p_error"
        assert not len(room)


ANOTHER_PROMPT: dict[str, dict[str, Any]] = {
    "as long as max_tokens leaves room": {"truncate_prompt_tokens": -1},
    "the last tokens": {"truncate_prompt_tokens": 900},
    "an image that may change": {
        "messages": [
            {"role": "user", "content": LONG},
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "http://h/a.png"}}],
            },
        ]
    },
}


@pytest.mark.parametrize("how", ANOTHER_PROMPT)
async def test_f106_each_leg_would_see_another_prompt(rig: Floor, how: str) -> None:
    async with rig(sims=2, **ALWAYS) as r:
        assert is_fine(await r.ask(LONG, **ANOTHER_PROMPT[how]))
        assert (await r.record())["prefill_instance"] is None


async def test_f107_ps_answer_stays_short(rig: Floor) -> None:
    asked: dict[str, Any] = {"return_token_ids": True, "return_prompt_text": True}
    p, d = RawEngine(says(plain(LENGTH % b""))), RawEngine()
    async with rig(peer(p, d), **ALWAYS, **SLOW_PROBES) as r:
        assert is_fine(await r.ask(LONG, **asked, logprobs=True, logprob_token_ids=[1, 2]))
        told = orjson.loads(p.posts[-1])
        assert not {*asked, "logprobs", "logprob_token_ids"} & set(told)
        assert asked.items() <= orjson.loads(d.posts[-1]).items()


@pytest.mark.parametrize("how", ["401", "400", "{}", "html", "no choices"])
async def test_f147_p_serves_nothing_at_once(rig: Floor, how: str) -> None:
    """It is always idle, so each prompt would be sent there."""
    async with rig(peer(black_hole.WAYS[how]), **ALWAYS, **SLOW_PROBES) as r:
        assert is_fine(await r.ask(LONG))
        await until(lambda: not r.is_up("i1"), "its trial fails")
        asked = len(r.engines[1].posts)
        for i in range(4):
            assert is_fine(await r.ask(words(2000, f"t{i}")))
        assert len(r.engines[1].posts) == asked
        told = {line["fallback"] for line in await r.records(5)}
        assert told == {"p_finish_reason" if how in ("{}", "no choices") else "p_error", None}
