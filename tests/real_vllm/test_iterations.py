"""What the planner makes of a real engine's metrics is what the engine's own log says of its steps.

A process of its own computes here: vLLM's log leaves out what an executor computes in the engine's
process. It leaves out scheduling, too, so steps must be long beside that: they compute prompts.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from planner.core.observe import Account, EngineWindows
from planner.core.types import Engine as Seen
from planner.sources.engines import Engines
from tests.real_vllm.engines.fleet import Engine, Site, running
from tests.real_vllm.rig import COMPLETIONS, Pair, ask, ids

STREAMS, LANES, PROMPT_TOKENS = 4, 6, 3000
"""So many prompts wait or are computed all the time."""
FIRST, PROMPTS = 6, 30
"""Prompts that are answered before the first look, and between the two."""
WITHIN = 0.15
FLAGS = ("--enable-logging-iteration-details", "--distributed-executor-backend", "mp")
STEP = re.compile(r"Iteration\(\d+\): .* (\d+) context tokens, .* elapsed time: ([\d.]+) ms")


@pytest.fixture(scope="module")
def telling(site: Site) -> Iterator[Engine]:
    engine = Engine(site, "telling", "none", FLAGS)
    with running([engine]):
        yield engine


async def test_steps_of_the_metrics_are_those_of_the_engines_log(
    telling: Engine, figure: Callable[[str], None]
) -> None:
    windows = EngineWindows()
    async with aiohttp.ClientSession() as http, _loaded(Pair(http, [telling])) as answered:
        reader = Engines(http)
        await _wait(answered, FIRST)
        await _look(reader, windows, telling)
        before = len(_logged(telling))
        await _wait(answered, PROMPTS)
        seen = await _look(reader, windows, telling)
        logged = _logged(telling)[before:]
    assert seen.wall_s is not None
    told_s = sum(ms for _, ms in logged) / len(logged) / 1e3
    figure(f"an iteration: {1e3 * seen.wall_s:.0f} ms by metrics, {1e3 * told_s:.0f} by the log")
    assert seen.wall_s == pytest.approx(told_s, rel=WITHIN)
    computed = sum(tokens for tokens, _ in logged) / len(logged)
    assert seen.prefill_tokens == pytest.approx(computed, rel=WITHIN)


async def _wait(answered: asyncio.Semaphore, prompts: int) -> None:
    for _ in range(prompts):
        await answered.acquire()


async def _look(reader: Engines, windows: EngineWindows, engine: Engine) -> Seen:
    """The engine since the last look."""
    work = await reader.look({engine.name: engine.url})
    assert not reader.failures
    (seen,) = windows.look(time.monotonic(), {engine.name: Account()}, work)
    return seen


def _logged(engine: Engine) -> list[tuple[int, float]]:
    """Tokens of prompts and milliseconds of each step so far."""
    return [(int(tokens), float(ms)) for tokens, ms in STEP.findall(engine.log.read_text())]


@asynccontextmanager
async def _loaded(pair: Pair) -> AsyncIterator[asyncio.Semaphore]:
    """Streams that run all the time, and prompts without end beside them: one release for each."""
    (engine,) = pair.engines
    answered = asyncio.Semaphore(0)

    async def stream(number: int) -> None:
        body = ask(COMPLETIONS, ids(200, f"stream {number}"), stream=True, max_tokens=20_000)
        await pair.post(engine, COMPLETIONS, body)

    async def prompts(lane: int) -> None:
        for number in range(1000):
            prompt = ids(PROMPT_TOKENS, f"prompt {lane} {number}")
            await pair.post(
                engine, COMPLETIONS, ask(COMPLETIONS, prompt, stream=True, max_tokens=2)
            )
            answered.release()

    tasks = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
    tasks += [asyncio.create_task(prompts(lane)) for lane in range(LANES)]
    try:
        yield answered
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended
