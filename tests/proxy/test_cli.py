"""The command as typed: options, signals, drain, exit codes."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from pathlib import Path

import aiohttp
import pytest

from proxy.cli import main, warn_of_options
from proxy.config.load import load
from proxy.core.connectors import CONNECTORS
from replayer.simulator.host import SimFleet
from tests.support.harness import addresses, chat, stopped, until
from tests.support.proxy_process import ProxyProcess, running


@pytest.mark.long
async def test_sigterm_lets_a_stream_finish(tmp_path: Path) -> None:
    async with SimFleet(1, speed=2.0) as fleet:
        instances = ("--instances", addresses(fleet)[0], "--request-log", str(tmp_path / "log"))
        async with running(*instances) as process, aiohttp.ClientSession(process.url) as http:
            body = chat("x", max_tokens=250)
            async with http.post("/v1/chat/completions", json=body) as response:
                first = await response.content.readany()
                process.send_signal(signal.SIGTERM)
                await until(lambda: process.found("draining"))
                async with http.get("/ready") as ready:
                    assert ready.status == 503
                rest = await response.read()
            assert (first + rest).endswith(b"data: [DONE]\n\n")
            assert await process.ended() == 0
            assert b'"outcome":"ok"' in (tmp_path / "log").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("options", [("--drain-seconds", "0.2"), ()])
async def test_a_drain_ends_at_its_limit_or_at_a_second_signal(options: tuple[str, ...]) -> None:
    async with SimFleet(1, speed=1.0) as fleet:
        instances = ("--instances", addresses(fleet)[0], *options)
        async with running(*instances) as process, aiohttp.ClientSession(process.url) as http:
            async with http.post("/v1/chat/completions", json=chat("x", max_tokens=9999)) as r:
                await r.content.readany()
                process.send_signal(signal.SIGTERM)
                await until(lambda: process.found("draining"))
                if not options:
                    process.send_signal(signal.SIGTERM)
                assert await process.ended() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--instances", "x:1", "--warm-threshold", "many"), ["--warm-threshold", "many"]),
        (("--instances", "no where"), ["instances", "no where"]),
        (("--instances", "x:1", "--no-such-option"), ["--no-such-option"]),
        (("--instances", "x:1", "--otlp-endpoint", "c:4317"), ["otlp_endpoint", "http(s)://"]),
        (
            ("--instances", "x:1", "--otlp-endpoint", "http://u:p@c:1"),
            ["http://***@c:1", "no user"],
        ),
        (("--instances", "x:1", "--trace-ratio", "1.5"), ["trace_ratio", "<= 1"]),
        ((), ["instances is not given"]),
    ],
)
def test_bad_options_are_one_line(
    options: tuple[str, ...], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """They end before anything of the process is changed; a process for each says no more."""
    assert main(options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in words)


@pytest.mark.long
async def test_a_log_that_cannot_be_written_is_one_line() -> None:
    with ProxyProcess("--instances", "x:1", "--request-log", "/nonexistent/log") as process:
        assert await process.ended() == 1
    (line,) = process.log.splitlines()
    assert all(word in line for word in ("request_log", "/nonexistent/log"))


@pytest.mark.parametrize("name", CONNECTORS)
def test_a_missing_bootstrap_address_is_news_only_where_one_is_needed(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And only of what shares its host: what is alone there is asked at the usual port."""
    caplog.set_level(logging.INFO)
    given = ["--host", "127.0.0.1", "--instances", "x:1,x:2,y", "--kv-connector", name]
    warn_of_options(logging.getLogger("proxy"), load(given, {}).settings)
    told = [record.getMessage() for record in caplog.records]
    for start in ("no bootstrap address for x:1, x:2:", "offloads to y:8000 need a Mooncake"):
        assert sum(message.startswith(start) for message in told) == (name == "mooncake")


def test_an_instance_that_control_cannot_see_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "thermal.toml").write_text("")
    given = ["--thermal", str(tmp_path / "thermal.toml"), "--instances"]
    warn_of_options(
        logging.getLogger("proxy"), load([*given, "a=x:1;gpus=0;dcgm=9400,b=x:2"], {}).settings
    )
    told = [record.getMessage() for record in caplog.records]
    assert sum("--thermal does not control b: no GPU sensor" in message for message in told) == 1


@pytest.mark.long
async def test_a_wrong_file_of_thermal_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "thermal.toml"
    file.write_text("target_celsius = 99")
    with ProxyProcess("--instances", "x:1", "--thermal", str(file)) as process:
        assert await process.ended() == 2
        (line,) = [line for line in process.log.splitlines() if "target_celsius" in line]
        assert f"thermal = {file}: thermal target_celsius must be 30 to 95, not 99" in line
        assert "Traceback" not in process.log


@pytest.mark.long
async def test_a_taken_port_is_one_line() -> None:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        with ProxyProcess("--instances", "x:1", "--admin-port", str(port)) as process:
            assert await process.ended() == 1
    (line,) = [line for line in process.log.splitlines() if "cannot listen" in line]
    assert f"127.0.0.1:{port} (admin_host, admin_port): Address already in use" in line
    assert "Traceback" not in process.log


def test_print_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--instances", "x:1", "--print-config"]) == 0
    out = capsys.readouterr().out
    assert "prefill_throughput = 20000" in out
    assert "# flag --instances" in out


@pytest.mark.long
async def test_json_log() -> None:
    async with running("--instances", "x:1", "--log-format", "json") as process:
        process.send_signal(signal.SIGTERM)
        assert await process.ended() == 0
    assert all(line.startswith('{"t":') for line in process.log.splitlines())


@pytest.mark.long
async def test_a_stopped_process_blames_nobody_for_the_time(tmp_path: Path) -> None:
    """Stopped for longer than every limit: no timeout, no instance down, nothing lost."""
    log = tmp_path / "log"
    async with SimFleet(2, speed=1.0) as fleet:
        limits = ("--ttft-timeout", "2", "--idle-timeout", "2", "--health-timeout", "1")
        options = ("--instances", ",".join(addresses(fleet)), *limits, "--health-interval", "0.05")
        async with running(*options, "--request-log", str(log)) as process:
            async with aiohttp.ClientSession(process.url) as http, asyncio.TaskGroup() as group:
                body = chat("x", max_tokens=60)
                begun = 0

                async def ask() -> bytes:
                    nonlocal begun
                    async with http.post("/v1/chat/completions", json=body) as response:
                        begun += 1
                        return await response.read()

                asked = [group.create_task(ask()) for _ in range(8)]
                await until(lambda: begun == 8, "streams")
                await stopped(process.pid, 3.0)
            assert all(task.result().endswith(b"data: [DONE]\n\n") for task in asked)
            process.send_signal(signal.SIGTERM)
            assert await process.ended() == 0
        assert log.read_bytes().count(b'"outcome":"ok"') == 8
        assert not re.search("is down|Traceback", process.log)


@pytest.mark.long
async def test_a_drain_finishes_every_stream_and_says_close(tmp_path: Path) -> None:
    async with SimFleet(2, speed=4.0) as fleet:
        options = ("--instances", ",".join(addresses(fleet)))
        async with running(*options) as process:
            connector = aiohttp.TCPConnector(limit=0)
            async with (
                aiohttp.ClientSession(process.url, connector=connector) as http,
                asyncio.TaskGroup() as group,
            ):
                body = chat("x", max_tokens=300)
                begun = 0

                async def ask() -> bytes:
                    nonlocal begun
                    async with http.post("/v1/chat/completions", json=body) as response:
                        begun += 1
                        return await response.read()

                asked = [group.create_task(ask()) for _ in range(40)]
                await until(lambda: begun > 20, "streams")
                process.send_signal(signal.SIGINT)
                await until(lambda: process.found("draining"))
                async with http.post("/v1/chat/completions", json=body) as late:
                    assert (late.status, late.headers["Connection"]) == (200, "close")
                async with http.get("/ready") as ready:
                    assert (ready.status, ready.headers["Connection"]) == (503, "close")
            assert all(task.result().endswith(b"data: [DONE]\n\n") for task in asked)
            assert await process.ended() == 0
