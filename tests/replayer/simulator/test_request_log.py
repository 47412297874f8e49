"""The engine-side request log: whole lines, in order, also those of the last moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest

from replayer.engine.costs import StepCost
from replayer.engine.types import Job
from replayer.simulator.driver import EngineDriver
from replayer.simulator.options import SimOptions
from replayer.simulator.request_log import EngineRequestLog, record


def lines(path: Path) -> list[int]:
    return [orjson.loads(line)["n"] for line in path.read_bytes().splitlines()]


async def test_what_is_queued_when_it_stops_is_written(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = EngineRequestLog(path)
    assert path.read_bytes() == b"", "a path is tried at once"
    async with asyncio.TaskGroup() as group:
        group.create_task(log.run())
        log.add({"n": 1})
        async with asyncio.timeout(10):
            while not path.stat().st_size:
                await asyncio.sleep(0)
        log.add({"n": 2})
        log.add({"n": 3})
        log.stop()
    assert lines(path) == [1, 2, 3]
    EngineRequestLog(path)
    assert lines(path) == [1, 2, 3], "a second run goes on behind the first"


def test_a_path_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        EngineRequestLog(tmp_path / "nowhere" / "log")


def test_a_record_has_unix_times_and_counts_of_what_was_computed() -> None:
    step = StepCost()
    driver = EngineDriver(SimOptions(a0=step.a0), lambda event: None)
    request = driver.engine.submit(Job("r", 40, [1, 2], 2), 0.0)
    fresh = record("e0", driver, request)
    assert (fresh["t_first_token"], fresh["t_done"], fresh["computed_tokens"]) == (None, None, 0)
    for _ in driver.engine.advance(60.0):
        pass
    told = record("e0", driver, request)
    assert (told["engine"], told["request_id"], told["finish_reason"]) == ("e0", "r", "length")
    assert (told["prompt_tokens"], told["computed_tokens"], told["output_tokens"]) == (40, 40, 2)
    times = [told[name] for name in ("t_arrived", "t_scheduled", "t_first_token", "t_done")]
    assert times == sorted(times)
    assert times[0] == pytest.approx(driver.unix_s(0.0), abs=1e-5)
