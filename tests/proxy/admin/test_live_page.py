"""The live page as browsers and terminals get it: rights, escaping, events, and their end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
import socket
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.admin import live_page
from proxy.admin.live_page import MOST_VIEWERS, LivePage
from proxy.core.placement.policies import POLICIES
from tests.support.admin import call
from tests.support.certificates import Certificates
from tests.support.harness import RawEngine, ServedProxy, chat, proxied, stalls, until, words

TOKEN = "operators-token-0123456789"
HTML = {"Accept": "text/html,*/*"}
TEXT = {"Accept": "text/plain"}
EVIL = "<script>alert(1)</script>"


async def get(proxy: ServedProxy, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    async with proxy.http.get(path, headers=headers) as response:
        return response.status, await response.text(), dict(response.headers)


def page_of(proxy: ServedProxy) -> LivePage:
    return proxy.server._routes.page


@contextlib.asynccontextmanager
async def viewer(
    proxy: ServedProxy, **headers: str
) -> AsyncIterator[tuple[aiohttp.ClientResponse, Any]]:
    """One viewer: its response, and what gives the next event."""
    async with proxy.http.get("/ui/events", headers=headers) as response:

        async def event() -> dict[str, str]:
            line = await response.content.readline()
            assert line.startswith(b"data: ")
            assert await response.content.readline() == b"\n"
            found: dict[str, str] = orjson.loads(line[6:])
            return found

        yield response, event


class Seen(HTMLParser):
    """The tags of a page, and the ids of its elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


async def test_the_page_is_whole_without_javascript(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2) as (proxy, _):
        await proxy.post(chat("x"), headers={"X-Request-Id": "r1"})
        await proxy.at_rest()
        status, page, headers = await get(proxy, "/ui", **HTML)
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert headers["Cache-Control"] == "no-store"
        assert "2 of 2 instances serve" in page
        seen = Seen(page)
        loaded = [a for tag, a in seen.tags for k in ("src", "href") if (a.get(k) or "").strip()]
        assert all((a.get("href") or "").startswith(("data:", "ui/decisions/")) for a in loaded), (
            "nothing is loaded from elsewhere"
        )
        assert [a["scope"] for tag, a in seen.tags if tag == "th"].count("row") >= 2
        assert not [a for _, a in seen.tags if "style" in a or any(k.startswith("on") for k in a)]
        assert len(page) < 100_000


async def test_the_policy_names_the_page_s_own_blocks(tmp_path: Path) -> None:
    """Those of the page of a decision, too; and it allows nothing else."""
    async with proxied(tmp_path, 1) as (proxy, _):
        await proxy.post(chat("x"), headers={"X-Request-Id": "r1"})
        for path in ("/ui", "/ui/decisions/r1"):
            _, page, headers = await get(proxy, path, **HTML)
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; ")
            assert "unsafe" not in policy
            assert "*" not in policy
            for kind, block in re.findall(r"<(style|script)>(.*?)</\1>", page, re.DOTALL):
                digest = hashlib.sha256(block.encode()).digest()
                assert f"{kind}-src 'sha256-{base64.b64encode(digest).decode()}'" in policy


async def test_forms_by_what_a_client_accepts(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2) as (proxy, _):
        await proxy.post(chat("x"), headers={"X-Request-Id": "r1"})
        for accept in ("text/plain", "*/*"):
            status, told, headers = await get(proxy, "/ui", Accept=accept)
            assert (status, headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
            assert "2 of 2 instances serve" in told
            assert "<" not in told
        status, found = await call(proxy, "GET", "/ui", headers={"Accept": "application/json"})
        assert (status, found["verdict"]["state"], len(found["instances"])) == (200, "ok", 2)
        _, told, _ = await get(proxy, "/ui/decisions/r1", **TEXT)
        assert told.startswith("request r1, ")
        _, found = await call(
            proxy, "GET", "/ui/decisions/r1", headers={"Accept": "application/json"}
        )
        assert [one["policy"] for one in found["instead"]] == list(POLICIES)
        _, page, _ = await get(proxy, "/ui/decisions/r1", **HTML)
        assert all(f">{policy}</th>" in page for policy in POLICIES)
        assert "Raw JSON" in page
        assert (await call(proxy, "GET", "/ui/decisions/none", headers=HTML))[0] == 404
        assert (await call(proxy, "POST", "/ui", headers=HTML))[0] == 405


async def test_without_the_token_nothing_of_the_fleet_is_told(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1, admin_token=TOKEN) as (proxy, fleet):
        name = proxy.settings.instances[0].name
        wrong = base64.b64encode(b"any:other").decode()
        for path in ("/ui", "/ui/events", "/ui/decisions/r"):
            for given in (
                dict[str, str](),
                {"Authorization": f"Basic {wrong}"},
                {"Authorization": "Basic ?"},
            ):
                status, told, headers = await get(proxy, path, **HTML, **given)
                assert (status, headers["WWW-Authenticate"][:6]) == (401, "Basic ")
                assert name not in told
                assert "instance" not in told
                assert str(fleet.engines[0].url) not in told
        password = base64.b64encode(f"any:{TOKEN}".encode()).decode()
        for right in (f"Bearer {TOKEN}", f"Basic {password}", f"basic {password}"):
            assert (await get(proxy, "/ui", **HTML, Authorization=right))[0] == 200
        for path in ("/instances", "/decisions", "/busy_threshold"):
            status, _, headers = await get(proxy, path, Authorization=f"Basic {password}")
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer"), "a browser sends it"


async def test_the_page_is_on_the_admin_listener_alone(tmp_path: Path) -> None:
    async with RawEngine() as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], admin_port=0) as proxy:
            assert (await get(proxy, "/ui", **HTML))[0] == 404
            async with proxy.http.get(f"{proxy.server.admin_url}/ui", headers=HTML) as response:
                assert response.status == 200


async def test_names_models_and_ids_are_escaped(tmp_path: Path) -> None:
    """Of clients and of engines: what an instance answers is its last error."""
    async with RawEngine(models=[EVIL]) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], max_queue=0) as proxy:
            await proxy.up()
            body = chat("x") | {"model": EVIL}
            headers = {"X-Request-Id": "<script>alert(1)</script>&quot;"}
            await proxy.post(body, headers=headers)
            known = proxy.router.known.fleet.members()[0]
            known.health.probe_failed(EVIL, 0.0)
            proxy.server.state.instances.warn(known.instance.name, "x", EVIL)

            async def told() -> str:
                _, page, _ = await get(proxy, "/ui", **HTML)
                return page if "&lt;script&gt;alert" in page else ""

            page = await until(told, "the error is shown")
            for path in ("/ui", "/ui/decisions/%3Cscript%3Ealert(1)%3C%2Fscript%3E&quot;"):
                status, page, _ = await get(proxy, path, **HTML)
                assert status == 200
                scripts = [tag for tag, _ in Seen(page).tags if tag == "script"]
                assert len(scripts) == (path == "/ui")
                assert EVIL not in page


async def test_an_ejected_instance_appears_and_its_change_is_an_event(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2) as (proxy, fleet), viewer(proxy) as (response, event):
        assert response.headers["Content-Type"] == "text/event-stream"
        assert (await event())["verdict"].endswith("2 of 2 instances serve</strong>")
        await fleet.engines[0].kill()
        name = proxy.settings.instances[0].name

        async def is_told() -> bool:
            found = await event()
            assert found, "the time of day changes at least"
            return f"1 of 2 instances serve; {name} is ejected since" in found.get("verdict", "")

        await until(is_told, "ejected")
        _, told, _ = await get(proxy, "/ui", **TEXT)
        assert re.search(rf"{re.escape(name)} +ejected +\d\d:\d\d:\d\d .* connect", told)
        _, page, _ = await get(proxy, "/ui", **HTML)
        assert '<span class="word bad">ejected</span>' in page


async def test_a_suspect_instance_is_no_healthy_fleet(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2) as (proxy, _):
        health = next(iter(proxy.router.known.fleet.members())).health
        health.probe_failed("it is away", 0.0, is_refused=True)
        _, found, _ = await get(proxy, "/ui", Accept="application/json")
        seen = orjson.loads(found)
        assert sorted(row["state"] for row in seen["instances"]) == ["healthy", "suspect"]
        assert seen["verdict"]["state"] == "warn"


async def test_why_answers_are_hollow_is_said_once(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2) as (proxy, _):
        member = next(iter(proxy.router.known.fleet.members()))
        instances, now_s = proxy.server.state.instances, proxy.server.state.instances.clock.now_s()
        why = "a hollow answer: finish reason abort"
        member.health.hollowed("c", why, now_s, is_refusal=False, server="b")
        instances.note_hollow(member.instance.name)
        seen = orjson.loads((await get(proxy, "/ui", Accept="application/json"))[1])
        assert seen["instances"][0]["why"] == f"{why}, and b has served the request"


async def test_only_what_has_changed_is_sent(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _), viewer(proxy) as (_, event):
        whole, next_one = await event(), await event()
        assert {"verdict", "fleet", "moves", "decisions", "queue"} <= whole.keys()
        assert next_one.keys() <= {"asof", "numbers", "load", "fleet"}
        assert "asof" in next_one


async def test_viewers_are_few_see_one_snapshot_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live_page, "EVERY_S", 0.05)
    async with proxied(tmp_path, 1) as (proxy, _):
        page, made = page_of(proxy), 0
        look = page._look

        def counted() -> Any:
            nonlocal made
            made += 1
            return look()

        monkeypatch.setattr(page, "_look", counted)
        tasks = len(asyncio.all_tasks())
        async with contextlib.AsyncExitStack() as stack:
            viewers = [await stack.enter_async_context(viewer(proxy)) for _ in range(MOST_VIEWERS)]
            status, told, headers = await get(proxy, "/ui/events")
            assert (status, headers["Retry-After"]) == (503, "5")
            assert f"{MOST_VIEWERS} viewers" in told
            made = 0
            for _ in range(10):
                for _, event in viewers:
                    await event()
            assert made <= 20, "one for all of them"
        await until(lambda: page.viewers == 0, "all have left")
        assert not [one for one in caplog.records if "handler" in one.getMessage()]
        await until(lambda: len(asyncio.all_tasks()) <= tasks, "no task is left")
        made = 0
        await proxy.post(chat("x"))
        assert made == 0, "nothing is computed while nobody looks"
        async with viewer(proxy) as (_, event):
            assert await event()


async def test_a_viewer_that_takes_nothing_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live_page, "EVERY_S", 0.005)
    monkeypatch.setattr(live_page, "STALL_S", 0.2)
    async with proxied(tmp_path, 1) as (proxy, _):
        page = page_of(proxy)
        monkeypatch.setattr(page, "_sections", lambda: {"x": object().__repr__() * 20_000})
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.setblocking(False)
            host, port = proxy.server.url.removeprefix("http://").split(":")
            loop = asyncio.get_running_loop()
            await loop.sock_connect(reader, (host, int(port)))
            await loop.sock_sendall(reader, b"GET /ui/events HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: page.viewers == 1, "it looks")
            await until(lambda: page.viewers == 0, "it is cut")
    assert not [one for one in caplog.records if "handler" in one.getMessage()]


async def test_events_come_over_tls(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    cert, key = certificates.leaf("proxy", "127.0.0.1")
    secure = {"tls_cert": str(cert), "tls_key": str(key)}
    async with RawEngine() as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], **secure) as proxy:
            context = certificates.client()
            async with proxy.http.get("/ui/events", ssl=context) as response:
                for _ in range(2):
                    assert (await response.content.readline()).startswith(b"data: {")
                    await response.content.readline()
            await until(lambda: page_of(proxy).viewers == 0, "the viewer has left")


async def test_a_drain_ends_the_events(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1, drain_seconds=1.0) as (proxy, _):
        async with viewer(proxy) as (response, event):
            await event()
            proxy.server.state.in_flight.is_leaving = True
            assert await response.content.read() is not None
        status, _, _ = await get(proxy, "/ui/events")
        assert status == 503
        proxy.server.state.in_flight.is_leaving = False


async def test_who_waits_is_shown_with_what_was_promised(tmp_path: Path) -> None:
    limits = {"active_prefill_tokens_threshold": 1, "max_queue": 5, "max_queue_seconds": 30}
    async with RawEngine(stalls()) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], **limits) as proxy:
            await proxy.up()
            tasks = [asyncio.create_task(proxy.post(chat(words(40)))) for _ in range(3)]
            await until(lambda: len(proxy.server.state.waiting.queue) == 2, "two wait")

            async def told() -> Any:
                _, found = await call(proxy, "GET", "/ui", headers={"Accept": "application/json"})
                return found if found["queue"]["count"] == 2 else None

            found = await until(told, "shown")
            assert "2 requests wait, longest " in found["verdict"]["load"]
            assert all(row["promised_s"] > 0 for row in found["queue"]["waiting"])
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: len(proxy.server.state.waiting.last) == 2, "their waits are over")
            assert {wait.end for wait in proxy.server.state.waiting.last} == {"gone"}
