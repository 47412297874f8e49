"""Hot restarts of real processes: what their clients see, and what operators can do wrong."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import ssl
import sys
from pathlib import Path

import aiohttp
import trustme

from bench.faults.restart import BODY, Seen, pid_of, replace, replaceable, run
from bench.measuring.processes import is_running
from tests.chaos import figures
from tests.chaos.client import Connection, connect, request
from tests.chaos.command import ROOT, Command
from tests.chaos.rig import Floor
from tests.support.harness import RawEngine, until

TIMES, RATE, STREAMS = 3, 100.0, 20


def get(path: str) -> bytes:
    return request(None, {}, path, "GET")


async def handed_over(proxy: Command) -> None:
    """Wait until the first process accepts no more."""
    await until(lambda: "handed over" in proxy.log, "handed over")


async def answer(connection: Connection, data: bytes) -> tuple[int, str | None]:
    """Status, and what is said of the connection."""
    connection.send(data)
    got = await connection.get()
    return got.status, got.headers.get("connection")


async def test_r9_hot_restart_under_load(rig: Floor, tmp_path: Path) -> None:
    seen = await run(tmp_path, TIMES, RATE, STREAMS)
    figures.say("R9", f"hot restart: {seen}")
    assert seen.lost == 0
    assert seen.streams["whole"] == STREAMS
    assert seen.reused > 10
    assert len(set(seen.pids)) == TIMES + 1
    rig.checked += 1


async def test_kept_connections_are_led_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("")  # the kernel chooses a name, which no folder makes too long
        systemd.setblocking(False)
        shell = f"export NOTIFY_SOCKET=@{systemd.getsockname()[1:].decode()}"
        async with (
            RawEngine() as engine,
            replaceable(tmp_path, [engine.address], shell=shell) as proxy,
        ):
            await proxy.up(1)
            busy, balancer, silent = [await connect(proxy.url) for _ in range(3)]
            assert await answer(busy, request(BODY, {"X-Session-ID": "s"})) == (200, None)
            assert await answer(balancer, get("/ready")) == (200, None)
            await replace(tmp_path, Seen())
            await handed_over(proxy)
            assert "1 sessions and 0 blocks taken over" in proxy.log, "a prompt of less than one"
            assert proxy.is_alive
            proxy.send_signal(signal.SIGUSR2)
            await until(lambda: "has taken over already" in proxy.log, "refused")
            assert await answer(balancer, get("/ready")) == (200, "close")
            assert await answer(busy, request(BODY, {})) == (200, "close")
            assert await answer(silent, get("/metrics")) == (200, "close")
            assert await proxy.ended() == 0
            fresh = await connect(proxy.url)
            assert await answer(fresh, get("/ready")) == (200, None)
            assert await answer(fresh, request(BODY, {})) == (200, None)
            for connection in (busy, balancer, silent, fresh):
                connection.close()
            assert pid_of(tmp_path) != proxy.pid, "the file is the successor's"
            said = [systemd.recv(100) for _ in range(2)]
            assert said == [b"READY=1", b"MAINPID=%d\nSTATUS=" % pid_of(tmp_path)]
        assert not (tmp_path / "pid").exists()
        assert len(proxy.records) == 3, "both write the same log"


async def test_operators_are_heeded_by_the_next_process_too(tmp_path: Path) -> None:
    async with (
        RawEngine() as one,
        RawEngine() as removed,
        RawEngine() as added,
        replaceable(tmp_path, [f"a={one.address}", f"b={removed.address}"]) as proxy,
        aiohttp.ClientSession(proxy.url) as http,
    ):
        await proxy.up(2)
        async with http.delete("/instances/b") as gone:
            assert gone.status == 200
        async with http.post("/instances", json={"instance": f"c={added.address}"}) as come:
            assert come.status == 201
        await replace(tmp_path, Seen())
        await handed_over(proxy)
        async with aiohttp.ClientSession(proxy.url) as fresh, fresh.get("/instances") as answer:
            assert sorted(one["name"] for one in await answer.json()) == ["a", "c"]
        assert "1 instances are added and 1 left out" in proxy.log


async def test_one_that_does_not_start_changes_nothing(tmp_path: Path) -> None:
    config = tmp_path / "proxy.toml"
    config.write_text("max_queue = 4\n")
    options = ("--config", str(config))
    async with RawEngine() as engine, replaceable(tmp_path, [engine.address], *options) as proxy:
        await proxy.up(1)
        config.write_text('max_queue = "many"\n')
        proxy.send_signal(signal.SIGUSR2)
        await until(lambda: "starts" in proxy.log, "begun")
        proxy.send_signal(signal.SIGUSR2)
        await until(lambda: "carries on" in proxy.log, "given up")
        assert "hot restart refused: one is under way" in proxy.log
        (line,) = [line for line in proxy.log.splitlines() if "carries on" in line]
        assert re.search(r"ERROR hot restart failed, .*: process \d+: .*max_queue.*many", line)
        assert pid_of(tmp_path) == proxy.pid
        assert (await proxy.ask()).text == "fine"
        config.write_text("max_queue = 5\n")
        await replace(tmp_path, Seen())
        assert pid_of(tmp_path) != proxy.pid
        assert (await proxy.ask()).text == "fine"
        assert "Traceback" not in proxy.log


async def test_a_signal_meanwhile_stops_both(tmp_path: Path) -> None:
    async with RawEngine() as engine, replaceable(tmp_path, [engine.address]) as proxy:
        await proxy.up(1)
        proxy.send_signal(signal.SIGUSR2)
        await until(lambda: "starts" in proxy.log, "begun")
        proxy.send_signal(signal.SIGTERM)
        assert await proxy.ended() == 0
        found = re.search(r"process (\d+) starts", proxy.log)
        assert found is not None
        await until(lambda: not is_running(int(found[1])), "the new one ends too")
        assert not (tmp_path / "pid").exists()


async def test_a_handshake_outlives_its_process(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca"))
    leaf = authority.issue_cert("127.0.0.1")
    leaf.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "leaf"))
    secure = ssl.create_default_context(cafile=str(tmp_path / "ca"))
    options = ("--tls-cert", str(tmp_path / "leaf"))
    async with RawEngine() as engine, replaceable(tmp_path, [engine.address], *options) as proxy:
        port = int(proxy.url.rsplit(":", 1)[1])
        silent = socket.create_connection(("127.0.0.1", port))
        silent.setblocking(False)
        await replace(tmp_path, Seen())
        await handed_over(proxy)
        for sock in (silent, socket.create_connection(("127.0.0.1", port))):
            streams = await asyncio.open_connection(
                sock=sock, ssl=secure, server_hostname="127.0.0.1"
            )
            connection = Connection(*streams)
            expected = "close" if sock is silent else None
            assert await answer(connection, request(BODY, {})) == (200, expected)
            connection.close()


def activated(folder: Path, engine: str, listening: socket.socket) -> int:
    """Start it as systemd does, with a socket as its third descriptor; its id."""
    words = [sys.executable, "-m", "proxy.cli", "--instances", engine, "--kv-connector", "none"]
    words += ["--pid-file", str(folder / "pid")]
    line = 'cd "$0"; LISTEN_PID=$$ LISTEN_FDS=1 exec "$@" 2>' + str(folder / "stderr")
    shared = [(os.POSIX_SPAWN_DUP2, listening.fileno(), 3)]
    command = ["sh", "-c", line, str(ROOT), *words]
    return os.posix_spawn("/bin/sh", command, os.environ, file_actions=shared)


async def test_sockets_of_a_supervisor(tmp_path: Path) -> None:
    """The options' own address is not used, by no successor either."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with RawEngine() as engine:
            early = await connect(url)
            early.send(get("/live"))
            first = activated(tmp_path, engine.address, listening)
            try:
                assert (await early.get()).status == 200
                await replace(tmp_path, Seen())
                await until(lambda: "handed over" in (tmp_path / "stderr").read_text())
                assert await answer(early, get("/live")) == (200, "close")
                early.close()
                fresh = await connect(url)
                assert await answer(fresh, request(BODY, {})) == (200, None)
                fresh.close()
                # Not stopped by a signal: one that comes while it ends would kill it.
                await until(lambda: not is_running(first), "the first ends by itself")
            finally:
                last = pid_of(tmp_path)
                for pid in {first, last}:
                    os.kill(pid, signal.SIGTERM)
            assert await asyncio.to_thread(os.waitpid, first, 0) == (first, 0)
            await until(lambda: not is_running(last), "the last ends")
