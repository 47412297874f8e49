"""Requests to simulated engines over HTTP: both legs of an offload, answers, streams."""

from typing import Any

import aiohttp
import orjson

from replayer.simulator.host import SimEngine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "one two three " * 30}]


async def post(http: aiohttp.ClientSession, engine: SimEngine, path: str, **body: Any):
    async with http.post(engine.url + path, data=orjson.dumps(body)) as answer:
        return answer.status, orjson.loads(await answer.read())


async def events_of(http: aiohttp.ClientSession, engine: SimEngine, path: str, **body: Any):
    body["stream"] = True
    async with http.post(engine.url + path, data=orjson.dumps(body)) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        raw = await answer.read()
    *events, done, rest = raw.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events]


def is_idle(engine: SimEngine) -> bool:
    stats = engine.stats()
    return not (stats["running"] or stats["waiting"] or stats["fetching"] or stats["kv_usage"])


def prefill_leg(transfer_id: str = "x1") -> dict[str, Any]:
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    return {"messages": MESSAGES, "max_tokens": 1, "kv_transfer_params": params}


def decode_leg(sender: SimEngine, transfer_id: str = "x1", **more: Any) -> dict[str, Any]:
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": sender.bootstrap_url,
        "remote_engine_id": sender.engine_id,
        "transfer_id": transfer_id,
    }
    return {"messages": MESSAGES, "max_tokens": 5, "kv_transfer_params": params | more}
