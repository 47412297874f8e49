"""Streams that go on when their instance is lost: cut at any byte, once or twice, or drained."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson
import pytest

from replayer.simulator.host import SimFleet
from tests.support.harness import ServedProxy, chat, proxied, until

CUTS = int(os.environ.get("MIGRATION_CUTS", "240"))
"""Cuts at random bytes, over all forms of requests; `make migration` has 1,000."""
TOKENS = 24
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}


class Told(NamedTuple):
    """What a client got of a stream."""

    text: str
    ids: set[str]
    roles: int
    reasons: list[str]
    usage: list[Any]
    error: str | None
    is_done: bool
    has_token_ids: bool


def told(body: bytes) -> Told:
    """The parts of a stream that was read to its end."""
    events = [e[6:] for e in body.split(b"\n\n") if e.startswith(b"data: ")]
    objects = [orjson.loads(e) for e in events if e != b"[DONE]"]
    errors = [o["error"]["code"] for o in objects if "error" in o]
    chunks = [o for o in objects if "error" not in o]
    choices = [c for o in chunks for c in o["choices"]]
    deltas = [c["delta"] if "delta" in c else {"content": c["text"]} for c in choices]
    return Told(
        text="".join(d.get("content") or "" for d in deltas),
        ids={o["id"] for o in chunks},
        roles=sum("role" in d for d in deltas),
        reasons=[c["finish_reason"] for c in choices if c["finish_reason"]],
        usage=[o["usage"] for o in chunks if o.get("usage")],
        error=errors[0] if errors else None,
        is_done=body.endswith(b"data: [DONE]\n\n"),
        has_token_ids=b'token_ids":[' in body,
    )


def asked(kind: str, session: str = "s", **more: Any) -> dict[str, Any]:
    """The body of a request, a chat or a text."""
    body = chat("tell me of it", max_tokens=TOKENS, session_id=session, **more)
    if kind == "text":
        del body["messages"]
        body["prompt"] = "tell me of it"
    return body


async def stream(proxy: ServedProxy, body: dict[str, Any]) -> tuple[Told, bytes]:
    """What a client gets, also of a stream without a clean end."""
    path = PATHS["chat" if "messages" in body else "text"]
    got = bytearray()
    async with proxy.http.post(path, json=body) as response:
        assert response.status == 200
        with suppress(aiohttp.ClientPayloadError):
            while piece := await response.content.readany():
                got += piece
    return told(bytes(got)), bytes(got)


def cut(proxy: ServedProxy, fleet: SimFleet, at: int, losses: int) -> None:
    """Have the session's next streams end after so many bytes on the wire.

    That says nothing of an engine, in the long run: no breaker opens.
    """
    now_s = proxy.server.state.clock.now_s()
    for member in proxy.router.fleet.members():
        member.health.renew(now_s)
    home = proxy.router.sessions.home("s", now_s)
    left = losses
    for engine in sorted(fleet.engines, key=lambda e: not e.url.endswith(home)):
        engine.faults.change(cut_bytes=at, cuts=int(left > 0))
        left -= 1


async def at_rest(proxy: ServedProxy, fleet: SimFleet) -> None:
    await proxy.at_rest()
    await until(lambda: proxy.connections() == 0, "no upstream connection in use")
    assert proxy.server.state.in_flight.trails.taken_bytes == 0
    assert not proxy.server.state.in_flight.movable
    for engine in fleet.engines:
        await until(lambda e=engine: not e.driver.engine.running, "nothing runs")


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("losses", [1, 2])
async def test_cut_anywhere_the_client_has_one_whole_stream(
    tmp_path: Path, kind: str, losses: int
) -> None:
    choose = random.Random(losses)
    async with proxied(tmp_path, losses + 1, migration_limit=3, health_interval=60) as (proxy, fleet):
        body = asked(kind)
        whole, raw = await stream(proxy, body)
        assert (whole.reasons, whole.is_done) == (["length"], True)
        assert not whole.has_token_ids
        ended = 0
        for _ in range(CUTS // 4):
            cut(proxy, fleet, choose.randrange(2 * len(raw)), losses)
            got, sent = await stream(proxy, body)
            assert got.text == whole.text, sent
            assert len(got.ids) == 1
            assert got.roles == whole.roles
            assert not got.has_token_ids
            if got.error is None:
                assert (got.reasons, got.is_done) == (whole.reasons, True)
                (usage,), (once,) = got.usage, whole.usage
                for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                    assert usage[name] == once[name]
            else:  # what was lost comes after the finish reason
                assert (got.error, got.reasons, got.is_done) == ("engine_lost", ["length"], False)
                ended += 1
        records = await proxy.records(CUTS // 4 + 1)
        moved = [row["ended"] for record in records for row in record["migrations"] or ()]
        from collections import Counter

        print(kind, losses, Counter(moved), ended)
        await at_rest(proxy, fleet)
