"""The founding document's companion harness: its plant and load, under its rule and ours.

Its run has 180 seconds, of which 81 are a burst. Batch, request rate and KV make a pressure, and
the pressure a temperature; a batch is its cap at once. Its rows (RECORDED) are those that it prints
with seed 7. Both rows computed here are the same, so plant, load and rule are its own.

From 85 degrees on it counts a second as hot. In the burst the pressure is at its greatest whatever
the batch is, so that no control of the batch alone has less than the burst's seconds above it.
Only a simulator shows any of this: not hardware validated.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from proxy.core.thermal.controller import Controller
from proxy.core.thermal.options import ThermalOptions
from proxy.core.thermal.readings import GpuReading, InstanceWork
from replayer.engine.heat import HarnessFormula, HarnessPlant, PlantOptions

SEED = 7
SECONDS = 180
"""Length of the harness's runs."""
HOT_CELSIUS = 85.0
FULL_BATCH, LEAST_BATCH = 256, 16
BURST_S = (35, 115)
BASE_RATE, BURST_RATE = 6.0, 10.5
TPS_PER_BATCH = 2.2
BASE_LATENCY_MS = 1450.0
RELIEF_S = 4
"""A move of KV cools the harness's plant for so many seconds."""
OURS = ThermalOptions(
    memory_target_celsius=84.0,
    min_cap=LEAST_BATCH,
    max_running=FULL_BATCH,
    tau_s=5.0,
    rth_celsius_per_watt=round(0.55 * 40.8 / 256 / 3.2, 4),
)
"""Our options on its plant. It controls the memory temperature, one degree below its throttling at
85. Its smallest batch is 16. An inertia of .82 per second is a tau of 5 s. A sequence of 3.2 W is
.55 * 40.8 / 256 = .088 degrees there. The rest are our defaults."""
RECORDED: tuple[dict[str, float], ...] = (
    {
        "peak_celsius": 97.77,
        "above_s": 174,
        "p99_ms": 4905,
        "batch": 256.0,
        "throughput_tps": 332,
    },
    {
        "peak_celsius": 97.54,
        "above_s": 97,
        "p99_ms": 4207,
        "batch": 88.8,
        "throughput_tps": 181,
    },
)
"""The harness's own output for its baseline and its control, version 0.2.1, 180 s, seed 7."""


@dataclass(frozen=True, slots=True)
class HarnessSecond:
    """One second: the temperature, the batch of the next second and what it yields."""

    at_s: int
    celsius: float
    batch: int
    p99_ms: float
    throughput_tps: float


Rule = Callable[[int, float, int, float], int]
"""From the second, its temperature, the batch and the queue to the next second's batch."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Differences of the harness's two configurations beside its rule."""

    cooling_celsius: float
    relief_celsius: float
    queue_ms: float
    hot_ms: float
    change_ms: float


BASELINE = Setting(0.22, 0.0, 125.0, 360.0, 0.0)
CONTROLLED = Setting(0.4, 2.0, 110.0, 320.0, 75.0)


def run_harness(
    setting: Setting, rule: Rule, seconds: int = SECONDS, seed: int = SEED
) -> list[HarnessSecond]:
    """One run of its loop; a rule that lowers the batch moves KV too, as its control does."""
    formula = replace(
        HarnessFormula(),
        cooling_celsius=setting.cooling_celsius,
        relief_celsius=setting.relief_celsius,
    )
    plant = HarnessPlant(PlantOptions(initial_celsius=72.0), formula, seed)
    jitter = random.Random(seed + 101)
    batch, relieved, rows = FULL_BATCH, 0, []
    for second in range(seconds):
        rate = BURST_RATE if BURST_S[0] <= second <= BURST_S[1] else BASE_RATE
        served = batch * TPS_PER_BATCH / 32
        queue = max(0.0, (rate - served) * 1.1 + jitter.uniform(-0.3, 0.3))
        kv_ratio = min(1.0, max(0.0, 0.22 + queue * 0.03 + rate / 20))
        plant.is_relieved = relieved > 0
        plant.press(1.0, plant.pressure_of(rate, batch, kv_ratio), batch)
        celsius = round(plant.celsius, 2)
        before, batch = batch, rule(second, celsius, batch, queue)
        if batch < before:
            relieved = RELIEF_S
        rows.append(_second(second, celsius, batch, queue, setting, is_new=batch != before))
        relieved = max(0, relieved - 1)
    return rows


def _second(
    at_s: int, celsius: float, batch: int, queue: float, setting: Setting, *, is_new: bool
) -> HarnessSecond:
    hot_ms = max(0.0, celsius - 80.0) * setting.hot_ms
    queue_ms = queue * setting.queue_ms
    p50_ms = BASE_LATENCY_MS + 0.35 * queue_ms + 0.08 * hot_ms
    p95_ms = p50_ms + 0.65 * queue_ms + 0.22 * hot_ms + is_new * setting.change_ms
    p99_ms = p95_ms + 0.5 * queue_ms + 0.45 * hot_ms
    slowed = max(0.35, 1.0 - max(0.0, celsius - 86.0) * 0.06)
    return HarnessSecond(at_s, celsius, batch, p99_ms, max(1.0, batch * TPS_PER_BATCH * slowed))


def no_control(_second: int, _celsius: float, batch: int, _queue: float) -> int:
    """The baseline's rule."""
    return batch


def own_control() -> Rule:
    """The harness's own rule: half at 85 degrees, double at 80, dwell 8, cooldown 10, 3 in 30 s."""
    changes: list[int] = []
    last = -(10**9)

    def rule(second: int, celsius: float, batch: int, _queue: float) -> int:
        nonlocal last
        changes[:] = [at_s for at_s in changes if second - at_s <= 30]
        wanted = batch
        if len(changes) < 3 and celsius >= HOT_CELSIUS and second - last >= 8:
            wanted = max(LEAST_BATCH, batch // 2)
        elif len(changes) < 3 and celsius <= 80.0 and second - last >= 10:
            wanted = min(FULL_BATCH, batch * 2)
        if wanted != batch:
            last = second
            changes.append(second)
        return wanted

    return rule


def our_control(options: ThermalOptions = OURS) -> tuple[Rule, Controller]:
    """Our controller as a rule of the harness: it sees the temperature, and no watts."""
    controller = Controller(options)

    def rule(second: int, celsius: float, batch: int, queue: float) -> int:
        reading = GpuReading("sim:0", float(second), memory_celsius=celsius)
        work = InstanceWork(running=batch, waiting=int(queue))
        limits = controller.tick([reading], work, float(second))
        return FULL_BATCH if limits.cap is None else limits.cap

    return rule, controller


def harness_figures(law: str, rows: list[HarnessSecond]) -> dict[str, Any]:
    """The harness's own figures: its p99 is a mean of modelled ones."""
    batches = [row.batch for row in rows]
    steps = [b - a for a, b in pairwise(batches) if b != a]
    count = len(rows)
    return {
        "law": law,
        "peak_celsius": max([row.celsius for row in rows]),
        "above_s": sum([row.celsius >= HOT_CELSIUS for row in rows]),
        "p99_ms": sum([row.p99_ms for row in rows]) / count,
        "batch": sum(batches) / count,
        "throughput_tps": sum([row.throughput_tps for row in rows]) / count,
        "directions": sum([(a > 0) != (b > 0) for a, b in pairwise(steps)]),
    }


def compare_harness(
    options: ThermalOptions = OURS, seconds: int = SECONDS, seed: int = SEED
) -> list[dict[str, Any]]:
    """Rows of its baseline, its rule, and our control on the same plant and load."""
    rule, _controller = our_control(options)
    return [
        harness_figures("none", run_harness(BASELINE, no_control, seconds, seed)),
        harness_figures("harness", run_harness(CONTROLLED, own_control(), seconds, seed)),
        harness_figures(options.law, run_harness(CONTROLLED, rule, seconds, seed)),
    ]
