"""The operator's side: liveness, readiness, instances, sessions, models, thresholds."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.admin.endpoints import KEPT_LISTS, KEPT_S, KeptCards
from proxy.config.options import Settings
from proxy.core.placement.policies import POLICIES
from proxy.core.placement.stored import from_json
from proxy.net.upstream.client import MOST_CARDS, model_cards
from tests.support.admin import call
from tests.support.harness import (
    RawEngine,
    Script,
    ServedProxy,
    addresses,
    chat,
    proxied,
    says,
    until,
    words,
)


async def test_probes(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, fleet):
        assert (await call(proxy, "GET", "/live"))[0] == 200
        assert (await call(proxy, "GET", "/ready"))[0] == 200
        status, health = await call(proxy, "GET", "/health")
        assert (status, [i["is_up"] for i in health["instances"].values()]) == (200, [True, True])
        await fleet.engines[0].kill()
        await until(lambda: len(proxy.router.known.fleet.up()) == 1, "one down")
        status, health = await call(proxy, "GET", "/health")
        first, second = health["instances"].values()
        assert (status, first["is_up"], second["is_up"]) == (200, False, True)
        assert "connect" in first["last_error"]
        assert first["since"] - 60 < first["last_error_at"] <= first["since"] + 60
        assert (second["last_error"], second["last_error_at"]) == (None, None)
        _, (row, _) = await call(proxy, "GET", "/instances")
        assert row["last_error"] == first["last_error"]
        assert row["last_error_at"] >= first["last_error_at"], "unix seconds, as in /health"
        await fleet.engines[1].kill()
        await until(lambda: not proxy.router.known.fleet.up(), "both down")
        assert (await call(proxy, "GET", "/health"))[0] == 503
        assert (await call(proxy, "GET", "/ready"))[0] == 503
        assert (await call(proxy, "GET", "/live"))[0] == 200


async def test_before_the_first_answer_health_says_so_and_requests_are_tried(
    tmp_path: Path,
) -> None:
    async with proxied(tmp_path, 2) as (proxy, _):
        for member in proxy.router.known.fleet.members():
            member.health.was_seen = False
        status, health = await call(proxy, "GET", "/health")
        said = "no instance has answered yet"
        assert (status, health["status"]) == (503, said)
        assert all(one["is_up"] for one in health["instances"].values())
        assert await call(proxy, "GET", "/ready") == (503, {"status": said})


async def test_health_tells_who_drains(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2) as (proxy, _):
        a, b = (m.instance.name for m in proxy.router.known.fleet.members())
        proxy.router.known.fleet.get(a).is_draining = True
        status, health = await call(proxy, "GET", "/health")
        told = {name: one["is_draining"] for name, one in health["instances"].items()}
        assert (status, health["status"], told) == (200, "ok", {a: True, b: False})


async def test_draining_is_not_ready(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        state = proxy.server.state
        state.in_flight.is_leaving = state.in_flight.is_draining = True
        assert await call(proxy, "GET", "/ready") == (503, {"status": "draining"})
        answer = await proxy.post(chat("x"))
        assert (answer.status, answer.headers["Connection"]) == (200, "close")


async def test_models_are_a_union(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        _, models = await call(proxy, "GET", "/v1/models")
        assert [card["id"] for card in models["data"]] == ["sim-8b"]


async def test_nothing_changes_while_another_process_takes_over(tmp_path: Path) -> None:
    """It has a copy of what was ordered before, and would not know of it."""
    async with proxied(tmp_path, 2) as (proxy, _):
        restart = proxy.server._hot_restart
        _, (first, *_) = await call(proxy, "GET", "/instances")
        path = f"/instances/{first['name']}?drain=true"
        restart._is_under_way = True
        assert (await call(proxy, "DELETE", path))[0] == 503
        assert (await call(proxy, "GET", "/instances"))[0] == 200
        restart._is_under_way = False
        assert (await call(proxy, "DELETE", path))[0] == 202
        restart.is_done.set()
        assert (await call(proxy, "DELETE", path))[0] == 503


async def test_instances_come_and_go(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2, offload_policy="never") as (proxy, fleet):
        first, second = addresses(fleet)
        _, listed = await call(proxy, "GET", "/instances")
        assert [i["is_up"] for i in listed] == [True, True]
        name = listed[1]["name"]
        assert (await call(proxy, "DELETE", f"/instances/{name}?drain=true"))[0] == 202
        for i in range(4):
            assert (await proxy.post(chat("x"), headers={"X-Session-ID": f"s{i}"})).headers[
                "X-Cache-Proxy-Instance"
            ] == listed[0]["name"]
        await until(lambda: proxy.router.known.fleet.get(name) is None, "drained, so removed")
        assert (await call(proxy, "DELETE", f"/instances/{name}"))[0] == 404
        assert (await call(proxy, "POST", "/instances", {"instance": f"new={second}"}))[0] == 201
        assert (await call(proxy, "POST", "/instances", {"instance": f"new={second}"}))[0] == 409
        assert (await call(proxy, "POST", "/instances", {"instance": first}))[0] == 409
        capped = {"instance": "127.0.0.1:9;thermal=plugin"}  # by control, which is off
        for bad in (
            {},
            {"instance": 7},
            {"instance": "nowhere"},
            {"instance": "http://a:1/x"},
            capped,
        ):
            assert (await call(proxy, "POST", "/instances", bad))[0] == 400
        await until(lambda: proxy.router.known.fleet.is_up("new"), "it has answered a probe")
        seen = {
            (await proxy.post(chat("x"), headers={"X-Session-ID": f"t{i}"})).headers[
                "X-Cache-Proxy-Instance"
            ]
            for i in range(4)
        }
        assert seen == {"new"}, "it has the fewest sessions"
        await proxy.at_rest()


async def test_removing_an_instance_under_a_stream_ends_that_stream_only(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2, sim={"speed": 1.0}) as (proxy, _):
        async with proxy.http.post("/v1/chat/completions", json=chat("x", max_tokens=4000)) as r:
            await r.content.readany()
            name = r.headers["X-Cache-Proxy-Instance"]
            await call(proxy, "DELETE", f"/instances/{name}")
            r.close()
        await proxy.at_rest()
        assert [m.instance.name for m in proxy.router.known.fleet.members()] != [name]


async def test_the_last_decisions(tmp_path: Path) -> None:
    async with proxied(tmp_path, heavy_threshold=500, warm_threshold=100) as (proxy, _):
        for i, size in enumerate((10, 1000, 20)):
            await proxy.post(chat(words(size)), headers={"X-Request-Id": f"r{i}"})
        _, found = await call(proxy, "GET", "/decisions?n=2")
        assert [d["request_id"] for d in found] == ["r2", "r1"]
        assert found[1]["route_class"] == "HEAVY_COLO"
        assert {c["instance"] for c in found[1]["candidates"]} == {
            state.name for state in proxy.router.known.fleet.states
        }
        for bad in ("0", "201", "x", "-1", "9" * 5000):
            assert (await call(proxy, "GET", f"/decisions?n={bad}"))[0] == 400


async def test_one_decision_can_be_made_again(tmp_path: Path) -> None:
    async with proxied(tmp_path, heavy_threshold=500, warm_threshold=100) as (proxy, _):
        for i, size in enumerate((10, 1000)):
            await proxy.post(chat(words(size)), headers={"X-Request-Id": f"r{i}"})
        status, found = await call(proxy, "GET", "/decisions/r1")
        assert (status, found["request_id"], found["route_class"]) == (200, "r1", "HEAVY_COLO")
        again = POLICIES["cost"](from_json(found["columns"]))
        assert again.decode.instance.name == found["decode_instance"]
        assert again.reason == found["offload_decision_reason"]
        assert (await call(proxy, "GET", "/decisions/r2"))[0] == 404


async def test_every_decision_shows_its_options_and_the_shadow(tmp_path: Path) -> None:
    options: dict[str, Any] = {"offload_policy": "cost", "shadow_policy": "always"}
    options |= {"heavy_threshold": 500, "warm_threshold": 100}
    async with proxied(tmp_path, **options) as (proxy, _):
        for size in (10, 2000):
            await proxy.post(chat(words(size)))
        _, found = await call(proxy, "GET", "/decisions")
        large, small = found
        for decision in found:
            costs = [c["cost_s"] for c in decision["candidates"] if c["prefill"] is None]
            assert costs == sorted(costs)
            assert decision["predicted_ttft_bound_s"] >= decision["predicted_ttft_s"] > 0
            assert decision["predicted_prefill_s"] > 0
        assert small["shadow"]["agrees"] is True
        assert large["shadow"]["policy"] == "always"
        assert large["shadow"]["route_class"] == "HEAVY_P2P"
        assert large["shadow"]["reason"] == "policy_always"
        records = {r["request_id"]: r for r in await proxy.records(2)}
        assert records[large["request_id"]]["candidates"] == large["candidates"]
        assert records[large["request_id"]]["shadow"] == large["shadow"]
        agreed = "true" if large["shadow"]["agrees"] else "false"
        assert proxy.metric("shadow_decisions_total", policy="always", agrees=agreed) >= 1
        assert proxy.metric("prediction_error_ratio_count", what="ttft") == 2
        _, listed = await call(proxy, "GET", "/instances")
        ratios = listed[0]["residual_ratios"]
        assert ratios["queue_and_prefill"] == {"p50": None, "p95": None}, "too few yet"


async def test_an_instance_has_the_lines_that_its_times_are_predicted_by(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1, max_num_batched_tokens=2048) as (proxy, _):
        _, (before,) = await call(proxy, "GET", "/instances")
        for seed in "abc":
            await proxy.post(chat(words(3000, seed), max_tokens=20))
        _, (row,) = await call(proxy, "GET", "/instances")
    lines, new = row["lines"], 8192
    assert lines["max_num_batched_tokens"] == 2048
    assert all(lines[name] != before["lines"][name] for name in ("prefill", "step", "way"))
    prefill_s = lines["prefill"]["p"] * new + lines["prefill"]["q"] * new * new / 2
    assert round(new / prefill_s) == row["learned_prefill_tps"]
    known = proxy.router.known.latency
    for line, predicted_s in (("step", known.step_s(row["name"], 500)), ("way", known.way_s(500))):
        assert lines[line]["p"] + lines[line]["q"] * 500 == pytest.approx(predicted_s)


async def test_a_session_can_be_ended(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        await proxy.post(chat("x"), headers={"X-Session-ID": "s/1"})
        assert (await call(proxy, "POST", "/sessions/s%2F1/end"))[0] == 200
        assert (await call(proxy, "POST", "/sessions/s%2F1/end"))[0] == 404


ADMIN = [
    ("GET", "/instances"),
    ("POST", "/instances"),
    ("DELETE", "/instances/x"),
    ("POST", "/sessions/x/end"),
    ("GET", "/decisions"),
    ("GET", "/decisions/r1"),
    ("GET", "/samples"),
    ("GET", "/busy_threshold"),
    ("POST", "/busy_threshold"),
    ("DELETE", "/busy_threshold"),
]


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_the_token_guards_every_admin_path(tmp_path: Path, method: str, path: str) -> None:
    async with proxied(tmp_path, 1, admin_token="s3cret") as (proxy, _):
        for given in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}):
            status, answer = await call(proxy, method, path, {}, headers=given)
            assert (status, answer["error"]["code"]) == (401, 401)
        known = {"Authorization": "Bearer s3cret"}
        assert (await call(proxy, method, path, {}, headers=known))[0] != 401
        assert (await call(proxy, "GET", "/ready"))[0] == 200


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_a_listener_of_their_own(tmp_path: Path, method: str, path: str) -> None:
    async with proxied(tmp_path, 1, admin_port=0) as (proxy, _):
        assert (await call(proxy, method, path, {}))[0] == 404
        async with aiohttp.ClientSession(proxy.server.admin_url) as admin:
            async with admin.request(method, path, json={}) as response:
                assert response.status != 404 or "known" in await response.text() or path[1] == "s"
            async with admin.post("/v1/chat/completions", json=chat("x")) as response:
                assert response.status == 404, "clients are not served there"
            async with admin.get("/metrics") as response:
                assert response.status == 200
        assert (await proxy.post(chat("x"))).status == 200


async def test_the_log_lists_as_many_options_as_it_is_told(tmp_path: Path) -> None:
    options: dict[str, Any] = {"offload_policy": "cost", "log_candidates": 1}
    async with proxied(tmp_path, 3, **options) as (proxy, _):
        for at, most in enumerate((1, 0, 2)):
            proxy.server.state.use(Settings(**vars(proxy.settings) | {"log_candidates": most}))
            await proxy.post(chat(words(10)), headers={"X-Request-Id": f"r{at}"})
            records = {r["request_id"]: r for r in await proxy.records(at + 1)}
            logged = records[f"r{at}"]
            assert len(logged["candidates"]) == most
            if most:
                taken = {c["instance"] for c in logged["candidates"]}
                assert logged["decode_instance"] in taken
        _, found = await call(proxy, "GET", "/decisions")
        assert [len(decision["candidates"]) for decision in found] == [3, 3, 3]


async def test_engines_are_asked_for_their_models_once_for_all_who_want_them() -> None:
    now_s, asked = [0.0], list[int]()
    may_answer = asyncio.Event()
    kept = KeptCards(lambda: now_s[0])

    async def ask() -> dict[str, bytes]:
        asked.append(len(asked))
        await may_answer.wait()
        return {f"m{asked[-1]}": b"{}"}

    async def many(key: str = "k") -> list[dict[str, bytes]]:
        return await asyncio.gather(*(kept.get(key, ask) for _ in range(50)))

    first, waiting = (asyncio.create_task(one) for one in (kept.get("k", ask), many()))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    await asyncio.sleep(0)
    assert len(asked) == 2, "its client has left: one of the others asks"
    may_answer.set()
    assert await waiting == [{"m1": b"{}"}] * 50
    now_s[0] = KEPT_S - 0.01
    assert await many() == [{"m1": b"{}"}] * 50
    assert len(asked) == 2
    now_s[0] = KEPT_S
    assert await many() == [{"m2": b"{}"}] * 50
    for at in range(30):
        now_s[0] += KEPT_S / KEPT_LISTS
        assert await many(f"k{at}") == [{f"m{at + 3}": b"{}"}] * 50
    assert len(kept._rounds) == KEPT_LISTS


async def test_new_keys_wait_for_their_turn_by_address() -> None:
    now_s, asked = [0.0], list[str]()
    kept = KeptCards(lambda: now_s[0])

    def asks(key: str, owner: str) -> asyncio.Task[dict[str, bytes]]:
        async def ask() -> dict[str, bytes]:
            asked.append(key)
            return {key: b"{}"}

        return asyncio.create_task(kept.get(key, ask, owner))

    tasks = [asks(f"k{at}", "mallory") for at in range(KEPT_LISTS + 4)]
    tasks += [asks("k9", "mallory"), asks("own", "alice")]
    await asyncio.sleep(0)
    assert asked == [f"k{at}" for at in range(KEPT_LISTS)]
    assert await asks("k0", "bob") == {"k0": b"{}"}, "what is kept needs no turn"
    tasks[KEPT_LISTS].cancel()
    now_s[0] = KEPT_S / 2
    for at in range(2):
        now_s[0] += KEPT_S
        kept._let_in()
        await asyncio.sleep(0.0)
        assert len(asked) == min(KEPT_LISTS + 4, KEPT_LISTS * (at + 2))
    assert asked[KEPT_LISTS:] == ["own", "k9", "k10", "k11"]
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert done[-2] == {"k9": b"{}"}
    assert not kept._due


async def test_who_waits_for_a_round_has_its_own_turn_for_it() -> None:
    """Another address that wants the same cards may have asked for hundreds before."""
    now_s, asked = [0.0], list[str]()
    kept = KeptCards(lambda: now_s[0])

    def asks(key: str, owner: str) -> asyncio.Task[dict[str, bytes]]:
        async def ask() -> dict[str, bytes]:
            asked.append(owner)
            return {key: b"{}"}

        return asyncio.create_task(kept.get(key, ask, owner))

    tasks = [asks(f"k{at}", "mallory") for at in range(100)]
    tasks += [asks("shared", owner) for owner in ("mallory", "alice", "bob", "alice")]
    await asyncio.sleep(0)
    tasks[-3].cancel()
    now_s[0] = KEPT_S
    kept._let_in()
    await asyncio.sleep(0)
    assert sorted(asked) == sorted([*["mallory"] * (2 * KEPT_LISTS - 1), "bob"])
    assert await asyncio.gather(tasks[-4], *tasks[-2:]) == [{"shared": b"{}"}] * 3
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert not kept._due
    assert not kept._turns


async def test_an_asker_that_leaves_as_its_turn_comes_holds_nobody_up() -> None:
    now_s = [0.0]
    kept = KeptCards(lambda: now_s[0])

    async def ask() -> dict[str, bytes]:
        return {"m": b"{}"}

    kept._begun_s.extend([0.0] * KEPT_LISTS)
    gone, waits = (asyncio.create_task(kept.get("k", ask, owner)) for owner in "ab")
    await asyncio.sleep(0)
    now_s[0] = KEPT_S
    kept._let_in()
    gone.cancel()
    assert await waits == {"m": b"{}"}
    assert not kept._due


async def test_a_failed_round_is_nobody_elses() -> None:
    kept = KeptCards(lambda: 0.0)
    answers: Iterator[ValueError | dict[str, bytes]] = iter([ValueError("no"), {"m": b"{}"}])

    async def ask() -> dict[str, bytes]:
        await asyncio.sleep(0)
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    both = await asyncio.gather(kept.get("k", ask), kept.get("k", ask), return_exceptions=True)
    assert isinstance(both[0], ValueError)
    assert both[1] == {"m": b"{}"}


async def test_a_list_of_models_asks_each_engine_once_a_second(tmp_path: Path) -> None:
    names = ("sim-8b",)
    async with RawEngine(models=names) as a, RawEngine(models=names) as b:
        asked: list[int] = []
        for engine in (a, b):
            cards = engine.gets["/v1/models"]
            engine.gets["/v1/models"] = counted(cards, asked)
        urls = [a.address, b.address]
        async with ServedProxy(tmp_path / "log", urls, health_interval=60) as proxy:
            await proxy.up()
            before = len(asked)
            got = await asyncio.gather(*(call(proxy, "GET", "/v1/models") for _ in range(20)))
            assert [status for status, _ in got] == [200] * 20
            assert {card["id"] for _, said in got for card in said["data"]} == {"sim-8b"}
            one, _ = await call(proxy, "GET", "/v1/models/sim-8b")
            assert one == 200
            assert len(asked) - before == 2
            name = next(iter(proxy.router.known.fleet.members())).instance.name
            await call(proxy, "DELETE", f"/instances/{name}")
            assert (await call(proxy, "GET", "/v1/models"))[0] == 200
            assert len(asked) - before == 3, "another fleet, another list"


def counted(cards: bytes | Script, asked: list[int]) -> Script:
    assert isinstance(cards, bytes)
    said = says(cards)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(1)
        await said(reader, writer)

    return script


async def test_a_round_that_is_over_leaves_no_garbage_behind() -> None:
    now_s, kept = [0.0], KeptCards(lambda: now_s[0])

    async def ask() -> dict[str, bytes]:
        await asyncio.sleep(0)
        return {"m": b"{}"}

    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for at in range(2 * KEPT_LISTS):
            now_s[0] += KEPT_S
            await asyncio.gather(*(kept.get(at, ask) for _ in range(3)))
        gc.collect()
        left = {type(one).__name__ for one in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not left & {"_Round", "_Waiter"}


@pytest.mark.parametrize(("count", "is_read"), [(MOST_CARDS, True), (MOST_CARDS + 1, False)])
def test_a_list_of_too_many_models_is_none(count: int, is_read: bool) -> None:
    cards = [{"id": f"{n:x}"} for n in range(count)]
    assert (model_cards(orjson.dumps({"data": cards})) is not None) is is_read
