"""Periodic tasks: a part that a defect ends starts again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from proxy.core.admission.memory import Watermark
from proxy.process import background
from proxy.telemetry.metrics import Metrics
from tests.support.harness import until


class Failing:
    """A part whose first runs end by a defect, in itself or in a task of its own."""

    def __init__(self, *defects: Exception) -> None:
        self.defects, self.runs = list(defects), 0

    async def run(self) -> None:
        self.runs += 1
        if not self.defects:
            await asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._fail())

    async def _fail(self) -> None:
        raise self.defects.pop(0)


async def test_a_defect_of_one_part_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "AGAIN_S", 0.0)
    bad, good = Failing(RecursionError("deep"), KeyError("name"), RuntimeError("odd")), Failing()
    parts = {"bad": bad, "good": good}
    with caplog.at_level(logging.ERROR):
        work = background.run(parts, Watermark(None), Metrics(), lambda level: None)
        running = asyncio.create_task(work)
        await until(lambda: bad.runs == 4, "it runs again after each defect")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert good.runs == 1
    assert [r.getMessage() for r in caplog.records] == [
        "the periodic task bad failed, and starts again"
    ]


async def test_what_is_no_defect_ends_them_all() -> None:
    with pytest.raises(BaseExceptionGroup):
        await background.run(
            {"bad": Failing(OSError(5, "IO"))}, Watermark(None), Metrics(), lambda level: None
        )


async def test_where_no_thread_can_be_started_memory_is_measured_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As at a limit on processes that another process has filled."""
    monkeypatch.setattr(background, "AGAIN_S", 0.0)
    real, asked = asyncio.to_thread, list[int]()

    async def to_thread(function: Callable[[], int]) -> int:
        asked.append(1)
        if len(asked) < 3:
            raise RuntimeError("can't start new thread")
        return await real(function)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    memory = Watermark(None)
    running = asyncio.create_task(background.run({}, memory, Metrics(), lambda level: None))
    await until(lambda: memory.used_bytes, "it is measured")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
