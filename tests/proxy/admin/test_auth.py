"""Admin paths under abuse, and what is said of them."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric

from proxy.admin.auth import Denials, audited
from proxy.cli import warn_of_options
from proxy.config.in_force import OptionsInForce
from proxy.config.load import load
from proxy.config.options import Settings
from proxy.net.timeouts import Clock
from proxy.telemetry import metrics as metrics_module
from proxy.telemetry.log import LOG_EVERY_S
from tests.support.admin import call
from tests.support.harness import WAIT_S, RawEngine, ServedProxy, chat, proxied, says, until
from tests.support.proxy_process import running

TOKEN = "operators-token-0123456789"
GOOD = {"Authorization": f"Bearer {TOKEN}"}


@pytest.mark.long
async def test_ten_thousand_wrong_tokens_are_refused_in_a_few_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with RawEngine(says(b"")) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], admin_token=TOKEN) as proxy:
            port = int(proxy.server.url.rpartition(":")[2])
            once = b"GET /instances HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %d\r\n\r\n"

            async def guess(at: int) -> int:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                denied = 0
                for turn in range(500):
                    writer.write(once % (at * 1000 + turn) * 5)
                    for _ in range(5):
                        head = await reader.readuntil(b"\r\n\r\n")
                        denied += head.startswith(b"HTTP/1.1 401 ")
                        length = head.lower().partition(b"content-length: ")[2].split()[0]
                        await reader.readexactly(int(length))
                writer.close()
                return denied

            now_s = asyncio.get_running_loop().time
            began_s = now_s()
            assert sum(await asyncio.gather(*(guess(at) for at in range(4)))) == 10_000
            assert proxy.metric("denied_total", who="operator") == 10_000
            assert (await call(proxy, "GET", "/instances", headers=GOOD))[0] == 200
            lines = [r for r in caplog.records if "denied" in r.getMessage()]
            assert 1 <= len(lines) <= 2 + (now_s() - began_s) / LOG_EVERY_S


@pytest.mark.parametrize("path", ["/instances", "/busy_threshold"])
async def test_a_large_body_is_not_read(tmp_path: Path, path: str) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(160):
            yield b" " * 65536

    async with proxied(tmp_path, 1, admin_token=TOKEN) as (proxy, _):
        headers = GOOD | {"Content-Type": "application/json"}
        for data in (io.BytesIO(b" " * (10 << 20)), endless()):
            async with proxy.http.post(path, data=data, headers=headers) as response:
                assert response.status == 413


async def test_every_change_has_a_line_and_no_look_has_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with proxied(tmp_path, 1, admin_token=TOKEN) as (proxy, _):
        name = proxy.settings.instances[0].name
        for method, path, body, status in (
            ("POST", "/instances", {"instance": "new=127.0.0.1:9"}, 201),
            ("DELETE", "/instances/new?token=hidden", None, 200),
            ("POST", "/busy_threshold", {"model": "*", "active_prefill_tokens_threshold": 9}, 200),
            ("POST", "/sessions/a%0ab/end", None, 404),
            ("DELETE", f"/instances/{name}?drain=true", None, 202),
            ("GET", "/instances", None, 200),
            ("GET", "/decisions", None, 200),
        ):
            assert (await call(proxy, method, path, body, headers=GOOD))[0] == status
        lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("admin: ")]
        assert [line.split()[1] for line in lines] == ["POST", "DELETE", "POST", "POST", "DELETE"]
        assert [int(line.split()[-1]) for line in lines] == [201, 200, 200, 404, 202]
        assert not any("\n" in line or "hidden" in line or TOKEN in line for line in lines)
        assert "instance new added: http://127.0.0.1:9" in caplog.messages
        assert any(
            line.startswith("busy thresholds of *: ")
            and "active_prefill_tokens_threshold 9" in line
            for line in caplog.messages
        )


async def test_the_token_changes_with_a_reload(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    async with RawEngine(says(b"")) as engine:
        argv = ["--instances", engine.address, "--admin-token", f"@{token}"]
        argv += ["--host", "127.0.0.1", "--port", "0", "--request-log", str(tmp_path / "log")]
        given = vars((await asyncio.to_thread(load, argv, {})).settings) | {"health_interval": 0.05}

        def source() -> object:
            return load([*argv, "--health-interval", "0.05"], {}).settings

        del given["instances"]
        async with ServedProxy(tmp_path / "log", [engine.address], source=source, **given) as proxy:
            assert (await call(proxy, "GET", "/instances", headers=GOOD))[0] == 200
            token.write_text("another-0123456789")
            assert await proxy.server.reloader.reload("test") in ("applied", "refused")
            assert (await call(proxy, "GET", "/instances", headers=GOOD))[0] == 401
            new = {"Authorization": "Bearer another-0123456789"}
            assert (await call(proxy, "GET", "/instances", headers=new))[0] == 200


@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        (("--admin-token", TOKEN), False),
        (("--admin-port", "0"), False),
        (("--host", "127.0.0.1"), False),
        ((), True),
    ],
)
def test_open_admin_paths_are_warned_of(
    options: tuple[str, ...], is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    host = () if "--host" in options else ("--host", "0.0.0.0")
    given = ("--instances", "127.0.0.1:9;bootstrap=10", *host, *options)
    warn_of_options(logging.getLogger("proxy"), load(given, {}).settings)
    assert any("admin paths are open" in r.getMessage() for r in caplog.records) == is_warned


def test_a_key_that_seems_to_have_a_tenant_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    given = ("--instances", "127.0.0.1:9", "--api-key", "al=0123456789abcdef")
    warn_of_options(logging.getLogger("proxy"), load(given, {}).settings)
    (told,) = [r.getMessage() for r in caplog.records if "colon" in r.getMessage()]
    assert told.startswith("api_key: key 1: ")


CANARIES = [f"canary{os.urandom(6).hex()}" for _ in range(40)]
CHAT = "/v1/chat/completions"


def post(headers: str, body: str, path: str = CHAT) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}"
    head += "Content-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def said(text: str) -> str:
    return f'{{"model":"sim-8b","messages":[{{"role":"user","content":"{text}"}}]}}'


def leaky(key: str, token: str, left: Iterator[str]) -> Iterator[bytes]:
    """Requests with a secret wherever one can stand."""
    auth, operator = (f"Authorization: Bearer {x}\r\n" for x in (key, token))
    for _ in range(4):  # the engine's words, in turn
        yield post(auth, said(next(left)), f"{CHAT}?api_key={next(left)}")
    for name in ("Authorization: Bearer ", "Authorization: Basic ", "x-api-key: ", "Cookie: "):
        yield post(f"{name}{next(left)}\r\n", said(next(left)))
    for bad in ('{{"{}"', '"{}"', "{}", '{{"cache_salt":"@{}"}}'):
        yield post(auth, bad.format(next(left)))
    for path in ("/instances", "/busy_threshold", "/sessions/x/end"):
        yield post(f"Authorization: Bearer {next(left)}\r\n", next(left), path)
    yield post(operator, f'{{"instance":"http://u:{next(left)}@h:1"}}', "/instances")
    yield post(auth, "", f"/nowhere?x={next(left)}")


def malformed(left: Iterator[str]) -> Iterator[bytes]:
    """What the parser stumbles over."""
    yield f"GET /live?{next(left)} HTTP/1.1\r\nHost: x\r\n{next(left)}\r\n\r\n".encode()
    yield f"{next(left)} /v1/models HTTP/9\r\n\r\n".encode()
    yield f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {next(left)}\r\n\r\n".encode()
    yield f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nX: {next(left)}\0\r\n\r\n".encode()


async def ask(port: int, raw: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    try:
        async with asyncio.timeout(WAIT_S):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.long
async def test_forty_secrets_are_nowhere_to_be_found(tmp_path: Path) -> None:
    """In queries, headers, bodies, keys and engines' words: not in a log, a metric, an answer."""
    left = iter(CANARIES)
    log = tmp_path / "log"
    key, inner, token, salt = (f"{next(left)}-0123456789" for _ in range(4))
    scripts = [
        says(f"HTTP/1.1 {next(left)}\r\n\r\n".encode(), close=True),
        says(f"HTTP/1.1 200 OK\r\nContent-Length: zz{next(left)}\r\n\r\n".encode()),
        says(f'{{"error":"{next(left)}"'.encode(), close=True),
        says(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"),
    ]
    async with RawEngine(*scripts) as engine:
        options = ["--instances", engine.address, "--api-key", f"acme:{key}"]
        options += ["--instance-api-key", inner, "--admin-token", token, "--log-level", "debug"]
        options += ["--cache-salt-secret", salt, "--request-log", str(log)]
        async with running(*options) as process:
            port = int(process.url.rpartition(":")[2])
            seen = [await ask(port, raw) for raw in leaky(key, token, left)]
            seen += [await ask(port, raw) for raw in malformed(left)]
            metrics = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            seen.append(await ask(port, metrics))
            process.terminate()
            assert await process.ended() == 0
    assert next(left, None) is None, "all forty were used"
    everything = b"".join(seen) + process.log.encode() + log.read_bytes()
    assert b"cache_proxy_requests_total" in everything
    lines = everything.split(b"\n")
    assert [line for line in lines if any(c.encode() in line for c in CANARIES)] == []


async def test_streams_move_while_metrics_are_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[threading.Thread] = []

    def write(registry: CollectorRegistry) -> bytes:
        writers.append(threading.current_thread())
        return generate_latest(registry)

    monkeypatch.setattr(metrics_module, "generate_latest", write)
    async with proxied(tmp_path, 1) as (proxy, _):
        port = int(proxy.server.url.rpartition(":")[2])
        assert b"cache_proxy_live_leases 0.0" in await ask(
            port, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
    assert writers
    assert threading.main_thread() not in writers


async def test_scrapers_who_leave_share_an_answer_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is made, though nobody is there any more, and the next one who asks gets it."""
    written = 0
    go_on = threading.Event()

    def write(registry: CollectorRegistry) -> bytes:
        nonlocal written
        written += 1
        assert go_on.wait(10)
        return generate_latest(registry)

    monkeypatch.setattr(metrics_module, "generate_latest", write)
    async with proxied(tmp_path, 1) as (proxy, _):
        metrics = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        port = int(proxy.server.url.rpartition(":")[2])
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(metrics)
            await until(lambda: proxy.server.state.exposition.is_being_made, "it is being made")
            writer.transport.abort()
        came = proxy.listener.requests_count
        last = asyncio.create_task(ask(port, metrics))
        await until(lambda: proxy.listener.requests_count > came, "the last one has asked")
        go_on.set()
        assert b"cache_proxy_live_leases 0.0" in await last
        assert written == 1


async def test_a_storm_of_scrapes_shares_its_answers(tmp_path: Path) -> None:
    """And a scrape after it is a new one."""
    async with proxied(tmp_path, 2) as (proxy, _):
        metrics = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        port = int(proxy.server.url.rpartition(":")[2])
        bodies: set[bytes] = set()
        renders = 0
        collect = proxy.server.state.collector.collect

        def counted() -> Iterator[Metric]:
            nonlocal renders
            renders += 1
            return collect()

        proxy.server.state.collector.collect = counted  # type: ignore[method-assign]
        answers = await asyncio.gather(*(ask(port, metrics) for _ in range(100)))
        assert all(a.startswith(b"HTTP/1.1 200 ") for a in answers)
        bodies.update(a.partition(b"\r\n\r\n")[2] for a in answers)
        assert len(bodies) <= renders < 50
        assert (await proxy.post(chat("x"))).status == 200
        state = proxy.server.state
        await until(
            lambda: state.clock.now_s() >= state.exposition.shown_until_s, "a new one is due"
        )
        assert b'outcome="ok"' in await ask(port, metrics)


PAGES: list[tuple[dict[str, str], int]] = [
    ({"Content-Type": "text/plain"}, 415),
    ({"Content-Type": "text/plain;charset=UTF-8"}, 415),
    ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
    ({"Origin": "https://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": "[", "Content-Type": "application/json"}, 403),
    ({"Origin": "http://evil.example", "Host": "evil.example"}, 403),
    ({"Host": "evil.example"}, 403),
    ({"Host": "EVIL.example.:80"}, 403),
    ({"Host": "127.0.0.1.evil.example"}, 403),
    ({"Host": "localhost.evil.example"}, 403),
    ({}, 200),
    ({"Content-Type": "application/json"}, 200),
    ({"Host": "proxy:8000"}, 200),
    ({"Host": "[::1]:8000"}, 200),
    ({"Host": "cache-proxy.infra.svc.cluster.local"}, 200),
    ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
]


@pytest.mark.long
@pytest.mark.parametrize(("headers", "status"), PAGES)
async def test_what_a_web_page_may_send_changes_nothing(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        now_s, port = proxy.server.state.clock.now_s(), int(proxy.server.url.rpartition(":")[2])
        (member,) = proxy.router.known.fleet.members()
        name, cache = member.instance.name, member.state.cache
        proxy.router.known.sessions.assign("s", cache, now_s)
        lines = {"Host": "127.0.0.1"} | headers

        async def asked(method: str, path: str) -> int:
            head = "".join(f"{key}: {value}\r\n" for key, value in lines.items())
            raw = f"{method} {path} HTTP/1.1\r\n{head}Content-Length: 0\r\n\r\n".encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw)
            got = int((await reader.readline()).split()[1])
            writer.close()
            return got

        assert await asked("POST", "/sessions/s/end") == status
        assert (proxy.router.known.sessions.stay("s") is None) == (status == 200)
        is_of_host = status == 403 and "Host" in headers
        assert await asked("GET", "/instances") == (403 if is_of_host else 200)
        removed = await asked("DELETE", f"/instances/{name}")
        assert removed == (403 if status == 403 else 200), "a browser asks before a DELETE"
        assert (proxy.router.known.fleet.get(name) is None) == (removed == 200)


async def test_with_a_token_any_name_will_do(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1, admin_token=TOKEN) as (proxy, _):
        for headers, status in ((GOOD, 200), ({}, 401)):
            named = headers | {"Host": "gpu-proxy.corp.example"}
            assert (await call(proxy, "GET", "/instances", headers=named))[0] == status


@pytest.mark.parametrize(("method", "status"), [("POST", 503), ("DELETE", 503), ("GET", 201)])
async def test_an_order_that_ends_while_another_process_takes_over_is_to_be_given_again(
    method: str, status: int
) -> None:
    """That process has a copy of what was ordered before, which may be without it."""
    replaced: list[bool] = []

    async def handler(_request: web.Request) -> web.StreamResponse:
        replaced.append(True)
        return web.Response(status=201)

    options = OptionsInForce(Settings(discover=["dns://engines:8000"], bootstrap_port=None))
    answers = audited(options, Denials(Clock(), lambda: None), lambda: bool(replaced), handler)
    json = {"Content-Type": "application/json", "Host": "localhost"}
    assert (await answers(make_mocked_request(method, "/instances", headers=json))).status == status
    assert len(replaced) == 1
