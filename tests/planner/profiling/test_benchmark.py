"""The self-benchmark over sockets: what it finds is what the engine is made of.

Engine and benchmark have one clock, which jumps over all waiting: minutes of an engine's time, and
figures that are the same on a busy machine.
"""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from planner.core.perf.profile import Profile, Surface, precision
from planner.core.perf.regression import Line
from planner.profiling import instance
from planner.profiling.benchmark import BenchmarkOptions, benchmark
from planner.profiling.grid import GridOptions
from planner.profiling.instance import BenchmarkError, Target
from replayer.arguments import InputError
from replayer.engine.costs import StepCost
from replayer.simulator import driver
from replayer.simulator.host import SimFleet
from tests.support.harness import until, words
from tests.support.sim_http import TEXT, is_idle, post
from tests.support.virtual_time import run

ENGINE: dict[str, Any] = {"max_model_len": 16_384, "num_gpu_blocks": 4097, "max_num_seqs": 64}
SMALL = GridOptions(3, 2, 8)
TOLD = StepCost()


def measured(
    monkeypatch: pytest.MonkeyPatch, grid: GridOptions, gpus: int = 1, **engine: Any
) -> tuple[Profile, list[str], float]:
    """The profile of a simulated engine, what was said, and the seconds that it took."""

    async def measure() -> tuple[Profile, list[str], float]:
        now_s, said = asyncio.get_running_loop().time, list[str]()
        monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=now_s))
        async with SimFleet(1, **(ENGINE | engine)) as fleet:
            options = BenchmarkOptions(Target(fleet.engines[0].url), grid, gpus)
            began_s = now_s()
            profile = await benchmark(options, said.append, now_s)
            return profile, said, now_s() - began_s

    found: tuple[Profile, list[str], float] = run(measure())
    return found


@pytest.mark.long
def test_a_line_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine whose steps are a line in prompt tokens and KV: each coefficient within 2 %.

    So are times between its points: within 2 % to the first token and 10 % between tokens.
    """
    grid = GridOptions(max_num_seqs=32)
    profile, said, took_s = measured(monkeypatch, grid, a2=0.0, a4=0.0)
    assert len(profile.prefill) == 16
    assert len({point.context_tokens for point in profile.decode}) == 6
    assert profile.max_kv_tokens == 4097 * 16
    line = Line(2, profile.priors(8192))
    assert line.coefficients == pytest.approx((TOLD.a0, TOLD.a1, TOLD.a3), rel=0.02)
    first, after = Surface(profile.prefill_rows()), Surface(profile.decode_rows())
    assert first.at(0.0, 5000).seconds == pytest.approx(TOLD.a0 + TOLD.a1 * 5000, rel=0.02)
    for context, batch in ((300, 20), (2000, 15), (9000, 4)):
        step_s = TOLD.a0 + TOLD.a3 * batch * context
        assert after.at(batch / step_s, context).seconds == pytest.approx(step_s, rel=0.1)
    worst = precision(profile.prefill_rows()).worst
    assert worst is not None
    assert worst < 0.02
    (told,) = re.findall(r"about (\d+) s$", said[0])
    assert len(said) == 1 + len(profile.prefill) + len(profile.decode)
    assert float(told) / 2 < took_s < float(told) * 2, "its time is told before it begins"


@pytest.mark.long
def test_an_engine_that_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """With attention and a cost per stream, steps of usual loads are foretold within 20 %."""
    profile, _, _ = measured(monkeypatch, GridOptions(12, 4, 32))
    line = Line(2, profile.priors(8192))
    for prefill, streams, context in (
        (0, 8, 2000),
        (0, 30, 1000),
        (512, 16, 2000),
        (4096, 8, 4000),
    ):
        step_s = TOLD.step_s(prefill, prefill * 2000, streams, streams * context)
        assert line(prefill, streams * context) == pytest.approx(step_s, rel=0.2)


def test_throughput_is_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, _, _ = measured(monkeypatch, SMALL, gpus=4)
    for one in profile.prefill:
        assert one.throughput == pytest.approx(one.isl_tokens / one.ttft_s / 4)
    most = max(profile.decode, key=lambda one: one.throughput)
    assert most.throughput * most.itl_s * 4 == pytest.approx(8)


def test_a_second_run_finds_nothing_of_the_first_in_the_cache() -> None:
    """The same lengths on the same engine; a hit would be an error of the run."""

    async def twice() -> None:
        async with SimFleet(1, speed=50.0, **ENGINE) as fleet:
            target = Target(fleet.engines[0].url)
            loop = asyncio.get_running_loop()
            for _ in range(2):
                found = await benchmark(BenchmarkOptions(target, SMALL), lambda _: None, loop.time)
                assert found.prefill
            await until(lambda: is_idle(fleet.engines[0]))

    asyncio.run(twice())


async def refused(fleet: SimFleet, grid: GridOptions = SMALL, timeout_s: float = 30.0) -> str:
    target = Target(fleet.engines[0].url, timeout_s=timeout_s)
    clock = asyncio.get_running_loop().time
    with pytest.raises((InputError, BenchmarkError)) as raised:
        await benchmark(BenchmarkOptions(target, grid), lambda _: None, clock)
    await until(lambda: is_idle(fleet.engines[0]), "nothing that was sent is left")
    return str(raised.value)


async def test_an_instance_that_is_not_idle_is_left_alone() -> None:
    async with SimFleet(1, speed=1.0) as fleet, aiohttp.ClientSession() as http:
        engine = fleet.engines[0]
        async with asyncio.TaskGroup() as group:
            body = {"prompt": words(50), "max_tokens": 100_000}
            other = group.create_task(post(http, engine, TEXT, **body))
            await until(lambda: engine.stats()["running"])
            clock = asyncio.get_running_loop().time
            options = BenchmarkOptions(Target(engine.url), SMALL)
            told = f"--instance {engine.url}: is not idle: it has 1 running and 0 waiting requests"
            with pytest.raises(InputError, match=re.escape(told)):
                await benchmark(options, lambda _: None, clock)
            assert engine.stats()["running"] == 1
            other.cancel()


async def test_more_streams_than_the_engine_takes() -> None:
    async with SimFleet(1, speed=50.0, **(ENGINE | {"max_num_seqs": 4})) as fleet:
        told = await refused(fleet, timeout_s=1.0)
    hint = "is --max-num-seqs larger than the engine's?"
    assert told == f"a stream beside others: no end after 1 s (--timeout): {hint}"


async def test_an_engine_that_dies() -> None:
    async with SimFleet(1, speed=5.0, **ENGINE) as fleet:
        async with asyncio.TaskGroup() as group:
            run_ = group.create_task(refused(fleet))
            await until(lambda: fleet.engines[0].stats()["running"] > 2)
            await fleet.engines[0].kill()
            await fleet.engines[0].start()
        assert "a stream beside others: " in run_.result() or "tokens: " in run_.result()


async def test_somebody_else_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance, "IDLE_TIMEOUT_S", 1.0)
    async with SimFleet(1, speed=5.0, **ENGINE) as fleet, aiohttp.ClientSession() as http:
        engine, done = fleet.engines[0], asyncio.Event()

        async def disturb() -> None:
            while not done.is_set():
                await post(http, engine, TEXT, prompt=words(9), max_tokens=200)

        async with asyncio.TaskGroup() as group:
            run_ = group.create_task(refused(fleet))
            await until(lambda: engine.stats()["running"])
            other = group.create_task(disturb())
            told = await run_
            done.set()
            await other
    assert "somebody else" in told
