"""The self-benchmark over sockets: what it finds is what the engine is made of.

Engine and benchmark have one clock, which jumps over all waiting: minutes of an engine's time, and
figures that are the same on a busy machine.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from planner.core.perf.profile import Profile, Surface, precision
from planner.core.perf.regression import Line
from planner.profiling.benchmark import BenchmarkOptions, benchmark
from planner.profiling.grid import GridOptions
from planner.profiling.instance import Target
from replayer.engine.costs import StepCost
from replayer.simulator import driver
from replayer.simulator.host import SimFleet
from tests.support.virtual_time import run

ENGINE = {"max_model_len": 32_768, "num_gpu_blocks": 8193, "max_num_seqs": 64}


def measured(
    monkeypatch: pytest.MonkeyPatch, grid: GridOptions | None = None, gpus: int = 1, **engine: Any
) -> tuple[Profile, list[str], float]:
    """The profile of a simulated engine, what was said, and the seconds that it took."""

    async def measure() -> tuple[Profile, list[str], float]:
        now_s, said = asyncio.get_running_loop().time, list[str]()
        monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=now_s))
        async with SimFleet(1, **(ENGINE | engine)) as fleet:
            target = Target(fleet.engines[0].url)
            options = BenchmarkOptions(target, grid or GridOptions(max_num_seqs=64), gpus)
            began_s = now_s()
            profile = await benchmark(options, said.append, now_s)
            return profile, said, now_s() - began_s

    found: tuple[Profile, list[str], float] = run(measure())
    return found


def test_a_line_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine whose steps are a line in prompt tokens and KV: within 2 % each."""
    told = StepCost()
    profile, said, took_s = measured(monkeypatch, a2=0.0, a4=0.0)
    print(*said, took_s, sep="\n")
    line = Line(2, profile.priors(8192))
    assert line.coefficients == pytest.approx((told.a0, told.a1, told.a3), rel=0.02)
