"""A client cannot steer an engine's KV connector, however it dresses the field up."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.real_vllm.rig import CHAT, COMPLETIONS, SLOW, Pair, ask, words
from tests.real_vllm.tap import Tap
from tests.support.harness import Answer, ServedProxy

FIELD = "kv_transfer_params"
JSON = "application/json"
REFUSED = "UTF-16"
FETCH = b'{"do_remote_prefill":true,"do_remote_decode":false}'
"""By itself this hangs a Mooncake engine's request for ever, and ends a NIXL engine."""
KEEP = b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"mine"}'
"""This pins the request's blocks until the abort timeout."""


def chat(*members: bytes, first: bytes = b"") -> bytes:
    """A request with more members behind it, byte for byte, or before it."""
    body = orjson.dumps(ask(CHAT, words(300, FIELD), stream=False))
    return b"{" + first + b",".join([body[1:-1], *members]) + b"}"


DISGUISES: dict[str, tuple[str, bytes, str]] = {
    "as it is": (CHAT, chat(b'"kv_transfer_params":' + FETCH), JSON),
    "to be kept for somebody": (CHAT, chat(b'"kv_transfer_params":' + KEEP), JSON),
    "twice": (
        CHAT,
        chat(b'"kv_transfer_params":' + FETCH, b'"kv_transfer_params":' + FETCH),
        JSON,
    ),
    "null, then meant": (
        CHAT,
        chat(b'"kv_transfer_params":' + KEEP, first=b'"kv_transfer_params":null,'),
        JSON,
    ),
    "escaped": (CHAT, chat(b'"\\u006bv_transfer_params":' + FETCH), JSON),
    "escaped elsewhere": (CHAT, chat(b'"kv\\u005ftransfer\\u005Fparams":' + FETCH), JSON),
    "between white space": (CHAT, chat(b'\r\n\t "kv_transfer_params" \n:\t' + FETCH + b" "), JSON),
    "before a long prompt": (CHAT, chat(first=b'"kv_transfer_params":' + FETCH + b","), JSON),
    "among the plug-ins' arguments": (
        CHAT,
        chat(b'"vllm_xargs":{"a":1,"kv_transfer_params":"x"}'),
        JSON,
    ),
    "under another content type": (
        CHAT,
        chat(b'"kv_transfer_params":' + FETCH),
        "application/json; charset=utf-16",
    ),
    "in UTF-16, which engines read": (
        CHAT,
        chat(b'"kv_transfer_params":' + FETCH).decode().encode("utf-16"),
        JSON,
    ),
    "no object": (CHAT, chat(b'"kv_transfer_params":["do_remote_prefill"]'), JSON),
    "in a completion": (
        COMPLETIONS,
        b'{"model":"tiny","prompt":"x","max_tokens":2,"kv_transfer_params":%s}' % FETCH,
        JSON,
    ),
    "in a response": (
        "/v1/responses",
        b'{"model":"tiny","input":"x","max_output_tokens":2,"kv_transfer_params":%s}' % FETCH,
        JSON,
    ),
    "in a message": (
        "/v1/messages",
        b'{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"x"}],'
        b'"kv_transfer_params":%s}' % FETCH,
        JSON,
    ),
}


@pytest.mark.parametrize("name", DISGUISES)
async def test_it_reaches_no_engine(tmp_path: Path, mooncake: Pair, name: str) -> None:
    path, raw, content_type = DISGUISES[name]
    async with AsyncExitStack() as stack:
        taps = [await stack.enter_async_context(Tap(e.port)) for e in mooncake.engines]
        urls = [t.url for t in taps]
        proxy = await stack.enter_async_context(ServedProxy(tmp_path / "log", urls, **SLOW))
        await proxy.up()
        answer = await _post(proxy, path, raw, content_type)
        asked = [body for tap in taps for body in tap.bodies]
        await proxy.at_rest()
    if REFUSED in name:
        assert (answer.status, asked) == (400, []), answer.body
    else:
        assert answer.status == 200, answer.body
        assert len(asked) == 1
        assert FIELD not in asked[0]
        assert FIELD not in (asked[0].get("vllm_xargs") or {})
    assert all(engine.is_alive for engine in mooncake.engines)
    for engine in mooncake.engines:
        assert await mooncake.value(engine, "num_requests_waiting") == 0
        assert await mooncake.value(engine, "kv_cache_usage_perc") == 0


async def _post(proxy: ServedProxy, path: str, raw: bytes, content_type: str) -> Answer:
    headers: dict[str, Any] = {"Content-Type": content_type}
    return await proxy.post(raw, path, headers=headers)
