"""P2P offload through real sockets: KV moves, output stays the same, failure is invisible."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from replayer.simulator.host import SimFleet
from tests.support.harness import (
    ANSWER,
    RawEngine,
    Script,
    ServedProxy,
    chat,
    plain,
    proxied,
    resets,
    says,
    stalls,
    until,
    words,
)

HEAVY: dict[str, Any] = {"warm_threshold": 100, "heavy_threshold": 500}
ALWAYS = HEAVY | {"offload_policy": "always"}


async def ask(proxy: ServedProxy, text: str, session: str = "s", **more: Any) -> Any:
    answer = await proxy.post(chat(text, **more), headers={"X-Session-ID": session})
    assert answer.status == 200
    return answer


async def test_kv_moves_and_is_counted_alike_on_both_sides(tmp_path: Path) -> None:
    async with proxied(tmp_path, **ALWAYS) as (proxy, fleet):
        await ask(proxy, words(2000))
        (record,) = await proxy.records(1)
        assert record["route_class"] == "HEAVY_P2P"
        assert record["offload_decision_reason"] == "policy_always"
        assert record["fallback"] is None
        assert record["prefill_instance"] != record["decode_instance"]
        stamps = ("t_prefill_sent", "t_prefill_done", "t_decode_sent", "t_first_token", "t_done")
        assert [record[s] for s in stamps] == sorted(record[s] for s in stamps)
        # Mooncake: after a good pull D counts the whole prompt as cached.
        assert record["cached_tokens"] == record["prompt_tokens"]
        await until(lambda: len(fleet.records) >= 2, "both legs logged by the engines")
        by_id = {r["request_id"]: r for r in fleet.records}
        sent = next(r for i, r in by_id.items() if i.endswith("-p"))["sent_tokens"]
        got = next(r for i, r in by_id.items() if not i.endswith("-p"))["external_tokens"]
        assert sent == got > 1900
        assert proxy.metric("offload_kv_misses_total") == 0
        assert proxy.metric("prefill_leg_seconds_count") == 1
        for what in ("ttft", "prefill", "transfer"):
            assert record[f"predicted_{what}_s"] > 0
            assert proxy.metric("prediction_error_ratio_count", what=what) == 1
        await proxy.at_rest()


@pytest.mark.parametrize("stream", [True, False])
async def test_output_is_that_of_a_colocated_run(tmp_path: Path, stream: bool) -> None:
    texts = [words(n, f"t{n}-") for n in (600, 900, 1500)]

    async def run(policy: str) -> list[Any]:
        folder = tmp_path / policy
        folder.mkdir()
        async with proxied(folder, **HEAVY, offload_policy=policy) as (proxy, _):
            answers = [await ask(proxy, t, f"s{t[:5]}", stream=stream) for t in texts]
            classes = {r["route_class"] for r in await proxy.records(3)}
            assert classes == {"HEAVY_P2P" if policy == "always" else "HEAVY_COLO"}
            if stream:
                return [a.text for a in answers]
            return [a.json["choices"][0]["message"]["content"] for a in answers]

    assert await run("always") == await run("never")


async def test_the_session_stays_on_d(tmp_path: Path) -> None:
    warm = {"warm_threshold": 250}  # more than a block of text that is not full
    async with proxied(tmp_path, **ALWAYS | warm) as (proxy, _):
        text = words(2000)
        await ask(proxy, text)
        await ask(proxy, text + " more")
        first, second = await proxy.records(2)
        assert second["decode_instance"] == first["decode_instance"]
        assert second["route_class"] == "WARM"
        assert second["cached_tokens"] > 1900


async def test_the_heuristic_offloads_when_d_decodes(tmp_path: Path) -> None:
    sim = {"speed": 2.0}  # the stream is there until long after the HEAVY one has been placed
    options = HEAVY | {"offload_policy": "seed-heuristic"}
    async with proxied(tmp_path, sim=sim, **options) as (proxy, _):
        async with asyncio.TaskGroup() as group:
            running = group.create_task(ask(proxy, words(50), max_tokens=5000))
            loads = proxy.router.known.ledger.load
            members = proxy.router.known.fleet.members()
            await until(lambda: any(loads(m.instance.name).decode_tokens for m in members))
            await ask(proxy, words(2000))
            assert not running.done()
            running.cancel()
        records = {r["isl_tokens"] > 500: r for r in await proxy.records(2)}
        assert records[True]["offload_decision_reason"] == "p_idle_d_busy"
        assert records[True]["decode_instance"] == records[False]["decode_instance"]
        assert {c["instance"] for c in records[True]["candidates"]} == {
            m.instance.name for m in members
        }
        await proxy.at_rest()


LENGTH = plain(b'{"choices":[{"index":0,"finish_reason":"length"}],"usage":{"prompt_tokens":9}}')
BOOT = plain(b'{"0":{"engine_id":"e-1","worker_addr":{}}}')


class FakePeer:
    """P as scripted servers (API and bootstrap), D as a scripted server that always answers."""

    def __init__(self, tmp_path: Path, p: Script, boot: bytes | None = BOOT, **more: Any) -> None:
        self.p, self.d = RawEngine(p), RawEngine(says(ANSWER))
        self.p.gets["/query"] = says(b"", close=True) if boot is None else boot
        self._log = tmp_path / "log"
        self._options = ALWAYS | {"health_interval": 60} | more

    async def run(self) -> tuple[ServedProxy, dict[str, Any]]:
        async with self.p, self.d:
            # D is asked first: with equal loads the first instance is chosen.
            instances = [f"d={self.d.address}", f"p={self.p.address};bootstrap={self.p.port}"]
            async with ServedProxy(self._log, instances, **self._options) as proxy:
                answer = await ask(proxy, words(2000))
                assert answer.text == "fine"
                (record,) = await proxy.records(1)
                await proxy.at_rest()
                return proxy, record


@pytest.mark.parametrize(
    ("name", "p", "boot", "fallback"),
    [
        ("P answers 500", says(plain(b"{}", "500 Oops")), BOOT, "p_error"),
        ("P answers 400", says(plain(b"{}", "400 Bad Request")), BOOT, "p_error"),
        ("P is busy", says(plain(b"{}", "503 Busy")), BOOT, "p_error"),
        ("P answers no JSON", says(plain(b"<html>")), BOOT, "p_error"),
        ("P hangs up", resets(), BOOT, "p_error"),
        ("P cuts its answer", resets(LENGTH[:-5]), BOOT, "p_error"),
        ("P is late", stalls(), BOOT, "p_timeout"),
        (
            "P stopped",
            says(plain(b'{"choices":[{"finish_reason":"stop"}]}')),
            BOOT,
            "p_finish_reason",
        ),
        ("no bootstrap", says(LENGTH), None, "engine_id_unknown"),
        ("empty bootstrap", says(LENGTH), plain(b"{}"), "engine_id_unknown"),
        ("odd bootstrap", says(LENGTH), plain(b'{"0":{"engine_id":7}}'), "engine_id_unknown"),
    ],
)
async def test_a_failed_prefill_means_colocation(
    tmp_path: Path, name: str, p: Script, boot: bytes | None, fallback: str
) -> None:
    # No hedge: on a slow machine it would come before the timeout.
    peer = FakePeer(tmp_path, p, boot, prefill_timeout=0.3, hedge=False)
    proxy, record = await peer.run()
    assert (record["outcome"], record["fallback"]) == ("ok", fallback), name
    assert record["route_class"] == "HEAVY_COLO"
    assert record["offload_decision_reason"] == "prefill_failed"
    assert (record["prefill_instance"], record["first_failed_instance"]) == ("p", "p")
    assert record["first_failure"].startswith(fallback)
    served = [body for body in peer.d.posts if b"cache-proxy-release" not in body]
    assert b"kv_transfer_params" not in served[-1]
    assert proxy.metric("offload_fallbacks_total", reason=fallback) == 1


async def test_the_legs_as_a_good_pair_sees_them(tmp_path: Path) -> None:
    peer = FakePeer(tmp_path, says(LENGTH))
    _, record = await peer.run()
    assert (record["fallback"], record["route_class"]) == (None, "HEAVY_P2P")
    (leg,) = peer.p.posts
    assert b'"max_tokens":1' in leg and b'"stream":false' in leg  # noqa: PT018
    assert b"stream_options" not in leg
    (decode,) = peer.d.posts
    assert b'"remote_engine_id":"e-1"' in decode
    assert decode.startswith(b'{"model":"sim-8b","messages"')


@pytest.mark.parametrize(
    ("name", "first", "fallback", "posts"),
    [
        ("D's KV load fails", says(plain(b"{}", "500 Oops")), "d_failed", 2),
        ("D waits too long", stalls(), "transfer_timeout", 2),
    ],
)
async def test_a_failed_transfer_means_colocation_on_d(
    tmp_path: Path, name: str, first: Script, fallback: str, posts: int
) -> None:
    peer = FakePeer(tmp_path, says(LENGTH), transfer_timeout=0.3)
    peer.d = RawEngine(first, says(ANSWER))
    _, record = await peer.run()
    assert (record["fallback"], record["decode_instance"]) == (fallback, "d"), name
    assert record["first_failed_instance"] == "d"
    assert record["offload_decision_reason"] == "transfer_failed"
    assert len(peer.d.posts) == posts
    assert b"kv_transfer_params" not in peer.d.posts[-1]


async def test_p_dies_between_the_legs(tmp_path: Path) -> None:
    """A Mooncake D would wait for minutes: P's death ends the wait, and D computes itself."""
    options = ALWAYS | {"transfer_timeout": 60, "health_timeout": 0.2}
    async with SimFleet(1, speed=50.0, tick=0.0) as peers, RawEngine(stalls(), says(ANSWER)) as d:
        p = peers.engines[0]
        instances = [f"d={d.address}", f"p={p.url};bootstrap={p.bootstrap_url}"]
        async with ServedProxy(tmp_path / "log", instances, **options) as proxy:
            await proxy.up()
            async with asyncio.TaskGroup() as group:
                asked = group.create_task(ask(proxy, words(2000)))
                await until(lambda: d.posts, "D waits for its KV")
                await p.kill()
                assert (await asked).text == "fine"
            (record,) = await proxy.records(1)
            assert (record["fallback"], record["decode_instance"]) == ("p_gone", "d")
            await proxy.at_rest()


async def test_a_restarted_p_is_asked_under_its_new_id(tmp_path: Path) -> None:
    async with proxied(tmp_path, **ALWAYS, slow_start=0) as (proxy, fleet):

        def down(name: str) -> bool:
            return not proxy.router.known.fleet.is_up(name)

        await ask(proxy, words(600, "a"), "s1")
        for engine in fleet.engines:
            name = engine.url.removeprefix("http://")
            await engine.kill()
            await until(partial(down, name), "down")
            await engine.restart()
            await until(partial(proxy.router.known.fleet.is_up, name), "up")
        for i in range(4):
            await ask(proxy, words(600, f"b{i}"), f"t{i}")
        records = await proxy.records(5)
        assert {r["route_class"] for r in records} == {"HEAVY_P2P"}
        assert all(r["cached_tokens"] == r["prompt_tokens"] for r in records)
