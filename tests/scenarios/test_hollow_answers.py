"""Answers that serve nobody: whose fault they are is told by another instance, or by a trial."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.faults.black_hole import FINE, GOOD, WAYS, ends, refuses
from proxy.core.fleet.health import State
from proxy.core.fleet.hollow import REFUSALS
from proxy.fleet import probes
from tests.support.harness import (
    DONE,
    STREAM_HEAD,
    RawEngine,
    Script,
    ServedProxy,
    chat,
    chunk,
    event,
    plain,
    says,
    until,
)

BAD = b'"temperature":-9'
"""In requests that no engine serves."""


class Picky(RawEngine):
    """Refuses every request that is bad, as any engine does."""

    def __init__(self, script: Script) -> None:
        super().__init__(self._either)
        self._script = script

    async def _either(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_bad = BAD in self.posts[-1]
        await (refuses(400) if is_bad else self._script)(reader, writer)


@asynccontextmanager
async def fleet(
    tmp_path: Path, *scripts: Script, **options: Any
) -> AsyncIterator[tuple[ServedProxy, list[Picky]]]:
    """A proxy before such engines, whose probes take no part."""
    defaults: dict[str, Any] = {"kv_connector": "none", "health_interval": 60}
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Picky(script)) for script in scripts]
        urls = [f"e{i}={engine.address}" for i, engine in enumerate(engines)]
        proxy = ServedProxy(tmp_path / "log", urls, **(defaults | options))
        await stack.enter_async_context(proxy)
        await proxy.up()
        yield proxy, engines


def is_trial(body: bytes) -> bool:
    return b'"prompt":"1"' in body


def state(proxy: ServedProxy, name: str) -> State:
    return list(State)[int(proxy.metric("breaker_state", upstream=name))]


@pytest.mark.parametrize("way", ["{}", "html", "empty", "[DONE]", "abort in one piece"])
async def test_a_success_with_nothing_in_it_is_had_elsewhere(tmp_path: Path, way: str) -> None:
    async with fleet(tmp_path, WAYS[way], says(GOOD)) as (proxy, engines):
        answers = [await proxy.post(chat(f"t{i}")) for i in range(6)]
        assert [(a.status, a.text) for a in answers] == [(200, FINE)] * 6
        await until(lambda: not proxy.router.known.fleet.is_up("e0"), "its trial fails")
        assert len([b for b in engines[0].posts if not is_trial(b)]) <= 2
        assert proxy.metric("upstream_retries_total", reason="hollow") >= 1
        async with proxy.http.get("/health") as response:
            told = (await response.json())["instances"]["e0"]
        (warning,) = told["warnings"]
        assert warning.startswith("its answers are hollow: ")
        assert warning.count("hollow") == 1
        await proxy.at_rest()


async def test_a_clients_bad_requests_speak_against_nobody(tmp_path: Path) -> None:
    """On one session, so at one home; one in nine is asked about elsewhere."""
    async with fleet(tmp_path, says(GOOD), says(GOOD)) as (proxy, engines):
        for i in range(30):
            bad = await proxy.post(
                chat(f"t{i}", temperature=-9), headers={"X-Session-ID": "mallory"}
            )
            assert bad.status == 400
        for name in ("e0", "e1"):
            member = proxy.router.known.fleet.get(name)
            assert state(proxy, name) is State.HEALTHY
            assert member.health.last_error is None
        assert proxy.router.known.fleet.doubts(proxy.router.known.fleet.members(), "", 0.0) is None
        asked = sum(len(engine.posts) for engine in engines)
        assert asked <= 30 * 10 / 9
        assert not any(is_trial(body) for engine in engines for body in engine.posts)
        records = await proxy.records(30)
        assert {record["outcome"] for record in records} == {"bad_request"}


async def test_bad_requests_beside_good_ones_cost_nobody_anything(tmp_path: Path) -> None:
    async with fleet(tmp_path, says(GOOD), says(GOOD)) as (proxy, _):

        async def client(*, is_bad: bool) -> None:
            for i in range(25):
                more: dict[str, Any] = {"temperature": -9} if is_bad else {}
                got = await proxy.post(chat(f"t{i}", **more))
                assert got.status == (400 if is_bad else 200)

        await asyncio.gather(*[client(is_bad=n % 2 == 0) for n in range(4)])
        assert state(proxy, "e0") is state(proxy, "e1") is State.HEALTHY


@pytest.mark.parametrize("way", list(WAYS))
async def test_the_answers_of_one_alone_pass_through(tmp_path: Path, way: str) -> None:
    async with fleet(tmp_path, WAYS[way]) as (proxy, _):
        first = await proxy.post(chat("a"))
        for i in range(8 if way != "429" else 0):  # that one is waited out, for seconds
            got = await proxy.post(chat(f"t{i}"))
            assert (got.status, got.body[:40]) == (first.status, first.body[:40])
        if way[:3].isdigit():
            assert first.status == (200 if "stream" in way else int(way[:3]))
        await proxy.at_rest()


async def test_what_all_give_alike_is_the_requests_fault(tmp_path: Path) -> None:
    for way in ("{}", "[DONE]", "401", "501"):
        folder = tmp_path / way.strip("{}[]")
        folder.mkdir(exist_ok=True)
        async with fleet(folder, *[WAYS[way]] * 3) as (proxy, engines):
            answers = [await proxy.post(chat(f"t{i}")) for i in range(9)]
            assert len({got.status for got in answers}) == 1
            assert all(proxy.router.known.fleet.is_up(f"e{i}") for i in range(3))
            asked = sum(not is_trial(b) for engine in engines for b in engine.posts)
            assert asked <= 2 * 9


@pytest.mark.parametrize("way", ["401", "403"])
async def test_the_proxys_own_key_is_refused(tmp_path: Path, way: str) -> None:
    """No client can be the cause: no request is lost, and an operator is told."""
    key = "sk-of-the-instances-0123"
    async with fleet(tmp_path, WAYS[way], says(GOOD), instance_api_key=key) as (proxy, _):
        answers = [await proxy.post(chat(f"t{i}")) for i in range(6)]
        assert {got.status for got in answers} == {200}
        await until(lambda: not proxy.router.known.fleet.is_up("e0"), "its trial fails")
        async with proxy.http.get("/health") as response:
            told = (await response.json())["instances"]["e0"]
        assert told["warnings"] == [f"its answers are hollow: status {way} to the proxy's own key"]
        assert key not in repr(told)
        assert proxy.metric("upstream_retries_total", reason="key_refused") >= 1


@pytest.mark.parametrize("engines", [1, 3])
async def test_a_clients_own_request_is_refused(tmp_path: Path, engines: int) -> None:
    """As a user or a model may be, whatever the proxy's key is."""
    options: dict[str, Any] = {"instance_api_key": "sk-of-the-instances-0123"}
    options |= {"health_interval": 0.05}
    picky: list[Picky] = []

    def of(at: int) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            is_own = b"belladonna" in picky[at].posts[-1]
            await (refuses(403) if is_own else says(GOOD))(reader, writer)

        return script

    async with fleet(tmp_path, *map(of, range(engines)), **options) as (proxy, made):
        picky += made
        for i in range(6):
            got = await proxy.post(chat("belladonna"), headers={"X-Session-ID": "s"})
            assert got.status == 403
            assert (await proxy.post(chat(f"t{i}"))).text == FINE
        names = [f"e{i}" for i in range(engines)]
        healths = [proxy.router.known.fleet.get(name).health for name in names]
        await until(lambda: not any(h.is_suspect for h in healths), "nobody is in doubt")
        trials = sum(is_trial(body) for engine in made for body in engine.posts)
        assert not trials
        warnings = proxy.server.state.instances.warnings
        await until(lambda: not any(warnings.get(name) for name in names), "nor is one warned of")


async def test_a_warning_that_comes_and_goes_is_a_line_now_and_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is in order by turns fills no log; what stays is said at last."""
    async with fleet(tmp_path, says(GOOD)) as (proxy, _):
        instances, now_s = proxy.server.state.instances, [1000.0]
        instances, now_s = proxy.server.state.instances, [1e9]
        monkeypatch.setattr(instances.clock, "now_s", lambda: now_s[0])

        def lines() -> list[str]:
            return [text for text in caplog.messages if "odd" in text]

        caplog.set_level(logging.INFO)
        for number in range(100):
            instances.warn("e0", "odd", "it is odd" if number % 2 == 0 else None)
        assert lines() == ["instance e0: it is odd", "instance e0: odd: in order again"]
        instances.warn("e0", "odd", "it is odd")
        assert instances.warnings["e0"] == {"odd": "it is odd"}, "shown at once"
        now_s[0] += 11
        instances.warn("e0", "odd", "it is odd")
        assert lines()[2:] == ["instance e0: it is odd; 50 more since the last line"]
        instances.warn("e0", "odd", "it is odd")
        assert len(lines()) == 3


async def test_the_list_of_models_is_refused(tmp_path: Path) -> None:
    """An engine that restarts with another key serves before anybody asks for its models."""
    key = "sk-of-the-instances-0123"
    options: dict[str, Any] = {"instance_api_key": key, "health_interval": 0.05}
    async with fleet(tmp_path, says(GOOD), says(GOOD), **options) as (proxy, engines):
        engines[0].gets["/v1/models"] = plain(b'{"error":"Unauthorized"}', "401 Unauthorized")
        engines[0].scripts = [refuses(401)]
        proxy.router.known.fleet.get("e0").rereads_models = True
        await until(lambda: not proxy.router.known.fleet.is_up("e0"), "ejected without a request")
        told = proxy.server.state.instances.warnings["e0"]
        assert "401 to the proxy's own key" in told["models"]
        engines[0].gets["/v1/models"] = plain(b'{"data":[{"id":"sim-8b"}]}')
        await until(lambda: "models" not in told, "its models are known again")


async def test_a_list_that_only_the_proxy_may_not_read_ejects_nobody(tmp_path: Path) -> None:
    key = "sk-of-the-instances-0123"
    options: dict[str, Any] = {"instance_api_key": key, "health_interval": 0.05}
    async with fleet(tmp_path, says(GOOD), says(GOOD), **options) as (proxy, engines):
        engines[0].gets["/v1/models"] = plain(b"{}", "403 Forbidden")
        proxy.router.known.fleet.get("e0").rereads_models = True
        await until(lambda: any(map(is_trial, engines[0].posts)), "it is tried")
        health = proxy.router.known.fleet.get("e0").health
        await until(lambda: not health.hollow.doubts and health.is_up, "and passes")
        probes = health.probes
        await until(lambda: health.probes > probes + 5)
        assert sum(map(is_trial, engines[0].posts)) == 1


@pytest.mark.parametrize("reason", [b"abort", b"error"])
async def test_a_stream_that_ends_broken_makes_a_trial_due(tmp_path: Path, reason: bytes) -> None:
    """Its client has a part of it, so nobody else can be asked."""
    async with fleet(tmp_path, ends(reason, gap_s=0.005), says(GOOD)) as (proxy, _):
        got = await proxy.post(chat("a"))
        assert got.status == 200
        await until(lambda: not proxy.router.known.fleet.is_up("e0"), "its trial fails")
        answers = [await proxy.post(chat(f"t{i}")) for i in range(4)]
        assert all(got.text == FINE and b"stop" in got.body for got in answers)
        (record, *_) = await proxy.records(5)
        assert record["outcome"] == "upstream_error"
        assert record["error"] == f"a hollow answer: finish reason {reason.decode()}"


async def test_what_only_newer_engines_serve_ejects_no_older_one(tmp_path: Path) -> None:
    """It is served there; the older one passes each trial."""

    async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (refuses(400) if b'"new_field"' in engines[0].posts[-1] else says(GOOD))(
            reader, writer
        )

    async with fleet(tmp_path, old, says(GOOD)) as (proxy, engines):
        statuses = [(await proxy.post(chat(f"t{i}", new_field=1))).status for i in range(40)]
        assert statuses.count(200) >= 40 - REFUSALS
        assert proxy.router.known.fleet.is_up("e0")
        await until(lambda: not proxy.router.known.fleet.get("e0").health.hollow.doubts)


LONG = STREAM_HEAD + chunk(event("a whole answer") + event(" to it")) + DONE
STOP = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
SHORT = {
    "empty": STREAM_HEAD + chunk(STOP) + DONE,
    "one token": STREAM_HEAD + chunk(event("!") + STOP) + DONE,
    "no content, usage": STREAM_HEAD
    + chunk(STOP + b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":0}}\n\n')
    + DONE,
}


@pytest.mark.parametrize("way", list(SHORT))
async def test_one_that_gives_next_to_nothing_is_left_until_it_gives_more(
    tmp_path: Path, way: str
) -> None:
    scripts = says(SHORT[way]), says(LONG), says(LONG)
    async with fleet(tmp_path, *scripts, health_interval=0.1) as (proxy, engines):
        short = 0
        for i in range(40):
            body = chat(f"t{i}", max_tokens=100)
            got = await proxy.post(body, headers={"X-Session-ID": f"s{i}"})
            short += got.text != "a whole answer to it"
        assert short <= 8
        await until(lambda: not proxy.router.known.fleet.is_up("e0"), "its trial fails")
        async with proxy.http.get("/health") as response:
            told = (await response.json())["instances"]["e0"]
        assert "next to nothing" in told["warnings"][0]
        assert "next to nothing" in told["last_error"]
        engines[0].scripts = [says(LONG)]
        await until(lambda: proxy.router.known.fleet.is_up("e0"), "it is tried again", 15)


@pytest.mark.parametrize("way", list(SHORT))
async def test_next_to_nothing_from_all_or_as_was_asked_for_costs_nobody_anything(
    tmp_path: Path, way: str
) -> None:
    for name, others, most in (("all", SHORT[way], 100), ("asked", LONG, 1)):
        folder = tmp_path / name
        folder.mkdir()
        scripts = says(SHORT[way]), says(others)
        async with fleet(folder, *scripts) as (proxy, engines):
            for i in range(40):
                await proxy.post(chat(f"t{i}", max_tokens=most), headers={"X-Session-ID": f"s{i}"})
            healths = [proxy.router.known.fleet.get(name).health for name in ("e0", "e1")]
            if name == "asked":
                assert not any(health.is_suspect for health in healths)
                assert not any(is_trial(b) for engine in engines for b in engine.posts)
            assert all(health.is_up for health in healths)


async def test_one_whose_trial_takes_its_time_is_not_held_for_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client asks for words, and the engine is slow."""
    monkeypatch.setattr(probes, "TRIAL_S", 0.2)

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b'"max_tokens":%d' % probes.LENGTH_TOKENS in engines[0].posts[-1]:
            await reader.read()  # until the proxy has given up
            return
        await says(SHORT["one token"])(reader, writer)

    async with fleet(tmp_path, slow, says(LONG), health_interval=0.1) as (proxy, engines):
        health = proxy.router.known.fleet.get("e0").health
        for i in range(40):
            await proxy.post(chat(f"t{i}", max_tokens=100), headers={"X-Session-ID": f"s{i}"})
            if health.short.is_doubted:
                break
        assert health.short.is_doubted
        await until(lambda: not health.short.is_doubted, "its trial says so")
        await proxy.post(chat("again", max_tokens=100))
        assert not health.short.is_doubted
        assert health.is_up
