"""A planner beside a proxy, as processes: it scales engines under load, whatever goes wrong."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from bench.measuring.processes import Child, is_running
from tests.support.harness import RawEngine, plain, until
from tests.support.proxy_process import running as proxy_running

GO_ON_S = 120.0
"""Time for a fleet to follow, on a machine with much else to do."""
SCRIPT = f"""#!/bin/sh
cd "$(dirname "$0")"
echo "$@" >> calls
alive() {{ test -s $1.pid && kill -0 $(cat $1.pid) 2>/dev/null; }}
case $1 in
list) for f in *.pid; do
    n=${{f%.pid}}
    alive $n && read -r _ _ url _ < $n.out && echo "$n=$url"
  done; true;;
start) alive $2 && exit 0
  setsid {sys.executable} -m replayer.simulator.cli --port 0 --bootstrap-port 0 > $2.out 2>&1 &
  echo $! > $2.pid; echo $! >> pids;;
stop) alive $2 && kill $(cat $2.pid); rm -f $2.pid;;
esac
"""
FROM_HERE = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]))


class Instances:
    """What the planner's command starts and stops, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.script = folder, folder / "fleet"
        self.runs()

    def runs(self, script: str = SCRIPT) -> None:
        """The command is this one now."""
        new = self.script.with_suffix(".new")
        new.write_text(script)
        new.chmod(0o755)
        new.replace(self.script)

    async def call(self, *words: str) -> str:
        with Child([str(self.script), *words], env=FROM_HERE) as child:
            assert await child.ended() == 0
            return child.log.strip()

    @property
    def pids(self) -> list[int]:
        """Those of all that it has ever started."""
        path = self.folder / "pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def instances(tmp_path: Path) -> Iterator[Instances]:
    made = Instances(tmp_path / "fleet")
    yield made
    for pid in made.pids:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


class PlannerProcess(Child):
    """`cache-planner run` on a port of its own, with a state file that another may go on with."""

    def __init__(self, folder: Path, instances: Instances, proxy: str, **options: str) -> None:
        given: Mapping[str, Any] = {
            "proxies": proxy,
            "match": "gpu-*",
            "advisory": "false",
            "scaler": "exec",
            "scaler_command": str(instances.script),
            "control": "127.0.0.1:0",
            "state_file": str(folder / "state.json"),
            "audit_log": str(folder / "audit.jsonl"),
            "max_gpu_budget": 3,
            "load_adjustment_interval_seconds": 1,
            "throughput_adjustment_interval_seconds": 4,
            "strategy": "founding",  # a reserve is held for a minute
        }
        words = orjson.dumps(dict(given) | options).decode()
        super().__init__([sys.executable, "-m", "planner.cli", "run", words], env=FROM_HERE)
        self._audit = folder / "audit.jsonl"
        self.url = ""

    async def listens(self) -> None:
        found = await until(lambda: self.found(r"listens on (http://\S+);"), "it listens", GO_ON_S)
        self.url = found[1]

    @property
    def decided(self) -> list[int]:
        """The targets so far, of all processes."""
        lines = self._audit.read_bytes().splitlines() if self._audit.exists() else []
        found: dict[int, dict[str, int]] = {}
        for decision in (orjson.loads(line)["decision"] for line in lines):
            number, targets = decision["decision_id"], decision["targets"]
            assert found.setdefault(number, targets) == targets, "none is decided twice"
        return [found[number]["combined"] for number in sorted(found)]


async def asked(method: str, url: str, body: Any = None) -> Any:
    """An answer's JSON, or its text."""
    data = None if body is None else orjson.dumps(body)
    headers = {"Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, url, data=data, headers=headers) as answer,
    ):
        told = await answer.read()
        assert answer.status == 200, told
        return orjson.loads(told) if answer.content_type == "application/json" else told.decode()


async def serving(proxy: str) -> set[str]:
    return {
        row["name"]
        for row in await asked("GET", f"{proxy}/instances")
        if row["is_up"] and not row["is_draining"]
    }


def ramp(path: Path) -> int:
    """A load that grows to several times its size and falls again; how many requests it has."""
    at_ms = [*range(0, 3000, 1000), *range(3000, 18_000, 150), *range(18_000, 26_000, 1000)]
    lines = [
        orjson.dumps(
            {
                "timestamp": at,
                "input_length": 2048,
                "output_length": 100,
                "hash_ids": list(range(4 * n, 4 * n + 4)),
            }
        )
        for n, at in enumerate(at_ms)
    ]
    path.write_bytes(b"\n".join(lines))
    return len(lines)


@contextmanager
def replay(trace: Path, proxy: str, out: Path) -> Iterator[Child]:
    words = [str(trace), "--format", "mooncake", "--target", proxy, "--out", str(out)]
    quiet = ["--no-progress", "--no-html"]
    with Child([sys.executable, "-m", "replayer.replay", *words, *quiet]) as child:
        yield child


@pytest.mark.timeout(480)
async def test_a_fleet_follows_its_load_and_loses_nothing(
    tmp_path: Path, instances: Instances
) -> None:
    """Its planner is killed on the way up; another one goes on."""
    await instances.call("start", "gpu-0")
    first = await until(lambda: instances.call("list"), "it listens", GO_ON_S)
    async with proxy_running("--instances", first) as proxy:
        slo = {"ttft_ms": "300", "itl_ms": "12"}
        with PlannerProcess(tmp_path, instances, proxy.url, **slo) as planner:
            await planner.listens()
            count = ramp(tmp_path / "trace")
            with replay(tmp_path / "trace", proxy.url, tmp_path / "out") as load:
                await until(lambda: planner.decided, "more are wanted", GO_ON_S)
                planner.kill()
                assert await planner.ended() == -signal.SIGKILL
                with PlannerProcess(tmp_path, instances, proxy.url, **slo) as successor:
                    await successor.listens()

                    async def has_grown() -> bool:
                        return len(await serving(proxy.url)) > 1

                    await until(has_grown, "more serve", GO_ON_S)
                    assert await load.ended() == 0, load.log

                    async def has_shrunk() -> bool:
                        return successor.decided[-1] == 1 and len(await serving(proxy.url)) == 1

                    await until(has_shrunk, "one serves", GO_ON_S)
                    left = await until(
                        lambda: sum(map(is_running, instances.pids)) == 1, "the others end"
                    )
                    assert left
                    successor.send_signal(signal.SIGTERM)
                    assert await successor.ended() == 0
                    assert max(successor.decided) > 1
        summary = orjson.loads((tmp_path / "out" / "summary.json").read_bytes())
        assert summary["requests"]["by_outcome"] == {"ok": count}
        (row,) = await asked("GET", f"{proxy.url}/instances")
        assert not any(row["load"].values())
        metrics = await asked("GET", f"{proxy.url}/metrics")
        assert "cache_proxy_accounting_drift 0" in metrics
        await instances.call("stop", row["name"])
    await until(lambda: not any(map(is_running, instances.pids)), "no process is left")


async def test_a_command_that_misbehaves_costs_nobody(tmp_path: Path, instances: Instances) -> None:
    """Garbage, an end by a signal, no end at all: each is counted, and the next tick goes on."""
    async with RawEngine() as engine, proxy_running("--instances", f"gpu-0={engine.address}") as p:
        known = f"gpu-0={engine.address}"
        listed = f"#!/bin/sh\necho $@ >> {instances.folder}/calls\necho '{known}'\n"
        instances.runs(listed)
        limits = {"tick_max_duration_seconds": "1", "load_adjustment_interval_seconds": "0.1"}
        with PlannerProcess(
            tmp_path, instances, p.url, **limits, enable_throughput_scaling="false"
        ) as planner:
            await planner.listens()
            floors = f"{planner.url}/v1/min-endpoints"
            assert await asked("PATCH", floors, {"combined": 2}) == {"combined": 2}
            await until(lambda: "start gpu-1" in instances.calls, "it orders another")
            for body, series in (
                ("head -c 300 /dev/urandom", 'scaler_errors_total{error="failed",scaler="exec"}'),
                ("kill -9 $$", 'scaler_errors_total{error="failed",scaler="exec"}'),
                ("exec sleep 600", 'ticks_total{outcome="tick_timeout"}'),
            ):
                before = await counted(planner.url, series)
                instances.runs(f"#!/bin/sh\n{body}\n")

                async def has_grown(series: str = series, before: float = before) -> bool:
                    return await counted(planner.url, series) > before

                await until(has_grown, series, GO_ON_S)
                assert await serving(p.url) == {"gpu-0"}
                (instances.folder / "calls").unlink()
                instances.runs(listed)
                await until(lambda: instances.calls, "it goes on", GO_ON_S)
            assert planner.decided == [2]
            planner.send_signal(signal.SIGTERM)
            assert await planner.ended() == 0
            assert "Traceback" not in planner.log


async def counted(url: str, series: str) -> float:
    """A series of the planner's metrics."""
    lines = (await asked("GET", f"{url}/metrics")).splitlines()
    name = f"cache_planner_{series}"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


async def test_advice_calls_nobody(tmp_path: Path, instances: Instances) -> None:
    """The command is not called, and of the proxy is only read."""
    row = {"name": "gpu-0", "url": "http://127.0.0.1:1", "is_up": False, "is_draining": False}
    load = dict.fromkeys(("prefill_requests", "inbound_requests", "decode_requests"), 0)
    row |= {"load": load | {"prefill_tokens": 0, "decode_tokens": 0}, "heat": {}}
    async with RawEngine() as fake:
        fake.gets = {
            "/metrics": plain(b"cache_proxy_issued_total 5\n"),
            "/instances": plain(orjson.dumps([row])),
            "/health": plain(b'{"started_at": 1.5}'),
        }
        quick = {"load_adjustment_interval_seconds": "0.1", "enable_throughput_scaling": "false"}
        with PlannerProcess(
            tmp_path, instances, fake.address, advisory="true", min_endpoint="2", **quick
        ) as planner:
            await planner.listens()
            await until(lambda: planner.decided, "it has decided", GO_ON_S)
            await asked("PATCH", f"{planner.url}/v1/min-endpoints", {"combined": 3})
            await until(lambda: planner.decided == [2, 3], "it decides on", GO_ON_S)
            assert await counted(planner.url, 'ticks_total{outcome="advisory"}') == 2.0
        assert not instances.calls
        assert {head.split()[0] for head in fake.heads} == {b"GET"}
        assert not fake.posts
