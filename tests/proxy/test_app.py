"""Paths, methods, and in whose name the answers are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.proxy.admin.test_auth import ask
from tests.support.harness import RawEngine, ServedProxy, chat, plain, proxied, says

TOKEN = "operator-0123456789"
GOOD = {"Authorization": f"Bearer {TOKEN}"}


async def test_another_method_of_a_known_path(tmp_path: Path) -> None:
    """Says which there are, to operators only where the path is theirs."""
    async with proxied(tmp_path, 1, admin_token=TOKEN) as (proxy, _):

        async def tried(method: str, path: str, **headers: str) -> tuple[int, str | None]:
            async with proxy.http.request(method, path, headers=headers) as response:
                if response.status in (404, 405) and method != "HEAD":
                    error = (await response.json())["error"]
                    assert error["code"] == response.status
                    assert error["type"] == "invalid_request_error"
                return response.status, response.headers.get("Allow")

        for path in ("/", "/live", "/ready", "/health", "/metrics", "/v1/models"):
            assert await tried("POST", path) == (405, "GET, HEAD")
            assert await tried("HEAD", path) == (200, None)
        for method, path, allowed in (
            ("PUT", "/instances", "GET, POST"),
            ("PUT", "/instances/x", "GET, DELETE"),
            ("DELETE", "/sessions/x/end", "POST"),
            ("POST", "/decisions", "GET"),
            ("PATCH", "/busy_threshold", "GET, POST, DELETE"),
        ):
            assert await tried(method, path, **GOOD) == (405, allowed)
            assert await tried(method, path) == (401, None)
        for path in ("/instances/x/y", "/sleep", "/lives"):
            assert await tried("POST", path) == (404, None)
        for path in ("/tokenize", "/v1/embeddings", "/v1/chat/completions"):
            assert await tried("GET", path) == (405, "POST")
        assert await tried("PUT", "/v1/responses/r") == (405, "GET, POST, DELETE")


async def test_operators_paths_are_unknown_beside_them(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1, admin_port=0) as (proxy, _):
        async with proxy.http.put("/instances") as response:
            assert (response.status, "Allow" in response.headers) == (404, False)


@pytest.mark.parametrize("path", ["/instances", "/busy_threshold"])
@pytest.mark.parametrize(
    ("body", "kind", "status", "said"),
    [
        (b"{}", "text/plain", 415, "Content-Type must be application/json"),
        (b"{", "application/json", 400, "body is not valid JSON: "),
        (b"[]", "application/json; charset=utf-8", 422, "body must be an object"),
        (b" " * 70_000, "application/json", 413, "body over 65536 bytes"),
    ],
)
async def test_one_rule_for_what_is_posted(
    tmp_path: Path, path: str, body: bytes, kind: str, status: int, said: str
) -> None:
    async with ServedProxy(tmp_path / "log", ["127.0.0.1:1"], health_interval=60) as proxy:
        async with proxy.http.post(path, data=body, headers={"Content-Type": kind}) as response:
            error: Any = orjson.loads(await response.read())["error"]
            assert response.status == status
            message = error if path == "/busy_threshold" else error["message"]
            assert message.startswith(said)


async def test_every_answer_has_a_request_id(tmp_path: Path) -> None:
    """The client's where it sent one of sane form, on every path and for every refusal."""
    async with proxied(tmp_path, 1, admin_token=TOKEN, max_body_bytes=1024) as (proxy, _):
        for method, path, status in (
            ("GET", "/live", 200),
            ("GET", "/metrics", 200),
            ("GET", "/v1/models", 200),
            ("GET", "/instances", 401),
            ("GET", "/nowhere", 404),
            ("POST", "/live", 405),
            ("GET", "/v1/completions", 405),
            ("POST", "/v1/completions", 413),
            ("POST", "/tokenize", 413),
        ):
            data = b"x" * 2000 if status == 413 else None
            for given in ("mine-1", "not\u00a0mine", None):
                headers = {} if given is None else {"X-Request-Id": given}
                async with proxy.http.request(method, path, data=data, headers=headers) as response:
                    assert response.status == status
                    (shown,) = response.headers.getall("X-Request-Id")
                    assert (shown == given) is (given == "mine-1")
                    assert shown.isascii()


async def test_an_answer_names_who_made_it(tmp_path: Path) -> None:
    """Relayed: the engine. Else: the proxy, and not what it is made with."""
    relayed = plain(b'{"ok":1}', extra="Server: engine/7\r\n")
    failed = plain(b"{}", "500 Internal Server Error", "Server: engine/7\r\n")
    async with RawEngine(says(relayed), says(failed)) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], health_interval=60) as proxy:
            assert (await proxy.post(chat("x", stream=False))).headers["Server"] == "engine/7"
            answers = [await proxy.post(body) for body in (chat("x"), b"{", b"[" * 9)]
            assert [answer.status for answer in answers][:2] == [500, 400]
            assert {answer.headers["Server"] for answer in answers} == {"cache-proxy"}
            for path in ("/live", "/metrics", "/decisions", "/v1/models", "/nowhere"):
                async with proxy.http.get(path) as response:
                    assert response.headers.getall("Server") == ["cache-proxy"]
            raw = await ask(int(proxy.server.url.rpartition(":")[2]), b"no HTTP\r\n\r\n")
            assert b"\r\nServer: cache-proxy\r\n" in raw
            assert b"aiohttp" not in raw
