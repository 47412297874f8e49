"""The host runs short, and operators do what operators do: the process is one of its own here."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import trustme

from proxy.core.admission.memory import Level
from proxy.net.server.listener import PLACES
from proxy.process.memory import resident_bytes
from replayer.simulator.host import SimFleet
from tests.chaos.client import Connection, Got, connect, exchange, request
from tests.chaos.command import ROOT, Command, command
from tests.chaos.invariants import holds
from tests.chaos.rig import CANARIES, SLOW_PROBES, Floor
from tests.support.harness import (
    DONE,
    GOOD,
    STREAM_HEAD,
    WAIT_S,
    RawEngine,
    Script,
    apart,
    chat,
    chunk,
    event,
    stalls,
    stopped,
    until,
    words,
)
from tests.support.proxy_process import ProxyProcess, url_in

HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
"""How a TLS handshake begins: a record, a ClientHello, its version."""
IDLE_BYTES = 24 << 10
"""Most memory of a connection that says nothing, its half of the proxy's buffers with it."""
BODY = orjson.dumps(chat("x"))
BIG_ENOUGH = words(600)
KEY = "sk-0123456789abcdef"
CONFIG = 'instances = ["a={a}", "b={b}"]\n'


def is_fine(got: Got) -> bool:
    return got.status == 200 and got.is_clean and got.text == "fine"


@asynccontextmanager
async def one(
    rig: Floor,
    folder: Path,
    *options: str,
    script: Script = GOOD,
    shell: str = "",
    request_log: str | None = None,
) -> AsyncIterator[tuple[Command, RawEngine]]:
    """The command before one scripted engine, seen and ready."""
    async with RawEngine(script) as engine:
        async with command(
            folder, [engine.address], *options, shell=shell, request_log=request_log
        ) as proxy:
            await proxy.up(1)
            yield proxy, engine
    rig.checked += 1


async def test_f91_file_descriptors_run_out(rig: Floor, tmp_path: Path) -> None:
    async with one(rig, tmp_path / "c", shell="ulimit -n 256") as (proxy, engine):
        held: list[Connection] = []
        for _ in range(400):
            with contextlib.suppress(OSError):
                held.append(await connect(proxy.url))

        async def served(connection: Connection) -> int:
            try:
                connection.send(request(BODY, {}))
                return (await connection.get()).status
            except OSError:
                return 0

        statuses = await asyncio.gather(*(served(connection) for connection in held))
        assert set(statuses) <= {0, 200, 503}
        assert 50 < statuses.count(200) < 256, "as many as there is room for, each with its engine"
        assert len(engine.posts) == statuses.count(200)
        assert proxy.is_alive
        for connection in held:
            connection.close()

        async def serves_again() -> bool:
            with contextlib.suppress(OSError):
                return is_fine(await proxy.ask())
            return False

        await until(serves_again, "served again")
        assert is_fine(await proxy.ask()), "recovered"


async def test_f91_no_socket_is_left_for_an_instance(rig: Floor, tmp_path: Path) -> None:
    may_answer = asyncio.Event()

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        await GOOD(reader, writer)

    options, shell = ("--max-connections", "400"), "ulimit -n 128"
    async with one(rig, tmp_path / "c", *options, script=waits, shell=shell) as (proxy, _):
        proxy.may_log = ("Too many open files",)
        before = proxy.fds
        held = [await connect(proxy.url) for _ in range(60)]
        # The kernel has taken them; the proxy may be late, and what it cannot accept is no answer.
        await until(lambda: proxy.fds >= before + 58, "accepted")

        async def served(connection: Connection) -> Got | None:
            connection.send(request(BODY, {}))
            try:
                return await connection.get()
            except OSError:
                return None

        # An engine that answers at once frees sockets for the next.
        asked = [asyncio.create_task(served(connection)) for connection in held]
        try:
            await until(lambda: any(task.done() and task.result() for task in asked), "refused")
            may_answer.set()
            answers = [got for got in await asyncio.gather(*asked) if got is not None]
        finally:
            for connection in held:
                connection.close()
        refused = [got for got in answers if got.status != 200]
        assert refused
        assert {got.status for got in refused} == {503}
        proxy.answers += answers
        await until(lambda: proxy.fds < 60, "closed")
        assert is_fine(await proxy.ask())


async def test_f92_request_log_on_a_full_disk(rig: Floor, tmp_path: Path) -> None:
    async with one(rig, tmp_path / "c", request_log="/dev/full") as (proxy, _):
        proxy.may_log = ("request log",)
        assert all([is_fine(await proxy.ask()) for _ in range(20)])

        async def are_counted() -> bool:
            return await proxy.metric("request_log_dropped_total") >= 20

        await until(are_counted, "each dropped line is counted")


async def test_f92_request_log_moved_away(rig: Floor, tmp_path: Path) -> None:
    log = tmp_path / "c" / "requests.jsonl"
    async with one(rig, tmp_path / "c") as (proxy, _):
        assert is_fine(await proxy.ask())
        await until(lambda: proxy.records, "a line")
        os.rename(log, tmp_path / "old.jsonl")

        async def is_logged_anew() -> bool:
            assert is_fine(await proxy.ask())
            return bool(proxy.records)

        await until(is_logged_anew, "a line in the new file")

        # What is counted is in both files together; a line may still be on its way.
        def both() -> bytes:
            return (tmp_path / "old.jsonl").read_bytes() + log.read_bytes()

        await until(lambda: both().count(b"\n") == len(proxy.answers), "every line")
        log.write_bytes(both())


async def test_f92_nobody_reads_stderr(rig: Floor, tmp_path: Path) -> None:
    async with RawEngine() as engine:
        options = ("--instances", engine.address, "--kv-connector", "none", "--log-level", "debug")
        with ProxyProcess(*options, cwd=ROOT, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            url = await asyncio.to_thread(url_in, process.stderr)
            process.stderr.close()
            for _ in range(10):
                assert is_fine(await exchange(url, request(BODY, CANARIES)))
            assert process.is_alive
            process.terminate()
            await process.ended()
    holds("I2", len(engine.posts) == 10, "requests were lost or repeated")
    rig.checked += 1


async def test_f93_memory_runs_out(rig: Floor) -> None:
    options: dict[str, Any] = {
        "heavy_threshold": 100,
        "warm_threshold": 10,
        "max_memory_bytes": 1 << 40,
    }
    async with rig([GOOD], flow=False, **options, **SLOW_PROBES) as r:
        memory = r.state.memory

        async def is_seen(ratio: float, level: Level) -> bool:
            if memory.level is level:
                return True
            memory.limit_bytes = int(await asyncio.to_thread(resident_bytes) / ratio)
            return False

        async def near(ratio: float, level: Level, text: str) -> Got:
            """Move the limit to what is used, until a measurement has seen it; what is said then.

            What is used may rise and fall meanwhile: it counts if the level was this all along.
            """
            async with asyncio.timeout(WAIT_S):
                while True:
                    await until(functools.partial(is_seen, ratio, level))
                    memory.limit_bytes = int(memory.used_bytes / ratio)
                    got = await r.ask(text)
                    if memory.level is level:
                        return got

        assert is_fine(await r.ask(BIG_ENOUGH))
        got = await near(0.935, Level.NO_KEEPALIVE, "short")
        assert is_fine(got)
        assert got.headers.get("connection") == "close"
        assert is_fine(await near(0.965, Level.NO_HEAVY, "short"))
        got = await near(0.965, Level.NO_HEAVY, words(600, "another"))
        assert got.status == 503
        assert int(got.headers["retry-after"]) >= 1
        assert (await near(1.0, Level.NOTHING, "short")).status == 503
        assert is_fine(await near(0.5, Level.NORMAL, words(600, "third")))


class Endless(RawEngine):
    """Streams to whoever asks until it is told to end; `said` counts the events of all."""

    def __init__(self) -> None:
        super().__init__(self._stream)
        self.may_end = asyncio.Event()
        self.said = 0

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        await apart(writer, self._events(), 0.005)
        writer.write(DONE)

    def _events(self) -> Iterator[bytes]:
        while not self.may_end.is_set():
            yield chunk(event("more "))
            self.said += 1

    async def says_more(self) -> None:
        """Wait for some events from now on."""
        enough = self.said + 20
        await until(lambda: self.said > enough, "it streams on")


@asynccontextmanager
async def streaming(
    rig: Floor, folder: Path, *options: str
) -> AsyncIterator[tuple[Command, asyncio.Task[Got], Endless]]:
    """A stream that has begun."""
    async with Endless() as engine, command(folder, [engine.address], *options) as proxy:
        await proxy.up(1)
        asked = asyncio.create_task(proxy.ask())
        await engine.says_more()
        yield proxy, asked, engine
    rig.checked += 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_f94_a_stream_outlives_the_signal(
    rig: Floor, tmp_path: Path, number: signal.Signals
) -> None:
    options = ("--drain-seconds", "60")
    async with streaming(rig, tmp_path / "c", *options) as (proxy, asked, engine):
        proxy.send_signal(number)

        async def is_draining() -> bool:
            return (await proxy.get("/ready")).status == 503

        await until(is_draining, "not ready any more")
        await engine.says_more()
        engine.may_end.set()
        got = await asked
        assert got.is_clean
        assert got.is_done
        assert await proxy.ended() == 0


async def test_f94_a_second_signal_ends_at_once(rig: Floor, tmp_path: Path) -> None:
    options = ("--drain-seconds", "60")
    async with streaming(rig, tmp_path / "c", *options) as (proxy, asked, engine):
        engine.scripts.append(stalls())
        silent = asyncio.create_task(proxy.ask(stream=False))
        await until(lambda: engine.busy == 2, "both are in flight")
        proxy.send_signal(signal.SIGTERM)
        await until(lambda: "draining" in proxy.log, "draining")
        proxy.send_signal(signal.SIGTERM)
        got, unheard = await asked, await silent
        assert (unheard.status, unheard.error["code"]) == (503, "proxy_stopping")
        assert not got.is_clean
        assert len(got.errors) == 1
        assert await proxy.ended() == 0


async def test_f94_signals_that_change_nothing(rig: Floor, tmp_path: Path) -> None:
    async with streaming(rig, tmp_path / "c") as (proxy, asked, engine):
        for _ in range(100):
            proxy.send_signal(signal.SIGHUP)
            proxy.send_signal(signal.SIGUSR1)
            assert (await proxy.get("/live")).status == 200  # so that each signal is one of its own
        await engine.says_more()
        engine.may_end.set()
        got = await asked
        assert got.is_clean
        assert got.is_done
        assert proxy.is_alive
        assert (await proxy.ask()).is_done


async def test_f94_stopped_and_continued(rig: Floor, tmp_path: Path) -> None:
    options = ("--idle-timeout", "2", "--ttft-timeout", "2", "--health-timeout", "1")
    async with streaming(rig, tmp_path / "c", *options) as (proxy, asked, engine):
        await stopped(proxy.pid, 3.0)
        await engine.says_more()
        engine.may_end.set()
        got = await asked
        assert got.is_clean, got.errors
        assert got.is_done


@pytest.mark.parametrize(
    "text", ["", "instances = [", "instances = []\n", 'warm_threshold = "x"\n']
)
async def test_f95_reload_of_a_bad_configuration(rig: Floor, tmp_path: Path, text: str) -> None:
    config = tmp_path / "proxy.toml"
    async with RawEngine() as a, RawEngine() as b:
        config.write_text(CONFIG.format(a=a.address, b=b.address))
        async with command(tmp_path / "c", [], "--config", str(config)) as proxy:
            proxy.may_log = ("not reloaded",)
            await proxy.up(2)
            config.write_text(text)
            proxy.send_signal(signal.SIGHUP)
            await until(lambda: "not reloaded" in proxy.log, "it says why")
            assert (await proxy.get("/instances")).body.count(b'"name"') == 2
            assert is_fine(await proxy.ask())
            assert await proxy.metric("config_reloads_total") >= 1
    rig.checked += 1


async def test_f95_an_instance_leaves_with_live_streams(rig: Floor, tmp_path: Path) -> None:
    config = tmp_path / "proxy.toml"
    async with SimFleet(2, speed=4.0, tick=0.0) as fleet:
        a, b = (engine.url for engine in fleet.engines)
        config.write_text(CONFIG.format(a=a, b=b))
        async with command(tmp_path / "c", [], "--config", str(config)) as proxy:
            await proxy.up(2)
            asked = [asyncio.create_task(proxy.ask(f"p{i}", max_tokens=1500)) for i in range(4)]
            busy = fleet.engines[0].stats
            await until(lambda: busy()["generated_tokens"] > 20, "streams on both")
            config.write_text(f'instances = ["b={b}"]\n')
            proxy.send_signal(signal.SIGHUP)
            answers = await asyncio.gather(*asked)
            assert all(got.is_clean and got.is_done for got in answers)

            async def is_out() -> bool:
                return (await proxy.get("/instances")).body.count(b'"name"') == 1

            await until(is_out, "one instance is left")
    rig.checked += 1


async def test_f135_a_config_file_that_is_cut(rig: Floor, tmp_path: Path) -> None:
    """By the watch, by SIGHUP, and by SIGUSR2: what is closed stays closed."""
    config, keys = tmp_path / "proxy.toml", tmp_path / "keys"
    async with RawEngine() as a, RawEngine() as b:
        head = CONFIG.format(a=a.address, b=b.address) + "health_interval = 0.1\n"
        keys.write_text(f"acme:{KEY}\nzeta:{'z' * 20}\n")
        secrets = f'admin_token = "{"t" * 20}"\napi_key = "@{keys}"\n'
        config.write_text(head + secrets)
        async with command(tmp_path / "c", [], "--config", str(config)) as proxy:
            proxy.may_log = ("not reloaded", "hot restart failed")
            token = {"Authorization": f"Bearer {'t' * 20}"}

            async def is_up() -> bool:
                with contextlib.suppress(OSError):
                    return (await proxy.get("/ready")).status == 200
                return False

            async def stays_closed(*others: str) -> None:
                assert (await proxy.ask()).status == 401
                assert (await proxy.get("/instances")).status == 401
                assert (await proxy.get("/instances", token)).body.count(b'"name"') == 2
                for key, status in ((KEY, 200), *((other, 401) for other in others)):
                    asked = request(BODY, {"Authorization": f"Bearer {key}"})
                    assert (await exchange(proxy.url, asked)).status == status

            await until(is_up, "ready")
            refusals = 0

            async def refused() -> None:
                nonlocal refusals
                refusals += 1
                await until(lambda: proxy.log.count("not reloaded") >= refusals, "it says why")

            for text in (head, head + secrets.splitlines()[0] + "\n"):
                config.write_text(text)
                await refused()
                await stays_closed()
                proxy.send_signal(signal.SIGHUP)
                await refused()
                await stays_closed()
            proxy.send_signal(signal.SIGUSR2)
            await until(lambda: "hot restart failed" in proxy.log, "SIGUSR2")
            await stays_closed()
            config.write_text(head + secrets)
            keys.write_text(f"acme:{KEY}\nzeta:zz")
            proxy.send_signal(signal.SIGHUP)
            await refused()
            await stays_closed("zz")
            assert proxy.is_alive
    rig.checked += 1


def grows(path: Path) -> None:
    path.touch()
    os.truncate(path, 600 << 20)


@pytest.mark.parametrize(
    ("which", "how"),
    [
        ("keys", os.mkfifo),
        ("config", os.mkfifo),
        ("config", grows),
        ("keys", lambda path: path.symlink_to("/dev/zero")),
    ],
    ids=["keys in a FIFO", "options in a FIFO", "grown options", "endless keys"],
)
async def test_f159_no_regular_file(
    rig: Floor, tmp_path: Path, which: str, how: Callable[[Path], None]
) -> None:
    """By the watch or SIGHUP, and by SIGUSR2."""
    keys, config = tmp_path / "keys", tmp_path / "proxy.toml"
    async with RawEngine() as a, RawEngine() as b:
        text = (
            CONFIG.format(a=a.address, b=b.address)
            + f'health_interval = 0.1\napi_key = "@{keys}"\n'
        )
        texts = {keys: f"acme:{KEY}\n", config: text}
        for path, content in texts.items():
            path.write_text(content)
        async with command(tmp_path / "c", [], "--config", str(config)) as proxy:
            proxy.may_log = ("not reloaded", "hot restart failed")

            async def status_of(key: str) -> int:
                asked = request(BODY, {"Authorization": f"Bearer {key}"})
                return (await exchange(proxy.url, asked)).status

            async def is_open(key: str = KEY) -> bool:
                with contextlib.suppress(OSError):
                    return await status_of(key) == 200
                return False

            await until(is_open, "ready")
            before, path = proxy.rss_bytes, tmp_path / ("keys" if which == "keys" else "proxy.toml")
            # In one step: where it is away for a moment, the watch says that too.
            how(aside := tmp_path / "aside")
            aside.replace(path)
            proxy.send_signal(signal.SIGHUP)
            await until(lambda: "not reloaded" in proxy.log, "it says why")
            proxy.send_signal(signal.SIGUSR2)
            await until(lambda: "hot restart failed" in proxy.log, "SIGUSR2")
            assert await status_of(KEY) == 200
            assert proxy.rss_bytes - before < 32 << 20
            refused = [line for line in proxy.log.splitlines() if "not reloaded" in line]
            hung = sum("cannot be read" in line for line in refused)
            # On a starved machine a look takes too long: that is said, and the file once more.
            assert len(refused) <= 2 * (1 + hung), "the watch and SIGHUP, once each"
            other = "k" * 20
            texts[keys] += f"zeta:{other}\n"
            for path, content in texts.items():
                aside.write_text(content)
                aside.replace(path)
            proxy.send_signal(signal.SIGHUP)
            await until(functools.partial(is_open, other), "the right file is read")
            assert proxy.is_alive
    rig.checked += 1


async def test_f96_scrape_storm_and_admin_abuse(rig: Floor, tmp_path: Path) -> None:
    token = "canary-admin-token-6f2e"
    async with one(rig, tmp_path / "c", "--admin-token", token) as (proxy, _):

        async def scrapes() -> None:
            for _ in range(10):
                assert (await proxy.get("/metrics")).status == 200

        async def knocks() -> None:
            for i in range(50):
                got = await proxy.get("/instances", {"Authorization": f"Bearer wrong-{i}"})
                assert got.status in (401, 429)

        async def stuffs() -> None:
            head = {"Authorization": "Bearer wrong"}
            data = request(b"x" * (10 << 20), head, "/instances")
            with contextlib.suppress(ConnectionError):
                assert (await exchange(proxy.url, data)).status in (401, 413, 429)

        async def works() -> list[Got]:
            return [await proxy.ask(f"prompt {i}") for i in range(100)]

        attacks = [scrapes() for _ in range(30)] + [knocks() for _ in range(20)] + [stuffs()]
        working = asyncio.create_task(works())
        await asyncio.gather(*attacks)
        assert all(map(is_fine, await working))
        assert (await proxy.get("/instances")).status in (401, 429)
        good = await proxy.get("/instances", {"Authorization": f"Bearer {token}"})
        assert good.status == 200
        assert token not in proxy.log


def certificate(folder: Path) -> tuple[str, str]:
    """Files of a certificate that nobody trusts, and of its key."""
    made = trustme.CA().issue_cert("127.0.0.1")
    cert, key = folder / "cert.pem", folder / "key.pem"
    made.cert_chain_pems[0].write_to_path(cert)
    made.private_key_pem.write_to_path(key)
    return str(cert), str(key)


async def test_f118_tls_handshakes_that_never_end(rig: Floor, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    options = ("--tls-cert", cert, "--tls-key", key, "--max-connections", "40")
    async with one(rig, tmp_path / "c", *options, shell="ulimit -n 128") as (proxy, _):
        before = proxy.fds
        plain_url = proxy.url.replace("https", "http")
        held = [await connect(plain_url) for _ in range(200)]
        for connection in held[::2]:
            connection.send(HELLO[:7])
        for connection in held[1::4]:
            connection.send(b"no TLS at all")

        async def are_ended() -> bool:
            return await proxy.metric("tls_handshakes_failed_total") >= 160

        await until(are_ended, "the oldest have made room")
        assert proxy.fds <= before + 40 + PLACES
        assert is_fine(await proxy.ask())
        for connection in held:
            connection.close()


async def test_f182_tls_records_of_a_byte(rig: Floor, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    async with one(rig, tmp_path / "c", "--tls-cert", cert, "--tls-key", key) as (proxy, _):
        client = await connect(proxy.url)
        client.send(request(b"{" + b" " * 100_000, {})[:-100_000])
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                for _ in range(1000):
                    client.send(b" ")
                await client.writer.drain()
        with pytest.raises(ConnectionError):
            await client.get()
        counted = await proxy.exposition()
        assert 'client_errors_total{reason="small_records"} 1.0' in counted
        assert is_fine(await proxy.ask())
        client.close()


def put_at(path: Path, make: Callable[[], object]) -> None:
    """Put something in the place of a log, which the proxy makes anew while nothing is there."""
    while True:
        path.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            make()
            return


async def test_f117_request_log_behind_a_symlink(rig: Floor, tmp_path: Path) -> None:
    """The link is followed wherever it leads; what stands in its place may be no file at all."""
    log = tmp_path / "log.jsonl"
    log.symlink_to(tmp_path / "first.jsonl")
    async with one(rig, tmp_path / "c", request_log=str(log)) as (proxy, _):
        proxy.may_log = ("request log",)

        async def asks_until(condition: Callable[[], bool], what: str) -> None:
            async def is_so() -> bool:
                assert is_fine(await proxy.ask())
                return condition()

            await until(is_so, what)

        async def asks_until_dropped(more_than: float) -> None:
            async def are_dropped() -> bool:
                assert is_fine(await proxy.ask())
                return await proxy.metric("request_log_dropped_total") > more_than

            await until(are_dropped, "lines are dropped and counted")

        def lines(name: str) -> int:
            path = tmp_path / name
            return path.read_bytes().count(b"\n") if path.is_file() else 0

        await asks_until(lambda: lines("first.jsonl") > 0, "the link's target is made")
        put_at(log, lambda: log.symlink_to(tmp_path / "second.jsonl"))
        await asks_until(lambda: lines("second.jsonl") > 0, "another target is followed")
        for make in (
            lambda: log.symlink_to(tmp_path / "nowhere" / "log"),
            lambda: log.symlink_to(log),
            log.mkdir,
            lambda: os.mkfifo(log),
            lambda: log.symlink_to("/dev/full"),
        ):
            put_at(log, make)
            await asks_until_dropped(await proxy.metric("request_log_dropped_total"))
            if log.is_dir() and not log.is_symlink():
                log.rmdir()
                log.touch()
        put_at(log, lambda: log.symlink_to(tmp_path / "third.jsonl"))
        await asks_until(lambda: lines("third.jsonl") > 0, "written again")
        assert proxy.log.count("dropping lines") >= 1


async def test_f119_five_thousand_idle_connections(rig: Floor, tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    count = min(5000, int(hard * 0.4))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        async with one(rig, tmp_path / "c") as (proxy, _):
            assert is_fine(await proxy.ask())
            fds, rss_bytes = proxy.fds, proxy.rss_bytes
            held = [await connect(proxy.url) for _ in range(count)]
            for connection in held[: count // 2]:
                connection.send(b"GET /live HTTP/1.1\r\nHost: p\r\n\r\n")
            for connection in held[: count // 2]:
                assert (await connection.get()).status == 200

            async def are_in() -> bool:
                return await proxy.metric("open_connections") >= count

            await until(are_in, "all are in")
            grown = proxy.rss_bytes - rss_bytes
            assert grown < count * IDLE_BYTES, f"{grown / count:.0f} bytes each"
            assert all([is_fine(await proxy.ask(f"prompt {i}")) for i in range(20)])
            for connection in held:
                connection.close()
            await until(lambda: proxy.fds <= fds + 2, "all are given back")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


JUMPS = """import os, time
real, real_ns, by = time.time, time.time_ns, os.environ["CLOCK_MOVED_BY"]
def moved():
    with open(by) as file:
        return float(file.read() or 0)
time.time = lambda: real() + moved()
time.time_ns = lambda: real_ns() + int(moved()) * 10**9
"""
"""Python runs a module `sitecustomize` before all others."""


async def test_f123_the_processs_clock_jumps(rig: Floor, tmp_path: Path) -> None:
    """While a stream runs, requests come, and the process drains: it notices nothing."""
    (tmp_path / "sitecustomize.py").write_text(JUMPS)
    moved = tmp_path / "moved"
    moved.write_text("0")
    shell = f'export PYTHONPATH="{tmp_path}" CLOCK_MOVED_BY="{moved}"'
    options = ("--session-ttl", "60", "--total-timeout", "60", "--health-interval", "0.1")
    async with (
        Endless() as engine,
        command(tmp_path / "c", [engine.address], *options, shell=shell) as proxy,
    ):
        await proxy.up(1)
        endless = asyncio.create_task(proxy.ask())
        await engine.says_more()
        engine.scripts.append(GOOD)
        for years in (10, -10, 0):
            moved.write_text(str(years * 31_557_600))
            await engine.says_more()
            assert all([is_fine(await proxy.ask(f"{years} {i}")) for i in range(3)])
            assert proxy.log.count("is down") == proxy.log.count("is ejected") == 0
        engine.may_end.set()
        assert (await endless).is_done
        await until(lambda: len(proxy.records) == 10, "every line")
        for record in proxy.records:
            assert 0 <= record["t_done"] - record["t_proxy_recv"] < 60
        moved.write_text("-900000000")
        proxy.send_signal(signal.SIGTERM)
        assert await proxy.ended() == 0
    rig.checked += 1
