"""New options at run time: all of them, or none and a line that says why."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.config.load import load
from proxy.config.options import Settings
from proxy.config.regular_files import read_regular
from proxy.core.admission.gate import ANY_MODEL
from proxy.process import reload
from proxy.process.reload import RELOADABLE
from replayer.simulator.host import SimFleet
from tests.support.harness import ServedProxy, addresses, chat, until
from tests.support.proxy_process import running

FIXED = {
    "port": 0,
    "host": "127.0.0.1",
    "health_interval": 0.05,
    "scrape_interval": 0.1,
}


def toml(instances: list[str], **options: Any) -> str:
    lines = [f"instances = {instances!r}"]
    for name, value in (FIXED | options).items():
        lines.append(f"{name} = {value!r}" if value is not None else "")
    return "\n".join(lines).replace("True", "true").replace("False", "false") + "\n"


@asynccontextmanager
async def from_file(
    tmp_path: Path, instances: list[str], **options: Any
) -> AsyncIterator[tuple[ServedProxy, Path]]:
    path = tmp_path / "proxy.toml"
    log = tmp_path / "log.jsonl"
    options |= {"request_log": str(log)}
    path.write_text(toml(instances, **options))

    def source() -> Settings:
        return load(["--config", str(path)], {}).settings

    given = FIXED | options | {"config": path}
    async with ServedProxy(log, instances, source=source, **given) as proxy:
        await proxy.up()
        yield proxy, path


def rewrite(path: Path, text: str) -> None:
    """As editors and orchestrators do: another file under the same name."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    os.replace(beside, path)


async def test_instances_and_thresholds_change_together(tmp_path: Path) -> None:
    async with SimFleet(3, speed=1.0, tick=0.0) as fleet:
        a, b, c = addresses(fleet)
        log = str(tmp_path / "log.jsonl")
        async with from_file(tmp_path, [a, b]) as (proxy, path):
            reloader, fleet_of = proxy.server.reloader, proxy.router.known.fleet
            body = chat("x", max_tokens=250)
            async with proxy.http.post("/v1/chat/completions", json=body) as response:
                await response.content.readany()
                name = response.headers["X-Cache-Proxy-Instance"]
                kept = next(x for x in (a, b) if name not in x)
                more = {"active_prefill_tokens_threshold": 5000, "heavy_threshold": 4000}
                rewrite(path, toml([kept, c], request_log=log, **more))
                assert await reloader.reload("test") == "applied"
                assert fleet_of.get(name).is_draining, "its stream goes on"
                state = proxy.server.state
                assert state.options.settings.heavy_threshold == 4000
                assert proxy.router.known.config.heavy_threshold == 4000
                limits = proxy.router.known.gate.thresholds(ANY_MODEL)
                assert limits.active_prefill_tokens_threshold == 5000
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
            await until(lambda: fleet_of.get(name) is None, "drained, so removed")
            assert len(fleet_of.members()) == 2
            await proxy.up()
            assert await reloader.reload("test") == "unchanged"
            await proxy.at_rest()
            assert proxy.metric("config_reloads_total", result="applied") == 1
            async with proxy.http.get("/health") as health:
                assert (await health.json())["config_reload"]["result"] == "unchanged"


async def test_the_headers_that_name_sessions_change(tmp_path: Path) -> None:
    async with SimFleet(1, speed=50.0, tick=0.0) as fleet:
        instances, log = addresses(fleet), str(tmp_path / "log.jsonl")
        headers = {"X-Session-ID": "a", "x-chat": "b"}
        async with from_file(tmp_path, instances) as (proxy, path):
            await proxy.post(chat("x"), headers=headers)
            rewrite(path, toml(instances, request_log=log, session_headers=["x-chat"]))
            assert await proxy.server.reloader.reload("test") == "applied"
            await proxy.post(chat("x"), headers=headers)
            records = await proxy.records(2)
    assert [one["session_id"] for one in records] == ["a", "b"]


async def test_a_bootstrap_server_that_was_found_may_be_named_and_left_out(tmp_path: Path) -> None:
    """Nothing is drained by that; one that was given can't change under the instance."""
    async with SimFleet(1, speed=1.0, tick=0.0) as fleet:
        a, engine = fleet.engines[0].url, fleet.engines[0]
        log, found = str(tmp_path / "log.jsonl"), f"{a};bootstrap={engine.bootstrap_port}"
        async with from_file(tmp_path, [a]) as (proxy, path):
            (upstream,) = proxy.server.state.instances.all()
            proxy.server.state.instances.use_bootstrap(upstream, engine.bootstrap_url)
            (member,) = proxy.router.known.fleet.members()
            rewrite(path, toml([found], request_log=log))
            assert await proxy.server.reloader.reload("test") == "applied"
            assert not member.is_draining
            for refused in (a, f"{a};bootstrap=1"):
                rewrite(path, toml([refused], request_log=log))
                assert await proxy.server.reloader.reload("test") == "refused"
                assert not member.is_draining
            assert proxy.router.known.fleet.members() == [member]


async def test_who_caps_an_instance_does_not_change_under_it(tmp_path: Path) -> None:
    async with SimFleet(1, speed=1.0, tick=0.0) as fleet:
        a, log = fleet.engines[0].url, str(tmp_path / "log.jsonl")
        plan = tmp_path / "thermal.toml"
        plan.write_text("target_celsius = 80\n")
        given = {"thermal": str(plan)}
        async with from_file(tmp_path, [f"{a};thermal=plugin"], **given) as (proxy, path):
            (member,) = proxy.router.known.fleet.members()
            rewrite(path, toml([a], request_log=log, **given))
            assert await proxy.server.reloader.reload("test") == "refused"
            assert member.instance.has_thermal_plugin
            assert not member.is_draining


async def test_one_that_was_removed_comes_back(tmp_path: Path) -> None:
    async with SimFleet(2, speed=1.0, tick=0.0) as fleet:
        a, b = addresses(fleet)
        log = str(tmp_path / "log.jsonl")
        async with from_file(tmp_path, [a, b]) as (proxy, path):
            reloader, members = proxy.server.reloader, proxy.router.known.fleet.members
            async with proxy.http.post(
                "/v1/chat/completions", json=chat("x", max_tokens=4000)
            ) as response:
                await response.content.readany()
                name = response.headers["X-Cache-Proxy-Instance"]
                kept = next(x for x in (a, b) if name not in x)
                rewrite(path, toml([kept], request_log=log))
                assert await reloader.reload("test") == "applied"
                assert [m.is_draining for m in members()].count(True) == 1
                rewrite(path, toml([a, b], request_log=log))
                assert await reloader.reload("test") == "applied"
                assert not any(m.is_draining for m in members())
                response.close()
            await proxy.at_rest()


BAD = {
    "empty": "",
    "blank": "\n\n",
    "half-written": 'instances = ["127.0.0.1:80',
    "not TOML": "][",
    "no instance": "instances = []\n",
    "unknown key": "GOOD\nno_such_key = 1\n",
    "wrong value": "GOOD\nheavy_threshold = 'many'\n",
    "wrong order": "GOOD\nwarm_threshold = 9\nheavy_threshold = 8\n",
    "a fixed option": "GOOD\nmax_sessions = 7\n",
    "two fixed options, one that could": "GOOD\nsession_ttl = 7\nmax_sessions = 7\nttft_slo = 1\n",
    "TLS from nothing": "GOOD\ntls_cert = '/nonexistent.pem'\n",
    "no key in the file": "GOOD\napi_key = '@/nonexistent'\n",
    "another address": "OTHER",
    "nested too deep": "GOOD\nmodel = " + "[" * 3000 + "]" * 3000 + "\n",
    "an integer of 6,000 digits": "GOOD\nport = 0x" + "f" * 5000 + "\n",
}


@pytest.mark.long
@pytest.mark.parametrize("name", BAD)
async def test_a_bad_file_changes_nothing(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with SimFleet(1, speed=50.0, tick=0.0) as fleet:
        (a,) = addresses(fleet)
        one = f"one={a}"
        log = str(tmp_path / "log.jsonl")
        async with from_file(tmp_path, [one]) as (proxy, path):
            good = toml([one], request_log=log)
            other = toml(["one=127.0.0.1:9"], request_log=log)
            rewrite(path, BAD[name].replace("GOOD", good).replace("OTHER", other))
            before = proxy.server.state.options.settings
            assert await proxy.server.reloader.reload("test") == "refused"
            assert proxy.server.state.options.settings is before
            assert [m.instance.name for m in proxy.router.known.fleet.members()] == ["one"]
            assert (await proxy.post(chat("x"))).status == 200
            (line,) = [r.getMessage() for r in caplog.records if "not reloaded" in r.getMessage()]
            assert "\n" not in line
            if "fixed" in name:
                assert "max_sessions" in line
            assert ("session_ttl" in line) == (name.startswith("two"))


async def test_a_vanished_file_changes_nothing(tmp_path: Path) -> None:
    async with SimFleet(1, speed=50.0, tick=0.0) as fleet:
        async with from_file(tmp_path, addresses(fleet)) as (proxy, path):
            path.unlink()
            assert await proxy.server.reloader.reload("test") == "refused"
            assert (await proxy.post(chat("x"))).status == 200


async def test_a_changed_file_is_found_once_it_rests(tmp_path: Path) -> None:
    async with SimFleet(2, speed=50.0, tick=0.0) as fleet:
        a, b = addresses(fleet)
        log = str(tmp_path / "log.jsonl")
        async with from_file(tmp_path, [a]) as (proxy, path), asyncio.TaskGroup() as group:
            watching = group.create_task(proxy.server.reloader.watch(0.02))
            looks = proxy.server.reloader._file
            assert looks is not None
            await until(lambda: looks._used is not None, "the first look")
            rewrite(path, toml([a, b], request_log=log))
            await until(lambda: len(proxy.router.known.fleet.members()) == 2, "found")
            path.unlink()
            refused = lambda: proxy.metric("config_reloads_total", result="refused")  # noqa: E731
            await until(lambda: refused() == 1, "told of once")
            rewrite(path, toml([a, b], request_log=log))
            unchanged = lambda: proxy.metric("config_reloads_total", result="unchanged")  # noqa: E731
            await until(lambda: unchanged() == 1, "back")
            assert refused() == 1
            proxy.server.reloader.ask()
            proxy.server.reloader.ask()
            await until(lambda: unchanged() == 2, "asked for")
            watching.cancel()


async def test_what_changed_during_the_start_is_taken_in(tmp_path: Path) -> None:
    """A process reads its options first, and serves after seconds."""
    async with SimFleet(2, speed=50.0, tick=0.0) as fleet:
        a, b = addresses(fleet)
        log = str(tmp_path / "log.jsonl")
        async with from_file(tmp_path, [a]) as (proxy, path):
            reloader = proxy.server.reloader
            await reloader.reload("test")
            before = reloader.last
            await reloader.catch_up()
            assert reloader.last is before, "nothing has changed"
            rewrite(path, toml([a, b], request_log=log))
            await reloader.catch_up()
            assert len(proxy.router.known.fleet.members()) == 2
            path.write_text("][")
            await reloader.catch_up()
            assert proxy.metric("config_reloads_total", result="refused") == 1


async def test_a_reload_ends_no_operators_drain(tmp_path: Path) -> None:
    """Only an instance that the options did not have comes back by them."""
    async with SimFleet(2, speed=1.0, tick=0.0) as fleet:
        a, b = addresses(fleet)
        log = str(tmp_path / "log.jsonl")
        async with from_file(tmp_path, [f"a={a}", f"b={b}"]) as (proxy, path):
            body = chat("x", max_tokens=4000)
            async with proxy.http.post("/v1/chat/completions", json=body) as response:
                await response.content.readany()
                name = response.headers["X-Cache-Proxy-Instance"]
                async with proxy.http.delete(f"/instances/{name}?drain=true") as asked:
                    assert asked.status == 202
                given = [f"{n}={at};gpus=0;dcgm=9" for n, at in (("a", a), ("b", b))]
                rewrite(path, toml(given, request_log=log))
                assert await proxy.server.reloader.reload("test") == "applied"
                member = proxy.router.known.fleet.get(name)
                assert member is not None
                assert member.is_draining
                assert proxy.server.state.instances.specs[name].sensors
                response.close()
            await proxy.at_rest()


async def test_an_operators_threshold_survives_a_reload_of_something_else(tmp_path: Path) -> None:
    async with SimFleet(1, speed=50.0, tick=0.0) as fleet:
        log = str(tmp_path / "log.jsonl")
        async with from_file(tmp_path, addresses(fleet)) as (proxy, path):
            gate = proxy.router.known.gate
            gate.set(
                ANY_MODEL,
                gate.thresholds(ANY_MODEL).merged({"active_decode_blocks_threshold": 0.5}),
            )
            rewrite(path, toml(addresses(fleet), request_log=log, ttft_slo=1.0))
            assert await proxy.server.reloader.reload("test") == "applied"
            assert gate.thresholds(ANY_MODEL).active_decode_blocks_threshold == 0.5
            assert proxy.server.state.metrics.slo.ttft_s == 1.0


def test_what_a_process_is_built_from_is_not_reloadable() -> None:
    built = {"host", "port", "admin_port", "kv_connector", "max_queue", "request_log", "config"}
    assert set(Settings.model_fields) >= built | RELOADABLE
    assert not built & RELOADABLE


@pytest.mark.long
async def test_signals_in_any_number_end_nothing(tmp_path: Path) -> None:
    async with SimFleet(2, speed=2.0) as fleet:
        a, b = addresses(fleet)
        path = tmp_path / "proxy.toml"
        path.write_text(f"instances = ['{a}']\n")
        async with running("--config", str(path)) as process:
            async with aiohttp.ClientSession(process.url) as http:
                body = chat("x", max_tokens=100)
                async with http.post("/v1/chat/completions", json=body) as response:
                    await response.content.readany()
                    path.write_text(f"instances = ['{a}', '{b}']\n")
                    for _ in range(50):
                        process.send_signal(signal.SIGHUP)
                        process.send_signal(signal.SIGUSR1)
                    await until(lambda: process.found("reloaded"), "reloaded")
                    assert (await response.read()).endswith(b"data: [DONE]\n\n")
                async with http.get("/instances") as listed:
                    assert len(await listed.json()) == 2
            process.send_signal(signal.SIGTERM)
            assert await process.ended() == 0
        assert "Traceback" not in process.log


async def test_listeners_that_cannot_be_exchanged_end_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As when no descriptor is left."""
    async with SimFleet(1, speed=50.0, tick=0.0) as fleet:
        async with from_file(tmp_path, addresses(fleet)) as (proxy, _):
            reloader = proxy.server.reloader

            async def fails(context: ssl.SSLContext) -> None:
                raise OSError(24, "Too many open files")

            ready = replace(
                await asyncio.to_thread(reloader._prepare, proxy.settings),
                for_clients=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
            )
            reloader._exchange = fails
            reloader._prepare = lambda old: ready  # type: ignore[method-assign]
            assert await reloader.reload("test") == "refused"
            assert "Too many open files" in caplog.text
            assert (await proxy.post(chat("x"))).status == 200


async def test_files_that_cannot_be_read_hold_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system hangs: refused with one line by the watch; read once it answers again."""
    monkeypatch.setattr(reload, "READ_S", 0.05)
    answers = threading.Event()
    answers.set()

    def may_hang(path: Path) -> bytes:
        answers.wait()
        return read_regular(path)

    monkeypatch.setattr(reload, "read_regular", may_hang)
    async with SimFleet(2, speed=1.0, tick=0.0) as fleet:
        a, b = addresses(fleet)
        async with from_file(tmp_path, [a], health_interval=0.02) as (proxy, path):
            reloader, log = proxy.server.reloader, str(tmp_path / "log.jsonl")
            watching = asyncio.create_task(reloader.watch(0.02))
            try:
                answers.clear()
                rewrite(path, toml([a, b], request_log=log, health_interval=0.02))
                await until(lambda: "cannot be read" in (reloader.refused or ""), "it says so")
                await asyncio.sleep(0.3)
                assert caplog.text.count("not reloaded") == 1
                assert await reloader.reload("again") == "refused"
                with pytest.raises(reload.NotReadError):
                    await reloader.refuse_opening()
                assert (await proxy.post(chat("x", max_tokens=1))).status == 200
            finally:
                answers.set()
            await until(lambda: len(proxy.router.known.fleet.members()) == 2, "read after all")
            assert reloader.refused is None
            watching.cancel()
