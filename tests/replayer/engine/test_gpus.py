"""GPUs that grow warm from a model's batch, and what an exporter says of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.fleet.sensors import dcgm
from replayer.engine.engine import Engine
from replayer.engine.gpus import RATE_S, WarmGpus, plant_options
from replayer.engine.heat import FirstOrderPlant, HarnessPlant, Plant
from replayer.engine.types import EngineOptions, Job
from tests.support.harness import at_once

KV_BYTES = 24 << 30


def warm(plant: Plant | None = None) -> tuple[Engine, WarmGpus]:
    engine = Engine(EngineOptions())
    return engine, WarmGpus(engine, plant or FirstOrderPlant(), KV_BYTES, "h")


def submitted(engine: Engine, now_s: float, output_tokens: int = 500) -> None:
    """A request of 2,000 tokens of its own."""
    hashes = tuple(hash((now_s, block)) for block in range(2000 // 16))
    engine.submit(Job(f"r{now_s}", 2000, hashes, output_tokens), now_s)


def run(engine: Engine, gpus: WarmGpus, until_s: float, step_s: float = 0.01) -> None:
    now_s = gpus._at_s
    while now_s < until_s:
        now_s += step_s
        for _ in engine.advance(now_s):
            pass
        gpus.observe(now_s)


def test_work_warms_and_rest_cools() -> None:
    engine, gpus = warm()
    cold = gpus.plant.celsius
    for at in range(64):
        submitted(engine, at / 1000)
    run(engine, gpus, 3.0)
    assert engine.running
    assert gpus.plant.celsius > cold + 1
    run(engine, gpus, 300.0, step_s=1.0)
    assert not engine.running
    assert gpus.plant.celsius == pytest.approx(cold, abs=0.1)
    assert gpus.plant.watts == pytest.approx(120.0)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.06, 2.0), min_size=2, max_size=20))
def test_every_prefilled_token_is_counted_once(steps_s: list[float]) -> None:
    """What the plant was told of prefills, over time, is what the engine has computed."""
    told: list[float] = []

    class Listening(FirstOrderPlant):
        def step(self, dt_s: float, running: int, kv_tokens: int, prefill_tps: float) -> None:
            told.append(dt_s * prefill_tps)
            super().step(dt_s, running, kv_tokens, prefill_tps)

    engine, gpus = warm(Listening())
    submitted(engine, 0.0, output_tokens=1)
    now_s = 0.0
    for step_s in (*steps_s, 2.0, 20 * RATE_S, 20 * RATE_S):
        now_s += step_s
        for _ in engine.advance(now_s):
            pass
        gpus.observe(now_s)
    assert math.fsum(told) == pytest.approx(engine.counters.prompt_computed, rel=0.01)
    assert engine.counters.prompt_computed == 2000


def test_what_an_exporter_says_is_what_the_sensor_reads() -> None:
    options = plant_options(gpus=2, ambient_celsius=40.0, hot_gpu=1)
    engine, gpus = warm(FirstOrderPlant(options))
    for at in range(32):
        submitted(engine, at / 1000)
    run(engine, gpus, 2.0)
    first, second = dcgm.readings("n", at_once(dcgm.parse(gpus.exposition(2.0).encode())), {}, 2.0)
    assert (first.gpu, second.gpu) == ("n:0", "n:1")
    assert first.celsius == round(gpus.plant.gpu_celsius(0))
    assert second.celsius == round(gpus.plant.gpu_celsius(0) + options.hot_celsius)
    assert second.memory_celsius == round(gpus.plant.celsius + 8)
    assert first.watts == pytest.approx(gpus.plant.gpu_watts(0), rel=0.0021)
    assert first.utilization_ratio == pytest.approx(1 - math.exp(-2.0 / RATE_S), abs=0.06)
    assert first.memory_used_bytes == (16 << 30) + KV_BYTES // 2
    again = dcgm.readings("n", at_once(dcgm.parse(gpus.exposition(2.0).encode())), {}, 2.0)
    assert again[0].watts != first.watts, "a meter never says the same twice"
    assert not first.is_slowed


def test_failing_cooling_slows_the_hardware() -> None:
    _, gpus = warm()
    gpus.warmer_celsius = 60.0
    gpus.observe(0.1)
    gpus.observe(400.0)
    (reading,) = dcgm.readings("n", at_once(dcgm.parse(gpus.exposition(400.0).encode())), {}, 400.0)
    assert reading.celsius == round(92 + 120 * 0.08)
    assert reading.is_slowed


def test_the_harness_plant_takes_the_same_work() -> None:
    engine, gpus = warm(HarnessPlant())
    submitted(engine, 0.0)
    run(engine, gpus, 1.0)
    assert "DCGM_FI_DEV_GPU_TEMP" in gpus.exposition(1.0)
