"""Pages of other origins: what a browser asks, and what it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.net.server import cors
from tests.support.harness import RawEngine, ServedProxy, chat, plain, proxied, says

APP = "https://app.example.com"
ASKS = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


@pytest.mark.parametrize(
    ("origin", "allowed", "shown"),
    [
        (None, ("*",), None),
        (APP, (), None),
        (APP, ("https://other.example.com",), None),
        (APP, (APP,), APP),
        (APP.upper(), (APP,), APP.upper()),
        (f"{APP}.evil.com", (APP,), None),
        ("null", (APP,), None),
        ("null", ("*",), "*"),
        (APP, (APP, "*"), "*"),
    ],
)
def test_who_is_let_in(origin: str | None, allowed: tuple[str, ...], shown: str | None) -> None:
    told = dict(cors.fields(origin, allowed))
    assert told.get("Access-Control-Allow-Origin") == shown
    assert told.get("Vary") == ("Origin" if allowed and "*" not in allowed else None)
    assert "Access-Control-Allow-Credentials" not in told
    assert cors.lines(origin, allowed).count(b"\r\n") == len(told)


async def test_a_page_of_an_allowed_origin_uses_the_api(tmp_path: Path) -> None:
    """Preflight, streams, whole answers, errors and the models; never the operators' paths."""
    key = {"Authorization": "Bearer sk-acme-0123456789abcdef"}
    options: dict[str, Any] = {
        "api_key": "acme:sk-acme-0123456789abcdef",
        "cors_allowed_origins": APP,
    }
    async with proxied(tmp_path, 1, **options) as (proxy, _):
        for origin, status in ((APP, 204), ("https://evil.example.com", 405)):
            for path in ("/v1/chat/completions", "/v1/models", "/tokenize"):
                asked = ASKS | {"Origin": origin}
                async with proxy.http.options(path, headers=asked) as answer:
                    told = answer.headers
                    assert answer.status == status
                    shown = told.get("Access-Control-Allow-Origin")
                    assert shown == (APP if status == 204 else None)
                    if status == 204:
                        names = told["Access-Control-Allow-Headers"]
                        assert names == ASKS["Access-Control-Request-Headers"]
                        assert told["Access-Control-Max-Age"] == str(cors.MAX_AGE_S)
                        methods = told["Access-Control-Allow-Methods"].split(", ")
                        assert ("GET" if path == "/v1/models" else "POST") in methods
                    else:
                        assert "not among --cors-allowed-origins" in await answer.text()
        page = {"Origin": APP}
        for body, given, status in (
            (chat("hello"), key, 200),
            (chat("hello", stream=False), key, 200),
            (chat("hello"), {}, 401),
            (b"{", key, 400),
        ):
            got = await proxy.post(body, headers=page | given)
            assert got.status == status
            assert got.headers.getall("Access-Control-Allow-Origin") == [APP]
            assert "X-Request-Id" in got.headers["Access-Control-Expose-Headers"]
        for path, is_shown in (("/v1/models", True), ("/v1/nothing", True), ("/instances", False)):
            async with proxy.http.get(path, headers=page | key) as answer:
                assert ("Access-Control-Allow-Origin" in answer.headers) == is_shown, path


async def test_off_by_default_and_engines_have_no_say(tmp_path: Path) -> None:
    """An engine's own header would be there twice, which browsers refuse."""
    extra = "Access-Control-Allow-Origin: *\r\nAccess-Control-Allow-Credentials: true\r\n"
    async with RawEngine(says(plain(b'{"ok":1}', extra=extra))) as engine:
        for allowed, shown in (("", []), ("*", ["*"])):
            own = {"cors_allowed_origins": allowed, "health_interval": 60}
            async with ServedProxy(tmp_path / "log", [engine.address], **own) as proxy:
                got = await proxy.post(chat("x", stream=False), headers={"Origin": APP})
                assert got.headers.getall("Access-Control-Allow-Origin", []) == shown
                assert "Access-Control-Allow-Credentials" not in got.headers
                path, asked = "/v1/chat/completions", ASKS | {"Origin": APP}
                async with proxy.http.options(path, headers=asked) as answer:
                    assert answer.status == (204 if allowed else 405)
                    said = await answer.text()
                    assert ("are refused (--cors-allowed-origins)" in said) == (not allowed)
