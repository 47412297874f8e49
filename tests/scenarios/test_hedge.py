"""A late P through real sockets: D answers, or P does after all; whoever leaves, nothing stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.proxy.request.test_kv_release import REFUSED, answers_when_left
from tests.support.harness import (
    ANSWER,
    RawEngine,
    Script,
    ServedProxy,
    chat,
    plain,
    resets,
    says,
    stalls,
    until,
    words,
)

LENGTH = plain(b'{"choices":[{"index":0,"finish_reason":"length"}],"usage":{"prompt_tokens":9}}')
BODY = chat(words(2000))
SESSION = {"X-Session-ID": "s"}


def late(answer: bytes, after_s: float = 1.2) -> Script:
    """Later than twice the predicted quarter of a second."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gone = asyncio.create_task(reader.read())
        await asyncio.wait({gone}, timeout=after_s)
        if gone.done():
            raise ConnectionError
        gone.cancel()
        writer.write(answer)

    return script


@asynccontextmanager
async def pair(
    tmp_path: Path, p: RawEngine, d: RawEngine, **more: Any
) -> AsyncIterator[ServedProxy]:
    options: dict[str, Any] = {"warm_threshold": 100, "heavy_threshold": 500}
    options |= {"offload_policy": "always", "health_interval": 60}
    async with p, d:
        instances = [f"d={d.address}", f"p={p.address};bootstrap={p.port}"]
        async with ServedProxy(tmp_path / "log", instances, **(options | more)) as proxy:
            yield proxy
            await proxy.at_rest()
            assert proxy.router.hedges.live == 0
            assert proxy.router.known.reuse.is_at_rest
            await until(lambda: proxy.connections() == 0, "no upstream connection in use")


async def test_d_wins_and_p_is_aborted(tmp_path: Path) -> None:
    p, d = RawEngine(stalls()), RawEngine(says(ANSWER))
    async with pair(tmp_path, p, d) as proxy:
        assert (await proxy.post(BODY, headers=SESSION)).text == "fine"
        (record,) = await proxy.records(1)
        assert (record["hedge"], record["fallback"]) == ("local", "p_late")
        assert (record["route_class"], record["prefill_instance"]) == ("HEAVY_COLO", "p")
        assert proxy.metric("hedges_total", winner="local") == 1
        assert len(d.posts) == 1
        assert b"kv_transfer_params" not in d.posts[0]


async def test_d_wins_as_p_ends(tmp_path: Path) -> None:
    """P had finished when it hears that it is no longer wanted: its KV is let go."""
    p, d = RawEngine(answers_when_left), RawEngine(says(ANSWER), REFUSED)
    async with pair(tmp_path, p, d) as proxy:
        assert (await proxy.post(BODY, headers=SESSION)).text == "fine"
        (record,) = await proxy.records(1)
        assert (record["hedge"], record["fallback"]) == ("local", "p_late")
        await until(lambda: proxy.metric("kv_releases_total", result="released") == 1)
        sent = orjson.loads(p.posts[0])["kv_transfer_params"]
        _, release = map(orjson.loads, d.posts)
        assert release["kv_transfer_params"]["transfer_id"] == sent["transfer_id"]


async def test_p_wins_after_all(tmp_path: Path) -> None:
    p, d = RawEngine(late(LENGTH)), RawEngine(stalls(), says(ANSWER))
    async with pair(tmp_path, p, d) as proxy:
        assert (await proxy.post(BODY, headers=SESSION)).text == "fine"
        (record,) = await proxy.records(1)
        assert (record["hedge"], record["fallback"]) == ("peer", None)
        assert record["route_class"] == "HEAVY_P2P"
        assert proxy.metric("hedges_total", winner="peer") == 1
        assert [b"kv_transfer_params" in post for post in d.posts] == [False, True]


async def test_p_fails_while_d_computes(tmp_path: Path) -> None:
    """D goes on with what it has; it is not asked a second time."""
    p, d = RawEngine(late(plain(b"{}", "500 Oops"))), RawEngine(late(ANSWER, 1.8))
    async with pair(tmp_path, p, d) as proxy:
        assert (await proxy.post(BODY, headers=SESSION)).text == "fine"
        (record,) = await proxy.records(1)
        assert (record["hedge"], record["fallback"]) == ("local", "p_error")
        assert len(d.posts) == 1


async def test_d_fails_while_p_computes(tmp_path: Path) -> None:
    p, d = RawEngine(late(LENGTH)), RawEngine(resets(), resets(), says(ANSWER))
    async with pair(tmp_path, p, d) as proxy:
        assert (await proxy.post(BODY, headers=SESSION)).text == "fine"
        (record,) = await proxy.records(1)
        assert (record["hedge"], record["route_class"]) == ("none", "HEAVY_P2P")
        assert proxy.metric("hedges_total", winner="none") == 1


@pytest.mark.parametrize("how", ["off", "whole answer"])
async def test_p_is_waited_for(tmp_path: Path, how: str) -> None:
    """Switched off, and where nobody would see D's first token."""
    d = says(ANSWER) if how == "off" else says(plain(b'{"choices":[{}]}'))
    p, engine = RawEngine(late(LENGTH)), RawEngine(d)
    async with pair(tmp_path, p, engine, hedge=how != "off") as proxy:
        body = BODY if how == "off" else chat(words(2000), stream=False)
        await proxy.post(body, headers=SESSION)
        (record,) = await proxy.records(1)
        assert (record["hedge"], record["route_class"]) == (None, "HEAVY_P2P")
        assert len(engine.posts) == 1


@pytest.mark.parametrize("after_s", [0.2, 0.45, 0.5, 0.55, 0.8])
async def test_a_client_that_leaves_takes_both_along(tmp_path: Path, after_s: float) -> None:
    p, d = RawEngine(stalls()), RawEngine(stalls())
    async with pair(tmp_path, p, d) as proxy:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(after_s):
                await proxy.post(BODY, headers=SESSION)
        (record,) = await proxy.records(1)
        assert record["outcome"] == "client_gone"
