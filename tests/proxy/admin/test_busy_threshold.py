"""/busy_threshold: every row of its contract."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.admin import call
from tests.support.harness import chat, proxied, until, words

DECODE = "active_decode_blocks_threshold"


TOKENS = "active_prefill_tokens_threshold"


FRAC = "active_prefill_tokens_threshold_frac"


def row(model: str, decode: Any = None, tokens: Any = None, frac: Any = None) -> dict[str, Any]:
    return {"model": model, DECODE: decode, TOKENS: tokens, FRAC: frac}


class TestBusyThreshold:
    """Every row of the contract."""

    async def test_reading_and_partial_updates(self, tmp_path: Path) -> None:
        async with proxied(tmp_path, 1) as (proxy, _):
            path = "/busy_threshold"
            assert await call(proxy, "GET", path) == (200, {"thresholds": [row("*")]})
            unknown = {"model": "who"}
            assert await call(proxy, "POST", path, unknown) == (200, row("who"))
            nulls = {"model": "sim-8b", DECODE: None}
            assert await call(proxy, "POST", path, nulls) == (200, row("sim-8b"))
            first = {"model": "sim-8b", DECODE: 0.85}
            assert await call(proxy, "POST", path, first) == (200, row("sim-8b", 0.85))
            second = {"model": "sim-8b", TOKENS: 10_000}
            assert await call(proxy, "POST", path, second) == (200, row("sim-8b", 0.85, 10_000))
            third = {"model": "sim-8b", FRAC: 1.5, "unset": [DECODE]}
            assert await call(proxy, "POST", path, third) == (200, row("sim-8b", None, 10_000, 1.5))
            _, listed = await call(proxy, "GET", path)
            assert listed == {"thresholds": [row("*"), row("sim-8b", None, 10_000, 1.5)]}
            one = f"{path}?model=sim-8b&field={FRAC}"
            assert await call(proxy, "DELETE", one) == (200, row("sim-8b", None, 10_000))
            assert await call(proxy, "DELETE", f"{path}?model=sim-8b") == (200, row("sim-8b"))
            for bad in ("?field=x", "?model=*&field=x", ""):
                assert (await call(proxy, "DELETE", path + bad))[0] == 400
            body = {"model": "sim-8b"}
            assert (await call(proxy, "DELETE", path, body))[0] == 400, "a body names nothing"

    @pytest.mark.long
    async def test_any_number_is_in_force_or_refused(self, tmp_path: Path) -> None:
        """Under none of them does a request, a look at the instances or at metrics fail."""
        extremes = (0, -1, 5e-324, 1e-300, 0.5, 1, 1e9, 1e308, 2**53, 2**64 - 1, 2**64, 10**300)
        async with proxied(tmp_path, 1, max_queue=0) as (proxy, _):
            for field in (DECODE, TOKENS, FRAC):
                for value in extremes:
                    body = {"model": "sim-8b", field: value, "unset": [DECODE, TOKENS, FRAC]}
                    raw = json.dumps(body).encode()
                    status, said = await call(proxy, "POST", "/busy_threshold", raw)
                    assert (status, said) == (200, said) or field in said["error"], (field, value)
                    answer = await proxy.post(chat("x", max_tokens=1, stream=False))
                    assert answer.status in (200, 503), (field, value)
                    for path in ("/instances", "/metrics"):
                        async with proxy.http.get(path) as response:
                            assert response.status == 200, (field, value, path)

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("body", "status", "words_"),
        [
            ({"model": "who", TOKENS: 1}, 404, "Model 'who' not found."),
            ({"model": "sim-8b", DECODE: 1.01}, 400, f"{DECODE} must be between 0 and 1"),
            ({"model": "sim-8b", DECODE: -0.1}, 400, "got -0.1"),
            ({"model": "sim-8b", FRAC: -1}, 400, f"{FRAC} must be finite and >= 0"),
            ({"model": "sim-8b", TOKENS: -1}, 422, TOKENS),
            ({"model": "sim-8b", TOKENS: 1.5}, 422, TOKENS),
            ({"model": "sim-8b", TOKENS: "9"}, 422, TOKENS),
            ({"model": "sim-8b", DECODE: True}, 422, DECODE),
            ({"model": "sim-8b", "unset": ["x"]}, 422, "unset"),
            ({"model": "*", "active_prefill_token_threshold": 5}, 422, "unknown field active_pre"),
            ({TOKENS: 1}, 422, "model"),
            ({"model": 7, TOKENS: 1}, 422, "model"),
            ([], 422, "object"),
            (b"{", 400, "JSON"),
            (b" " * 70_000, 413, "over"),
        ],
    )
    async def test_refusals_change_nothing(
        self, tmp_path: Path, body: Any, status: int, words_: str
    ) -> None:
        async with proxied(tmp_path, 1) as (proxy, _):
            got, answer = await call(proxy, "POST", "/busy_threshold", body)
            assert got == status
            assert words_ in answer["error"]
            assert await call(proxy, "GET", "/busy_threshold") == (
                200,
                {"thresholds": [row("*")]},
            )

    async def test_the_content_type_is_checked(self, tmp_path: Path) -> None:
        async with proxied(tmp_path, 1) as (proxy, _):
            headers = {"Content-Type": "text/plain"}
            status, _ = await call(
                proxy, "POST", "/busy_threshold", {"model": "*"}, headers=headers
            )
            assert status == 415

    async def test_in_force_at_once_and_dry_run_first(self, tmp_path: Path) -> None:
        async with proxied(tmp_path, 1, sim={"speed": 3.0}, max_queue=0) as (proxy, _):
            limit = {"model": "*", TOKENS: 100}
            async with proxy.http.post(
                "/v1/chat/completions", json=chat("x", max_tokens=2000)
            ) as r:
                await r.content.readany()
                async with asyncio.TaskGroup() as beside:
                    waiting = beside.create_task(proxy.post(chat(words(40_000))))
                    load = proxy.router.known.ledger.load
                    name = proxy.settings.instances[0].name
                    await until(lambda: load(name).prefill_tokens > 100, "a backlog")
                    _, dry = await call(proxy, "POST", "/busy_threshold", limit | {"dry_run": True})
                    assert dry["busy"] == [name]
                    assert (await call(proxy, "GET", "/busy_threshold"))[1] == {
                        "thresholds": [row("*")]
                    }
                    assert (await call(proxy, "POST", "/busy_threshold", limit))[0] == 200
                    busy = await proxy.post(chat("y"))
                    assert busy.status == 503
                    assert int(busy.headers["Retry-After"]) >= 1
                    assert busy.json["message"].startswith("Service temporarily unavailable: All w")
                    assert (busy.json["type"], busy.json["code"]) == ("service_unavailable", 503)
                    assert busy.json["error"]["code"] == 503
                    assert (await call(proxy, "DELETE", "/busy_threshold?model=*"))[0] == 200
                    assert (await proxy.post(chat("y", max_tokens=1))).status == 200
                    waiting.cancel()
            await proxy.at_rest()
