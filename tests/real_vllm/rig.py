"""What the tests ask of engines directly: answers to compare with, counters, rest."""

from __future__ import annotations

import asyncio
import builtins
import keyword
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from tests.real_vllm.engines.fleet import ABORT_S, MODEL, Engine
from tests.real_vllm.tap import Tap
from tests.support.harness import ServedProxy

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = sorted({*keyword.kwlist, *dir(builtins)})
"""What the tokenizer was trained on: some two tokens each."""
LOCAL, COMPUTED, MOVED = "local_cache_hit", "local_compute", "external_kv_transfer"
REST_S = ABORT_S + 60.0 + 30.0
"""A D whose P has died gives up 60 s after the abort timeout; the rest is for a busy machine."""
FETCH, KEEP = b'"do_remote_prefill":true', b'"do_remote_decode":true'
"""In the decode leg of an offload, and in its prefill leg."""
TIE = 0.1
"""Log probabilities that differ by less are alike: a step of bfloat16 is 0.03 where they are 8."""
HEAVY: dict[str, Any] = {"warm_threshold": 100, "heavy_threshold": 500}
ALWAYS = HEAVY | {"offload_policy": "always"}
SLOW: dict[str, Any] = {"health_interval": 0.5, "health_timeout": 20.0, "scrape_interval": 0.5}
"""Two cores under two engines: a probe may take long, and says nothing when it does."""


def words(count: int, seed: object) -> str:
    """Text that no other seed begins with."""
    pick = random.Random(str(seed))
    return " ".join([f"{pick.getrandbits(64):x}", *pick.choices(WORDS, k=count)])


def ids(count: int, seed: object) -> list[int]:
    """The same as token ids."""
    pick = random.Random(str(seed))
    return [pick.randrange(300, 4000) for _ in range(count)]


def ask(path: str, prompt: str | list[int], *, stream: bool, **more: Any) -> dict[str, Any]:
    """A greedy request whose answer tells its token ids."""
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 16}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream": stream}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body | more


def events(body: bytes) -> list[dict[str, Any]]:
    """The objects of a stream."""
    found = [e for e in body.split(b"\n\n") if e.startswith(b"data: {")]
    return [orjson.loads(e[6:]) for e in found]


def token_ids(body: bytes) -> list[int]:
    """What was generated, of a whole answer or a stream."""
    parts = [orjson.loads(body)] if body[:1] == b"{" else events(body)
    return [i for part in parts for c in part["choices"] for i in c.get("token_ids") or ()]


def usage(body: bytes) -> dict[str, Any]:
    """The engine's own counts."""
    parts = [orjson.loads(body)] if body[:1] == b"{" else events(body)
    return next(part["usage"] for part in reversed(parts) if part.get("usage"))


class Taps:
    """The taps before all engines, by the engines' names."""

    def __init__(self, taps: dict[str, Tap]) -> None:
        self._taps = taps

    async def holding(self) -> str:
        """Wait until a request is held back; the name of the engine that it is for."""
        async with asyncio.timeout(REST_S):
            while True:
                for name, tap in self._taps.items():
                    if tap.held.is_set():
                        return name
                await asyncio.sleep(0.002)

    def go(self) -> None:
        """Let what was held go on, and everything after it."""
        for tap in self._taps.values():
            tap.go.set()


class Pair:
    """Engines, and a session to ask them past the proxy."""

    def __init__(self, http: aiohttp.ClientSession, engines: Sequence[Engine]) -> None:
        self.http = http
        self.engines = engines

    def proxy(self, folder: Path, **options: Any) -> ServedProxy:
        """A proxy in front of these engines."""
        given = [f"{e.name}={e.url};bootstrap={e.bootstrap_url}" for e in self.engines]
        return ServedProxy(folder / "log.jsonl", given, **(SLOW | options))

    @asynccontextmanager
    async def tapped(
        self, folder: Path, hold: bytes, **options: Any
    ) -> AsyncIterator[tuple[ServedProxy, Taps]]:
        """The same with a tap before each engine that holds requests with `hold` in them."""
        async with AsyncExitStack() as stack:
            taps = {
                e.name: await stack.enter_async_context(Tap(e.port, hold)) for e in self.engines
            }
            given = [
                f"{e.name}={taps[e.name].url};bootstrap={e.bootstrap_url}" for e in self.engines
            ]
            proxy = ServedProxy(folder / "log.jsonl", given, **(SLOW | options))
            await stack.enter_async_context(proxy)
            await proxy.up()
            yield proxy, Taps(taps)

    def named(self, name: str) -> Engine:
        """An engine by its name."""
        return next(e for e in self.engines if e.name == name)

    async def post(self, engine: Engine, path: str, body: dict[str, Any]) -> bytes:
        """An engine's answer to a request that must succeed."""
        async with self.http.post(engine.url + path, json=body) as response:
            raw = await response.read()
            assert response.status == 200, raw
            return raw

    async def fresh(self, engine: Engine, path: str, body: dict[str, Any]) -> list[int]:
        """What the engine says when it computes all of it itself, with nothing from its cache."""
        salted = body | {"cache_salt": f"{random.random()}", "stream": False}
        salted.pop("stream_options", None)
        raw = await self.post(engine, path, salted)
        assert usage(raw)["prompt_tokens_details"]["cached_tokens"] == 0
        return token_ids(raw)

    async def check_same(
        self, engine: Engine, prompt: list[int], got: list[int], want: list[int], model: str = MODEL
    ) -> None:
        """Two greedy answers are one, or part where the engine has both tokens alike.

        How many prompts a step computes differs between the two: on some processors that is another
        order of additions, and with it another one of two tokens that are equal in a bfloat16.
        """
        if got == want:
            return
        at = next(i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1])
        body = {"model": model, "prompt": [*prompt, *want[:at]], "max_tokens": 1, "temperature": 0}
        body |= {"logprobs": 5, "return_tokens_as_token_ids": True}
        answer = orjson.loads(await self.post(engine, COMPLETIONS, body))
        told = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        one, other = (told.get(f"token_id:{found[at]}", -math.inf) for found in (got, want))
        assert abs(one - other) < TIE, (at, got[at], want[at], told)

    async def value(self, engine: Engine, name: str, **labels: str) -> float:
        """A series of an engine's /metrics, summed over what the labels leave open."""
        async with self.http.get(f"{engine.url}/metrics") as response:
            text = await response.text()
        families = text_string_to_metric_families(text)
        samples = [s for f in families for s in f.samples if s.name == f"vllm:{name}"]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    async def prompt_tokens(self, engine: Engine, source: str) -> int:
        """Prompt tokens in place, by where they came from."""
        return int(await self.value(engine, "prompt_tokens_by_source_total", source=source))

    async def busy(self, engine: Engine) -> float:
        """What the engine runs, queues or holds: nothing of it when at rest."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return sum([await self.value(engine, name) for name in names])

    async def at_rest(self) -> None:
        """Every engine that lives holds nothing, within the time after which pins are given up."""
        try:
            async with asyncio.timeout(REST_S):
                while [e for e in self.engines if e.is_alive and await self.busy(e)]:
                    await asyncio.sleep(0.1)
        except TimeoutError:
            held = {e.name: await self.busy(e) for e in self.engines if e.is_alive}
            raise AssertionError(f"still held by engines: {held}") from None
