"""What engines say of themselves: asleep or paused, how long a prompt may be, which models."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from proxy.core.fleet.health import Health, State
from tests.support.admin import call
from tests.support.harness import Answer, RawEngine, ServedProxy, plain, until
from tests.support.told_engine import ToldEngine, card

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SPEECH = "/v1/audio/transcriptions"


def chat(text: str = "hi", model: str = "m", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}]} | more


@asynccontextmanager
async def fleet(tmp_path: Path, *engines: ToldEngine, **options: Any) -> AsyncIterator[ServedProxy]:
    """A proxy in front of these engines, which are named e0, e1, ..."""
    defaults: dict[str, Any] = {"kv_connector": "none", "scrape_interval": 0.05, "slow_start": 0}
    async with AsyncExitStack() as stack:
        urls = []
        for i, engine in enumerate(engines):
            await stack.enter_async_context(engine)
            urls.append(f"e{i}={engine.url}")
        proxy = ServedProxy(tmp_path / "log", urls, **(defaults | options))
        await stack.enter_async_context(proxy)
        await proxy.up()
        reports = proxy.server.state.instances.reports
        await until(lambda: len(reports) == len(engines), "metrics are read")
        yield proxy


def health_of(proxy: ServedProxy, name: str = "e0") -> Health:
    found: Health = proxy.router.known.fleet.get(name).health
    return found


def rest_of(proxy: ServedProxy, name: str = "e0") -> State | None:
    return health_of(proxy, name).rest


def told_of(proxy: ServedProxy, name: str = "e0") -> str:
    """What /health warns of."""
    return " | ".join(proxy.server.state.instances.warnings.get(name, {}).values())


async def asked_at(proxy: ServedProxy, count: int = 6, prefix: str = "s") -> set[str]:
    """The instances that serve so many sessions."""
    names = []
    for i in range(count):
        answer = await proxy.post(chat(f"q {i}"), headers={"X-Session-ID": f"{prefix}{i}"})
        assert answer.status == 200
        names.append(answer.headers["X-Cache-Proxy-Instance"])
    return set(names)


ASLEEP: list[tuple[str, dict[str, bool], str | None, State]] = [
    ("weights offloaded", {}, "weights_offloaded", State.ASLEEP),
    ("all discarded", {}, "discard_all", State.ASLEEP),
    ("level 0", {}, "none", State.ASLEEP),
    ("only its weights are back", {"is_sleeping": True}, "awake", State.ASLEEP),
    ("paused", {"is_sleeping": False, "is_paused": True}, "awake", State.PAUSED),
]


@pytest.mark.parametrize(
    ("flags", "metric", "state"), [c[1:] for c in ASLEEP], ids=[c[0] for c in ASLEEP]
)
async def test_one_that_rests_gets_nothing_until_it_is_awake(
    tmp_path: Path, flags: dict[str, bool], metric: str, state: State
) -> None:
    rests, other = ToldEngine(), ToldEngine()
    rests.sleep_state = "awake"
    rests.flags = dict.fromkeys(flags, False)
    async with fleet(tmp_path, rests, other) as proxy:
        rests.sleep_state, rests.flags = metric, flags
        await until(lambda: rest_of(proxy) is state, "it is known to rest")
        assert await asked_at(proxy) == {"e1"}
        assert rests.asked == []
        _, (listed, _) = await call(proxy, "GET", "/instances")
        assert (listed["state"], listed["is_up"]) == (state, True)
        _, health = await call(proxy, "GET", "/health")
        assert health["instances"]["e0"]["state"] == state
        assert proxy.metric("instance_healthy", upstream="e0") == 0
        assert proxy.metric("breaker_state", upstream="e0") == list(State).index(state)
        rests.sleep_state, rests.flags = "awake", dict.fromkeys(flags, False)
        await until(lambda: rest_of(proxy) is None, "it is awake")
        assert "e0" in await asked_at(proxy, prefix="new")
        await proxy.at_rest()


async def test_where_all_rest_it_is_said_with_when_to_come_again(tmp_path: Path) -> None:
    one, other = ToldEngine("m", "n"), ToldEngine()
    async with fleet(tmp_path, one, other) as proxy:
        one.sleep_state = other.sleep_state = "discard_all"
        await until(lambda: rest_of(proxy) and rest_of(proxy, "e1"), "both rest")
        for model in ("m", "n"):
            answer = await proxy.post(chat(model=model))
            assert answer.status == 503
            assert "is asleep or paused" in answer.json["error"]["message"]
            assert 2 <= int(answer.headers["Retry-After"]) <= 30
        assert proxy.rejected("asleep") == 2
        status, ready = await call(proxy, "GET", "/ready")
        assert (status, "asleep" in ready["status"]) == (503, True)
        assert [c["id"] for c in (await call(proxy, "GET", "/v1/models"))[1]["data"]] == ["m", "n"]
        other.sleep_state = "awake"
        await until(lambda: rest_of(proxy, "e1") is None, "one is awake")
        assert (await proxy.post(chat())).status == 200
        answer = await proxy.post(chat(model="n"))
        assert (answer.status, one.asked) == (503, []), "who serves it sleeps still"


async def test_a_request_that_runs_is_not_hurt_by_a_pause(tmp_path: Path) -> None:
    engine, other = ToldEngine(), ToldEngine()
    engine.sleep_state = other.sleep_state = "awake"
    engine.flags = {"is_paused": False}
    async with fleet(tmp_path, engine, other) as proxy:
        other.sleep_state = "discard_all"
        await until(lambda: rest_of(proxy, "e1") is not None, "the other one sleeps")
        async with proxy.http.post(CHAT, json=chat(stream=True)) as answer:
            await answer.content.readany()
            engine.flags = {"is_paused": True}
            await until(lambda: rest_of(proxy) is State.PAUSED, "it is paused")
            engine.streams[0].put_nowait("more")
            engine.streams[0].put_nowait(None)
            body = await answer.content.read()
        assert b"more" in body
        assert body.endswith(b"data: [DONE]\n\n")
        (record,) = await proxy.records(1)
        assert (record["outcome"], record["decode_instance"]) == ("ok", "e0")
        await proxy.at_rest()


async def test_an_engine_that_tells_nothing_is_as_before(tmp_path: Path) -> None:
    engine = ToldEngine()
    engine.flags = {"is_paused": True}
    async with fleet(tmp_path, engine) as proxy:
        assert await asked_at(proxy) == {"e0"}
        assert engine.flags_asked == [], "it serves, so nobody asks"


async def test_an_engine_without_the_metric_is_asked_where_requests_have_no_answer(
    tmp_path: Path,
) -> None:
    engine, other = ToldEngine(), ToldEngine()
    async with fleet(tmp_path, engine, other) as proxy:
        engine.flags, engine.is_stuck = {"is_paused": True}, True
        other.sleep_state = "discard_all"
        await until(lambda: rest_of(proxy, "e1") is not None, "the other one sleeps")
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(proxy.post(chat()))
            await until(lambda: rest_of(proxy) is State.PAUSED, "somebody has asked")
            engine.flags = {"is_paused": False}
            await until(lambda: rest_of(proxy) is None, "it goes on")
            engine.free()
        assert waiting.result().status == 200


async def test_late_probes_eject_nobody_that_serves(tmp_path: Path) -> None:
    engine, other = ToldEngine(), ToldEngine()
    async with fleet(tmp_path, engine, other, health_timeout=0.1) as proxy:
        async with proxy.http.post(
            CHAT, json=chat(stream=True), headers={"X-Session-ID": "s"}
        ) as r:
            await r.content.readany()
            served = engine if engine.streams else other
            health = health_of(proxy, "e0" if served is engine else "e1")
            served.is_late = True
            probes = health.probes

            def streams_on() -> bool:
                served.streams[0].put_nowait("word")
                return health.probes > probes + 4

            await until(streams_on, "five probes were late")
            assert health.is_up
            await until(lambda: not health.is_up, "the stream is silent too")
            r.close()


async def test_late_probes_beside_answers_in_one_piece(tmp_path: Path) -> None:
    engine = ToldEngine()
    async with fleet(tmp_path, engine, health_timeout=0.1) as proxy:
        health = health_of(proxy)
        engine.is_late = True
        probes = health.probes

        async def serves() -> bool:
            assert (await proxy.post(chat())).status == 200
            return health.probes > probes + 4

        await until(serves, "five probes were late")
        assert health.is_up


def too_long(length: int, form: str = "openai") -> web.Response:
    message = f"This model's maximum context length is {length} tokens."
    error: dict[str, object] = {"message": message, "type": "BadRequestError", "code": 400}
    body = {"error": error} if form == "openai" else {"type": "error", "error": error}
    return web.json_response(body, status=400)


async def test_a_prompt_goes_where_it_fits(tmp_path: Path) -> None:
    short, long = ToldEngine(cards=[card("m", 2000)]), ToldEngine(cards=[card("m", 64_000)])
    async with fleet(tmp_path, short, long) as proxy:
        for i in range(4):
            answer = await proxy.post(chat("x" * 16_000 + str(i)))
            assert answer.headers["X-Cache-Proxy-Instance"] == "e1"
        assert short.asked == []
        assert await asked_at(proxy, 8) == {"e0", "e1"}, "short prompts go to both"
        _, models = await call(proxy, "GET", "/v1/models")
        assert [(c["id"], c["max_model_len"]) for c in models["data"]] == [("m", 64_000)]
        await until(lambda: "max_model_len of m is 64000, at e0 2000" in told_of(proxy, "e1"))
        _, health = await call(proxy, "GET", "/health")
        assert any("max_model_len" in text for text in health["instances"]["e1"]["warnings"])


async def test_where_it_fits_nowhere_the_longest_says_so(tmp_path: Path) -> None:
    short, long = ToldEngine(cards=[card("m", 2000)]), ToldEngine(cards=[card("m", 4000)])
    long.answer = lambda _: too_long(4000)
    async with fleet(tmp_path, short, long) as proxy:
        answer = await proxy.post(chat("x" * 80_000))
        assert (answer.status, b"length is 4000" in answer.body) == (400, True)
        assert short.asked == []
        (record,) = await proxy.records(1)
        assert (record["outcome"], record["retries"]) == ("bad_request", 0)


@pytest.mark.parametrize(("path", "form"), [(CHAT, "openai"), (MESSAGES, "messages")])
async def test_one_that_is_too_short_makes_a_longer_one_be_asked(
    tmp_path: Path, path: str, form: str
) -> None:
    """Its estimate was too low; nobody is blamed, and the two together answer."""
    engines = [ToldEngine(cards=[card("m", length)]) for length in (8000, 8000, 64_000)]
    for engine in engines[:2]:
        engine.answer = lambda _: too_long(8000, form)
    async with fleet(tmp_path, *engines) as proxy:
        for i in range(6):
            body, headers = chat(f"q {i}", stream=False), {"X-Session-ID": f"s{i}"}
            assert (await proxy.post(body, path, headers=headers)).status == 200
        assert len(engines[2].asked) == 6
        records = await proxy.records(6)
        refused = len(engines[0].asked) + len(engines[1].asked)
        assert sum(record["retries"] for record in records) == refused > 0
        assert {record["retries"] for record in records} <= {0, 1}, "not to the other short one"
        assert {m.health.state(0.0) for m in proxy.router.known.fleet.members()} == {State.HEALTHY}
        await proxy.at_rest()


async def test_another_400_is_an_answer(tmp_path: Path) -> None:
    short, long = ToldEngine(cards=[card("m", 8000)]), ToldEngine(cards=[card("m", 64_000)])
    for engine in (short, long):
        engine.answer = lambda _: web.json_response({"error": {"message": "no"}}, status=400)
    async with fleet(tmp_path, short, long) as proxy:
        for i in range(4):
            assert (await proxy.post(chat(str(i)))).json == {"error": {"message": "no"}}
        assert len(short.asked) + len(long.asked) == 4


async def test_while_the_one_that_can_hold_it_is_away_a_client_comes_again(tmp_path: Path) -> None:
    short, long = ToldEngine(cards=[card("m", 2000)]), ToldEngine(cards=[card("m", 64_000)])
    async with fleet(tmp_path, short, long) as proxy:
        long.sleep_state = "discard_all"
        await until(lambda: rest_of(proxy, "e1") is not None, "the longer one sleeps")
        answers, short.answer = short.answer, lambda _: too_long(2000)
        refused = await proxy.post(chat("x" * 80_000))
        assert (refused.status, len(short.asked)) == (503, 1), (
            "its length is estimated, so one asks"
        )
        assert int(refused.headers["Retry-After"]) >= 1
        short.answer = answers
        assert (await proxy.post(chat("y" * 80_000))).status == 200, "the estimate was wrong"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", MESSAGES, RESPONSES, "/v1/embeddings"])
async def test_an_unknown_model_is_denied_here(tmp_path: Path, path: str) -> None:
    engines = ToldEngine("a", "org/b"), ToldEngine("a")
    async with fleet(tmp_path, *engines) as proxy:
        body = chat(model="nobody") | {"prompt": "x", "input": "x"}
        answer = await proxy.post(body, path)
        error = answer.json["error"]
        assert answer.status == 404
        assert "`nobody` does not exist" in error["message"]
        assert "a, org/b" in error["message"]
        assert [engine.asked for engine in engines] == [[], []]
        (record,) = await proxy.records(1)
        assert (record["outcome"], record["model"]) == ("bad_request", "nobody")
        engines[1].cards.append(card("nobody"))
        await until(lambda: proxy.router.known.fleet.serves("nobody"), "its list is read again")
        assert (await proxy.post(body, path)).status == 200


async def test_where_the_models_of_one_are_unknown_it_is_asked(tmp_path: Path) -> None:
    engine = ToldEngine("a")
    async with fleet(tmp_path, engine) as proxy:
        await call(proxy, "POST", "/instances", {"instance": "new=127.0.0.1:9"})
        assert (await proxy.post(chat(model="nobody"))).status == 200
        assert len(engine.asked) == 1


async def get(proxy: ServedProxy, path: str, method: str = "GET") -> Answer:
    url = URL(proxy.server.url + path, encoded=True)
    async with proxy.http.request(method, url) as response:
        return Answer(response.status, response.headers, await response.read())


async def test_one_models_card(tmp_path: Path) -> None:
    one, other = (
        ToldEngine(cards=[card("m", 2000), card("org/n")]),
        ToldEngine(cards=[card("m", 9000)]),
    )
    async with fleet(tmp_path, one, other) as proxy:
        for path, model, length in (
            ("m", "m", 9000),
            ("org/n", "org/n", 131_072),
            ("org%2Fn", "org/n", 131_072),
        ):
            answer = await get(proxy, f"/v1/models/{path}")
            assert (answer.status, answer.json["id"]) == (200, model)
            assert answer.json["max_model_len"] == length
        answer = await get(proxy, "/v1/models/nobody")
        assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")
        assert "m, org/n" in answer.json["error"]["message"]
        assert (await get(proxy, "/v1/models/m", "POST")).status == 405
        assert one.asked == other.asked == []


def form(model: str, *, is_last: bool, size: int) -> aiohttp.FormData:
    made = aiohttp.FormData()
    file = io.BytesIO(b"RIFF" * (size // 4))
    fields: list[tuple[str, Any, str | None]] = [("model", model, None), ("file", file, "a.wav")]
    for name, value, filename in reversed(fields) if is_last else fields:
        made.add_field(name, value, filename=filename)
    return made


@pytest.mark.parametrize("size", [1000, 3 << 20])
@pytest.mark.parametrize("is_last", [False, True])
async def test_an_upload_goes_where_its_model_is(tmp_path: Path, size: int, is_last: bool) -> None:
    chats, ears = [ToldEngine("chat") for _ in range(3)], ToldEngine("ears")
    async with fleet(tmp_path, *chats, ears) as proxy:
        ears.answer = lambda _: web.json_response({"text": "hello"})
        for _ in range(3):
            async with proxy.http.post(SPEECH, data=form("ears", is_last=is_last, size=size)) as r:
                assert (r.status, await r.json()) == (200, {"text": "hello"})
        assert [engine.asked for engine in chats] == [[], [], []]
        assert all(len(body) > size for _, body in ears.asked)
        assert {record["model"] for record in await proxy.records(3)} == {"ears"}
        async with proxy.http.post(SPEECH, data=form("nobody", is_last=is_last, size=size)) as r:
            assert (r.status, (await r.json())["error"]["param"]) == (404, "model")
        await proxy.at_rest()


async def test_cards_of_another_model_under_one_name(tmp_path: Path) -> None:
    engines = (
        ToldEngine(cards=[card("m", root="org/m")]),
        ToldEngine(cards=[card("m", root="org/m-fp8")]),
    )
    async with fleet(tmp_path, *engines) as proxy:
        await until(lambda: "root of m is org/m-fp8, at e0 org/m" in told_of(proxy, "e1"))
        assert told_of(proxy, "e0") == ""
        await call(proxy, "DELETE", "/instances/e0")
        await until(lambda: told_of(proxy, "e1") == "", "nobody is left to differ from")


async def test_of_very_many_models_the_first_are_compared(tmp_path: Path) -> None:
    names = [f"m{i}" for i in range(300)]
    roots = {"m1": "other", "m299": "other"}
    engines = (
        ToldEngine(cards=[card(name, root="org") for name in names]),
        ToldEngine(cards=[card(name, root=roots.get(name, "org")) for name in names]),
    )
    async with fleet(tmp_path, *engines) as proxy:
        await until(lambda: "root of m1 is other, at e0 org" in told_of(proxy, "e1"))
        assert "m299" not in told_of(proxy, "e1")


async def test_start_times_that_go_back_and_forth(tmp_path: Path) -> None:
    engine = ToldEngine()
    async with fleet(tmp_path, engine) as proxy:
        reports = proxy.server.state.instances.reports

        def is_read(start_s: float) -> bool:
            return "e0" in reports and reports["e0"].start_s == start_s

        for start_s in (2000.0, 1000.0):
            assert told_of(proxy) == ""
            engine.start_s = start_s
            await until(partial(is_read, start_s))
        assert "engines of several start times answer at its address" in told_of(proxy)


async def test_a_name_of_several_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def look_up(host: str, port: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.1"] if host == "engines.test" else [host]

    async with ToldEngine() as engine:
        url = f"e0=engines.test:{engine.port}"
        async with ServedProxy(tmp_path / "log", [url], kv_connector="none") as proxy:
            proxy.server.state.instances.connect_options.resolver.look_up = look_up
            await until(lambda: "2 addresses (127.0.0.1, 127.0.0.2)" in told_of(proxy))
            _, health = await call(proxy, "GET", "/health")
            assert "engines.test" in health["instances"]["e0"]["warnings"][-1]


async def test_an_adapter_has_the_context_of_its_base(tmp_path: Path) -> None:
    def cards(length: int, path: str) -> list[dict[str, object]]:
        return [card("m", length), card("lora", None, root=path, parent="m")]

    short, long = ToldEngine(cards=cards(2000, "/a")), ToldEngine(cards=cards(64_000, "/b"))
    async with fleet(tmp_path, short, long) as proxy:
        for i in range(4):
            assert (await proxy.post(chat("x" * 16_000 + str(i), model="lora"))).status == 200
        assert short.asked == []
        assert "root" not in told_of(proxy, "e1")


async def test_another_process_serves_another_model_at_once(tmp_path: Path) -> None:
    engine = ToldEngine("old")
    async with fleet(tmp_path, engine) as proxy:
        engine.cards, engine.start_s = [card("new")], 2000.0
        await until(lambda: proxy.router.known.fleet.serves("new"), "its list is read again")
        assert (await proxy.post(chat(model="new"))).status == 200
        assert (await proxy.post(chat(model="old"))).status == 404


async def test_the_warning_of_a_list_that_cannot_be_read_stays(tmp_path: Path) -> None:
    async with RawEngine() as engine:
        own: dict[str, Any] = {"kv_connector": "none", "health_interval": 0.05}
        async with ServedProxy(tmp_path / "log", [f"e0={engine.address}"], **own) as proxy:
            await proxy.up()
            await until(lambda: proxy.router.known.fleet.get("e0").models, "models are known")
            nest = b"[" * 300 + b"]" * 300
            engine.gets["/v1/models"] = plain(b'{"data":[{"id":"m","x":%b}]}' % nest)

            def asked() -> int:
                return sum(b"/v1/models" in head for head in engine.heads)

            for _ in range(3):
                proxy.router.known.fleet.reread_models()
                await until(partial(_is_more, asked, asked() + 1), "it is asked again")
                assert "no list of models" in told_of(proxy)


def _is_more(count: Callable[[], int], than: int) -> bool:
    return count() > than
