"""The periodic tasks: probes, KV events, sensors, detached legs, loop lag, memory, heat."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Protocol

from proxy.core.admission.memory import Level, Watermark
from proxy.process.memory import give_back, resident_bytes
from proxy.protocol.errors import DEFECTS
from proxy.telemetry.log import Throttle, more
from proxy.telemetry.metrics import Metrics

LAG_INTERVAL_S = 0.05
"""Twenty samples a second, for 0.1 % of a core: of few samples, the p99 is just the worst one."""
MEMORY_INTERVAL_S = 0.5
AGAIN_S = 1.0
"""Between the failure of a part and its next start."""
GIVE_BACK_S, CALM_S = 5.0, 2.0
"""Free memory is returned to the kernel at most every GIVE_BACK_S, and not within CALM_S of a giant
prompt. A return takes 0.1 ms, after a burst of giant prompts 10 ms or more.
"""
_MEMORY_WORDS = {
    Level.NORMAL: "nothing is refused",
    Level.NO_KEEPALIVE: "connections are closed after each answer",
    Level.NO_HEAVY: "HEAVY requests are refused",
    Level.NOTHING: "all requests are refused",
}
Work = Callable[[], Coroutine[Any, Any, None]]
Relieve = Callable[[Level], None]
"""Ends what can be spared at a level of memory."""
_log = logging.getLogger(__name__)


class Runs(Protocol):
    """A task that runs until it is cancelled."""

    async def run(self) -> None:
        """Run until cancelled."""


async def run(
    parts: Mapping[str, Runs], memory: Watermark, metrics: Metrics, relieve: Relieve
) -> None:
    """Run all periodic tasks until cancelled; `parts`: what does its own, by the task's name.

    `relieve` ends what can be spared, as long as memory is short.
    """
    async with asyncio.TaskGroup() as group:
        works = {name: part.run for name, part in parts.items()}
        works |= {"loop-lag": partial(_lag, metrics), "memory": partial(_memory, memory, relieve)}
        for name, work in works.items():
            group.create_task(_carry_on(name, work), name=name)


async def _carry_on(name: str, work: Work) -> None:
    """Run a part until it ends; one that a defect ends starts again, and the others go on."""
    throttle, loop = Throttle(), asyncio.get_running_loop()
    while True:
        try:
            await work()
            return
        except* (*DEFECTS, RuntimeError):
            if (before := throttle.turn(name, loop.time())) is not None:
                _log.exception(
                    "the periodic task %s failed, and starts again%s", name, more(before)
                )
        await asyncio.sleep(AGAIN_S)


async def _lag(metrics: Metrics) -> None:
    """Measure how late the event loop runs a timer."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        metrics.loop_lag.observe(max(0.0, loop.time() - due_s))


async def _memory(watermark: Watermark, relieve: Relieve) -> None:
    """Measure the memory, and return free memory to the kernel after a burst or a giant prompt.

    Memory is not returned while giant prompts keep coming and there is room: each would need the
    pages of the one before again, one page fault at a time.
    """
    loop = asyncio.get_running_loop()
    gave_s = -GIVE_BACK_S
    while True:
        before = watermark.level
        level = watermark.observe(await asyncio.to_thread(resident_bytes))
        now_s = loop.time()
        is_calm = now_s - watermark.giant_s >= CALM_S
        if (is_calm or level is not Level.NORMAL) and now_s - gave_s >= GIVE_BACK_S:
            gave_s = now_s
            await asyncio.to_thread(give_back)
            level = watermark.observe(await asyncio.to_thread(resident_bytes))
        if level is not Level.NORMAL:
            relieve(level)  # before others are refused
        if level is not before:
            used, limit = watermark.used_bytes >> 20, (watermark.limit_bytes or 0) >> 20
            _log.warning("memory: %d of %d MiB: %s", used, limit, _MEMORY_WORDS[level])
        await asyncio.sleep(MEMORY_INTERVAL_S)
