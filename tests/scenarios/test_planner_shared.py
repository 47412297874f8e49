"""One planner of two deployments with one GPU budget, as processes: each its proxy and command."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest

from bench.measuring.processes import Child, is_running
from tests.planner.plugin_api.server import Plugin, served, wish
from tests.scenarios.test_planner import FROM_HERE, GO_ON_S, Instances, asked, serving
from tests.support.harness import until
from tests.support.proxy_process import running as proxy_running

GPUS = 4


@pytest.fixture
def fleets(tmp_path: Path) -> Iterator[dict[str, Instances]]:
    made = {name: Instances(tmp_path / f"fleet-{name}") for name in "ab"}
    yield made
    for pid in (pid for one in made.values() for pid in one.pids):
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def plan(folder: Path, tables: list[dict[str, Any]]) -> Child:
    """The planner's process."""
    common: dict[str, Any] = {
        "max_gpu_budget": GPUS,
        "advisory": False,
        "match": "gpu-*",
        "scaler": "exec",
        "control": "127.0.0.1:0",
        "state_file": f"{folder}/state.json",
        "load_adjustment_interval_seconds": 1,
        "throughput_adjustment_interval_seconds": 4,
        "tick_max_duration_seconds": 300,  # a plugin may take a tenth
        "strategy": "founding",
        "deployment": tables,
    }
    words = ["-m", "planner.cli", "run", orjson.dumps(common).decode()]
    return Child([sys.executable, *words], env=FROM_HERE)


def held(fleets: dict[str, Instances]) -> int:
    """Instances started and not stopped. What b starts, a has stopped: a is read later."""
    found: set[tuple[str, str]] = set()
    for name in "ba":
        for how, _, instance in (call.partition(" ") for call in fleets[name].calls):
            if how == "start":
                found.add((name, instance))
            elif how == "stop":
                found.discard((name, instance))
    return len(found)


@pytest.mark.timeout(480)
async def test_gpus_go_from_one_deployment_to_the_other(
    tmp_path: Path, fleets: dict[str, Instances]
) -> None:
    """Both want three of four; a has them first, gives them up, and then b has them."""
    plugins = {name: Plugin(wish("SET", 3, "combined")) for name in fleets}
    proxies: dict[str, str] = {}
    tables: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        for name, fleet in fleets.items():
            await fleet.call("start", "gpu-0")
            first = await until(lambda f=fleet: f.call("list"), "it listens", GO_ON_S)  # type: ignore[misc]
            proxy = await stack.enter_async_context(proxy_running("--instances", first))
            port = await stack.enter_async_context(served(plugins[name]))
            proxies[name] = proxy.url
            plugin: dict[str, Any] = {
                "name": "wish",
                "stage": "propose",
                "address": f"127.0.0.1:{port}",
            }
            plugin |= {"deadline_seconds": 25.0}
            command = str(fleet.script)
            own = {"name": name, "proxies": proxy.url, "scaler_command": command}
            tables.append(own | {"plugin": [plugin]})

        async def serve(count: dict[str, int]) -> bool:
            found = {name: len(await serving(url)) for name, url in proxies.items()}
            assert held(fleets) <= GPUS
            assert all(found.values()), "none falls below its floor"
            return found == count

        with plan(tmp_path, tables) as planner:
            await until(lambda: serve({"a": 3, "b": 1}), "a has its three", GO_ON_S)
            assert planner.found(r"a: decision 0: combined 1 -> 3; .*plugin wish: set 3")
            assert not planner.found(r"b: decision"), "there is no GPU for it"
            planner.kill()
            assert await planner.ended() == -signal.SIGKILL
        plugins["b"].asked.clear()
        with plan(tmp_path, tables) as planner:
            url = (
                await until(lambda: planner.found(r"b: planner listens on (\S+);"), "", GO_ON_S)
            )[1]
            await until(lambda: len(plugins["b"].asked) > 2, "it goes on", GO_ON_S)
            assert await serve({"a": 3, "b": 1}), "nothing is lost or doubled"
            metrics = await asked("GET", f"{url}/metrics")
            assert 'cache_planner_granted_replicas{component="combined"} 1.0' in metrics
            plugins["a"].answer = wish("SET", 1, "combined")
            await until(lambda: serve({"a": 1, "b": 3}), "b has its three", GO_ON_S)
            assert planner.found(r"b: decision \d: combined \d -> 3; ")
            planner.send_signal(signal.SIGTERM)
            assert await planner.ended() == 0
            assert "Traceback" not in planner.log
    assert [len(fleet.pids) for fleet in fleets.values()] == [3, 3]
