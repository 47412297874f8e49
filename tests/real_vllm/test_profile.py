"""The self-benchmark on a real engine: its metrics and answers are what the benchmark counts on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planner.config.profiles import read_profile, write_profile
from planner.core.perf.regression import Line
from planner.profiling.benchmark import BenchmarkOptions, benchmark
from planner.profiling.grid import OUTPUT_TOKENS, GridOptions
from planner.profiling.instance import Instance, Target
from replayer.replay.client import open_session
from tests.real_vllm.engines.fleet import KV_BYTES_PER_TOKEN, Engine, Site, running

KV_BYTES = 16 << 20
KV_TOKENS = KV_BYTES // KV_BYTES_PER_TOKEN


@pytest.fixture(scope="module")
def alone(site: Site) -> Iterator[Engine]:
    engine = Engine(site, "profiled", "none", ("--kv-cache-memory-bytes", str(KV_BYTES)))
    with running([engine]):
        yield engine


async def test_a_profile_of_a_real_engine(
    alone: Engine, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    """Twice: the second run's prompts are in no cache either."""
    grid, target = GridOptions(4, 2, 16, max_length=2048), Target(alone.url)
    await benchmark(BenchmarkOptions(target, grid), print, time.monotonic)
    profile = await benchmark(BenchmarkOptions(target, grid), print, time.monotonic)
    async with open_session() as session:
        state = await Instance(session, target, time.monotonic, 0).idle()
    assert state.kv_tokens == profile.max_kv_tokens == KV_TOKENS
    assert [point.isl_tokens for point in profile.prefill] == [128, 323, 813, 2048]
    for point, batch in zip(profile.decode, (16, 1, 16, 1), strict=True):
        context = point.kv_ratio * KV_TOKENS / batch
        assert point.context_tokens < context <= point.context_tokens + 2 * OUTPUT_TOKENS
    await asyncio.to_thread(write_profile, tmp_path, profile)
    again = await asyncio.to_thread(read_profile, tmp_path)
    assert Line(2, again.priors(2048)).coefficients is not None
    figure(f"profile of a real engine: {profile}")
