"""The command as typed: options, signals, drain, exit codes."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from replayer.sim_fleet import SimFleet
from tests.shell.harness import addresses, chat, until

COMMAND = [sys.executable, "-m", "proxy.cli"]


class Process:
    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child
        self.lines: list[str] = []
        self.url = ""

    async def read(self) -> None:
        assert self.child.stderr
        async for raw in self.child.stderr:
            line = raw.decode()
            self.lines.append(line)
            if "listening on" in line:
                self.url = next(word for word in line.split() if word.startswith("http"))


@asynccontextmanager
async def running(*options: str, before: tuple[str, ...] = ()) -> AsyncIterator[Process]:
    child = await asyncio.create_subprocess_exec(
        *before,
        *COMMAND,
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        *options,
        stderr=asyncio.subprocess.PIPE,
    )
    process = Process(child)
    async with asyncio.TaskGroup() as group:
        reader = group.create_task(process.read())
        try:
            await until(lambda: process.url or child.returncode is not None, "listening")
            yield process
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()
            await reader


async def test_sigterm_lets_a_stream_finish(tmp_path: Path) -> None:
    async with SimFleet(1, speed=2.0) as fleet:
        instances = ("--instances", addresses(fleet)[0], "--request-log", str(tmp_path / "log"))
        async with running(*instances) as process, aiohttp.ClientSession(process.url) as http:
            body = chat("x", max_tokens=150)
            async with http.post("/v1/chat/completions", json=body) as response:
                first = await response.content.readany()
                process.child.send_signal(signal.SIGTERM)
                await until(lambda: any("draining" in line for line in process.lines))
                async with http.get("/ready") as ready:
                    assert ready.status == 503
                rest = await response.read()
            assert (first + rest).endswith(b"data: [DONE]\n\n")
            assert await process.child.wait() == 0
            assert b'"outcome":"ok"' in (tmp_path / "log").read_bytes()


@pytest.mark.parametrize("options", [("--drain-seconds", "0.2"), ()])
async def test_a_drain_ends_at_its_limit_or_at_a_second_signal(options: tuple[str, ...]) -> None:
    async with SimFleet(1, speed=1.0) as fleet:
        instances = ("--instances", addresses(fleet)[0], *options)
        async with running(*instances) as process, aiohttp.ClientSession(process.url) as http:
            async with http.post("/v1/chat/completions", json=chat("x", max_tokens=9999)) as r:
                await r.content.readany()
                process.child.send_signal(signal.SIGTERM)
                await until(lambda: any("draining" in line for line in process.lines))
                if not options:
                    process.child.send_signal(signal.SIGTERM)
                assert await process.child.wait() == 0


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--instances", "x:1", "--warm-threshold", "many"), 2, ["--warm-threshold", "many"]),
        (("--instances", "nowhere"), 2, ["instances", "nowhere"]),
        (("--instances", "x:1", "--no-such-option"), 2, ["--no-such-option"]),
        ((), 2, ["instances is not given"]),
        (("--instances", "x:1", "--request-log", "/nonexistent/log"), 1, ["/nonexistent/log"]),
    ],
)
async def test_bad_options_are_one_line(
    options: tuple[str, ...], code: int, words: list[str]
) -> None:
    async with running(*options) as process:
        assert await process.child.wait() == code
    (line,) = process.lines
    assert all(word in line for word in words)


async def test_a_taken_port_is_one_line() -> None:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, running("--instances", "x:1", "--port", str(port)) as process:
        assert await process.child.wait() == 1
        assert len([line for line in process.lines if "cannot listen" in line]) == 1
        assert not any("Traceback" in line for line in process.lines)


async def test_print_config_and_json_log() -> None:
    options = ("--instances", "x:1", "--print-config")
    child = await asyncio.create_subprocess_exec(*COMMAND, *options, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    assert child.returncode == 0
    assert b"prefill_throughput = 20000" in out
    assert b"# flag --instances" in out
    async with running("--instances", "x:1", "--log-format", "json") as process:
        process.child.send_signal(signal.SIGTERM)
        assert await process.child.wait() == 0
    assert all(line.startswith('{"t":') for line in process.lines)
