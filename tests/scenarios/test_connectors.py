"""Offloads through real sockets with engines whose KV moves in other ways than Mooncake's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import ServedProxy, chat, proxied, until, words

HEAVY: dict[str, Any] = {"warm_threshold": 100, "heavy_threshold": 500, "slow_start": 0.0}
ALWAYS = HEAVY | {"offload_policy": "always", "hedge": False}
OTHERS = ("nixl", "implicit")


async def ask(proxy: ServedProxy, text: str, session: str = "s", **more: Any) -> Any:
    answer = await proxy.post(chat(text, **more), headers={"X-Session-ID": session})
    assert answer.status == 200, answer.body
    return answer


def _is_down(proxy: ServedProxy, name: str) -> bool:
    return not proxy.router.known.fleet.is_up(name)


def moved(fleet: Any) -> float:
    return float(sum(e.stats()["prompt_external_tokens"] for e in fleet.engines))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("stream", [True, False])
async def test_kv_moves_and_the_output_is_the_same(tmp_path: Path, name: str, stream: bool) -> None:
    sim = {"kv_connector": name}
    async with proxied(tmp_path, sim=sim, kv_connector=name, **ALWAYS) as (proxy, fleet):
        texts = [words(n, f"t{n}-") for n in (600, 900, 1500)]
        got = [await ask(proxy, t, f"s{t[:5]}", stream=stream) for t in texts]
        records = await proxy.records(3)
        assert {(r["route_class"], r["fallback"]) for r in records} == {("HEAVY_P2P", None)}
        assert moved(fleet) > 2800
        assert proxy.metric("offload_kv_misses_total") == 0
        await proxy.at_rest()
    folder = tmp_path / "alone"
    folder.mkdir()
    async with proxied(folder, sim=sim, kv_connector=name, **HEAVY, offload_policy="never") as (
        proxy,
        _,
    ):
        alone = [await ask(proxy, t, f"s{t[:5]}", stream=stream) for t in texts]

    def said(answer: Any) -> str:
        return str(answer.text if stream else answer.json["choices"][0]["message"]["content"])

    assert [said(a) for a in got] == [said(a) for a in alone]


async def test_nixl_p_that_died_is_noticed_by_d_itself(tmp_path: Path) -> None:
    """The session's P is killed and restarted; its blocks are gone, its id is another."""
    sim = {"kv_connector": "nixl"}
    async with proxied(tmp_path, sim=sim, kv_connector="nixl", **ALWAYS) as (proxy, fleet):
        await ask(proxy, words(600, "a"), "s1")
        for engine in fleet.engines:
            name = engine.url.removeprefix("http://")
            await engine.kill()
            await until(partial(_is_down, proxy, name), "down")
            await engine.restart()
            await until(partial(proxy.router.known.fleet.is_up, name), "up")
        before = moved(fleet)
        for i in range(4):
            await ask(proxy, words(600, f"b{i}"), f"t{i}")
        records = await proxy.records(5)
        assert {r["route_class"] for r in records} == {"HEAVY_P2P"}
        assert moved(fleet) - before > 4 * 600
        await proxy.at_rest()


async def test_kv_of_a_moved_session_comes_from_its_old_home(tmp_path: Path) -> None:
    """Round robin places the second turn elsewhere: P computes what is new, D gets all of it."""
    sim = {"kv_connector": "nixl"}
    options = ALWAYS | {"placement": "round-robin"}
    async with proxied(tmp_path, sim=sim, kv_connector="nixl", **options) as (proxy, fleet):
        text = words(2000)
        await ask(proxy, text, max_tokens=1)
        computed = {e.url: e.stats()["prompt_computed_tokens"] for e in fleet.engines}
        await ask(proxy, text + " " + words(30, "m"))
        first, second = await proxy.records(2)
        assert second["prefill_instance"] == first["decode_instance"]
        assert second["decode_instance"] != first["decode_instance"]
        assert moved(fleet) > 2000
        more = sum(e.stats()["prompt_computed_tokens"] - computed[e.url] for e in fleet.engines)
        assert more < 100
        await proxy.at_rest()
