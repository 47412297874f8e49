"""Workers as real processes: who serves, who comes again, what a restart of each in turn loses."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from socket import create_server

import pytest

from bench.faults.restart import Engine, Load, Seen, hold
from bench.measuring.processes import HOST, get, is_running
from tests.support.harness import until
from tests.support.proxy_process import START_S, ProxyProcess
from tests.support.redis_server import NEEDED, RedisServer

pytestmark = [NEEDED, pytest.mark.long]


def pids(process: ProxyProcess) -> list[int]:
    """Of the workers that have said that they serve, in their order."""
    return [int(pid) for pid in re.findall(r"INFO cache-proxy .*, process (\d+)\n", process.log)]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def two_ports() -> int:
    """The first of two in a row that nobody has, below those that the kernel gives out."""
    for port in range(20_000 + os.getpid() % 5_000 * 2, 32_000, 2):
        with suppress(OSError), create_server((HOST, port)), create_server((HOST, port + 1)):
            return port
    raise AssertionError("no two ports are free")


@asynccontextmanager
async def workers(engine: Engine, *options: str) -> AsyncIterator[ProxyProcess]:
    """Two on one port, which serve."""
    words = ("--instances", engine.address, "--kv-connector", "none", "--workers", "2")
    async with RedisServer() as redis:
        with ProxyProcess(*words, "--share", redis.url, *options) as process:
            await process.listens()
            await until(lambda: process.found("2 workers serve"), "both", START_S)
            yield process


async def test_one_that_is_killed_comes_again_and_the_port_never_refuses(tmp_path: Path) -> None:
    admin, log = two_ports(), tmp_path / "log-{worker}"
    config, pid_file = tmp_path / "toml", tmp_path / "pid"
    config.write_text("ttft_slo = 4\n")
    options = ("--admin-port", str(admin), "--request-log", str(log), "--config", str(config))
    async with (
        Engine() as engine,
        workers(engine, *options, "--pid-file", str(pid_file)) as process,
    ):
        assert int(pid_file.read_text()) == process.pid
        assert (await asyncio.to_thread(get, admin, "/replicas"))[0] == 200
        assert (tmp_path / "log-0").exists()
        assert (tmp_path / "log-1").exists()
        host, port = process.url.removeprefix("http://").split(":")
        os.kill(pids(process)[0], signal.SIGKILL)
        while len(pids(process)) < 3:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
        assert "killed by signal 9; it starts again in 0.1 s" in process.log

        config.write_text('ttft_slo = "many"\n')
        process.send_signal(signal.SIGUSR2)
        text = "hot restart ended, worker 0, 1 carry on as they were"
        await until(lambda: process.found(text), "given up", START_S)
        started = pids(process)
        process.send_signal(signal.SIGTERM)
        assert await process.ended() == 0
        assert not any(map(is_running, started))
        assert not pid_file.exists()
        assert "Traceback" not in process.log


async def test_each_is_replaced_in_turn_and_nothing_is_lost() -> None:
    seen = Seen()
    async with Engine() as engine, workers(engine) as process:
        first = pids(process)
        load = Load(process.url, 20.0, seen)
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(hold(process.url, seen.streams))
            await until(lambda: engine.busy == 4, "all stream")
            group.create_task(load.run())
            process.send_signal(signal.SIGUSR2)
            done = "hot restart: every worker has been replaced"
            await until(lambda: process.found(done), "replaced", 2 * START_S)
            enough = seen.ended.total() + 20
            await until(lambda: seen.ended.total() >= enough, "served by the new ones")
            load.end()
            engine.may_end.set()
        assert seen.lost == 0, seen
        assert seen.streams["whole"] == 4
        await until(lambda: not any(map(is_running, first)), "the replaced end")
        assert len(pids(process)) == 4
        # A successor whose parent is gone is the launcher's, too.
        os.kill(pids(process)[2], signal.SIGKILL)
        await until(lambda: len(pids(process)) == 5, "it comes again", START_S)
        process.send_signal(signal.SIGTERM)
        assert await process.ended() == 0
        assert not any(map(is_running, pids(process)))


async def test_one_that_is_killed_in_its_turn_leaves_no_successor_that_nobody_manages() -> None:
    async with Engine() as engine, workers(engine) as process:
        first = pids(process)[0]
        process.send_signal(signal.SIGUSR2)
        own = children(first)
        await until(lambda: children(first) != own, "its successor", START_S)
        left = children(first)
        os.kill(first, signal.SIGKILL)
        await until(lambda: process.found("it starts again"), "the end is seen", START_S)
        await until(lambda: not any(map(is_running, left)), "the successor ends", START_S)
        await until(lambda: len(pids(process)) >= 3, "it comes again", START_S)
        process.send_signal(signal.SIGTERM)
        assert await process.ended() == 0
        assert not any(map(is_running, [*left, *pids(process)]))


async def test_one_that_hangs_is_killed_behind_the_second_signal() -> None:
    async with Engine() as engine, workers(engine) as process:
        hung, other = pids(process)
        os.kill(hung, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        await until(lambda: not is_running(other), "the other ends", START_S)
        assert is_running(hung)
        process.send_signal(signal.SIGTERM)
        assert await process.ended() == 0
        assert f"process {hung} does not end, and is killed" in process.log
        assert not is_running(hung)


async def test_what_makes_the_first_fail_is_said_once() -> None:
    words = ("--instances", "x:1", "--workers", "2", "--share", "redis://127.0.0.1:1")
    with ProxyProcess(*words, "--request-log", "/nonexistent/{worker}") as process:
        assert await process.ended() == 1
    (line,) = process.log.splitlines()
    assert "request_log = '/nonexistent/0'" in line
