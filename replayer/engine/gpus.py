"""The GPUs of an engine model, warmed by its batch, with the metrics of dcgm-exporter. Pure.

A plant (`heat`) gets the engine's work over time: running requests, tokens in their KV, prefilled
tokens per second. The rate forgets within `RATE_S`, since a step books its tokens at once.
Utilisation is the time in which the engine had work, likewise. Degrees and watts stand for no GPU:
not hardware validated.
"""

import math
import random

from replayer.engine.engine import Engine
from replayer.engine.heat import FirstOrderPlant, Plant, PlantOptions, Sensors

RATE_S = 1.0
"""Engine seconds over which rates are averaged."""
LEAST_STEP_S = 0.05
"""Shorter times are gathered: the plant is slow."""
WEIGHTS_BYTES = 16 << 30
"""Memory of a GPU without KV; an engine takes all of its KV cache when it starts."""
WATTS_NOISE_RATIO = 0.002
"""Half of the range in which a power meter is wrong, so that it never says the same twice."""
_MIB = 1 << 20
_THERMAL = 0x20
_SERIES = (
    ("GPU_TEMP", "gauge", "GPU temperature (in C)."),
    ("MEMORY_TEMP", "gauge", "Memory temperature (in C)."),
    ("POWER_USAGE", "gauge", "Power draw (in W)."),
    ("GPU_UTIL", "gauge", "GPU utilization (in %)."),
    ("FB_USED", "gauge", "Framebuffer memory used (in MiB)."),
    ("CLOCKS_EVENT_REASONS", "gauge", "Current clock event reasons (bitmask)."),
)


class WarmGpus:
    """The GPUs of one engine. `kv_bytes`: the size of its KV cache."""

    def __init__(self, engine: Engine, plant: Plant, kv_bytes: int, host: str) -> None:
        self.plant = plant
        self._engine, self._host = engine, host
        self._sensors = Sensors(plant, host)
        self._random = random.Random(0)
        self._used_bytes = WEIGHTS_BYTES + kv_bytes // plant.options.gpus
        self.warmer_celsius = 0.0
        """Degrees added to the air of a first-order plant: cooling that fails."""
        self._at_s = 0.0
        self._running, self._kv_tokens, self._prefilled = 0, 0, 0
        self._rate_tps = self._busy_ratio = 0.0

    def observe(self, now_s: float) -> None:
        """Let time pass up to now, with the work of the last time; then look at the work anew."""
        dt_s = now_s - self._at_s
        if dt_s >= LEAST_STEP_S:
            self._at_s = now_s
            self._warm(dt_s)
        self._running = len(self._engine.running)
        pool, options = self._engine.pool, self._engine.options
        self._kv_tokens = round(pool.usage_ratio * options.num_blocks * options.block_size)

    def _warm(self, dt_s: float) -> None:
        if isinstance(self.plant, FirstOrderPlant):
            self.plant.ambient_celsius = self.plant.options.ambient_celsius + self.warmer_celsius
        kept = math.exp(-dt_s / RATE_S)
        mean_tps = self._rate_tps * RATE_S * (1 - kept) / dt_s
        self.plant.step(dt_s, self._running, self._kv_tokens, mean_tps)
        busy = 1.0 if self._running else 0.0
        self._busy_ratio = busy + (self._busy_ratio - busy) * kept
        done = self._engine.counters.prompt_computed
        self._rate_tps = self._rate_tps * kept + (done - self._prefilled) / RATE_S
        self._prefilled = done

    def exposition(self, now_s: float) -> str:
        """The metrics of dcgm-exporter, of this moment."""
        self.observe(now_s)
        rows = []
        for index, said in enumerate(self._sensors.read(now_s)):
            values = self._values(index, said.celsius, said.memory_celsius)
            rows.append((_labels(index, self._host), values))
        lines = []
        for name, kind, text in _SERIES:
            series = f"DCGM_FI_DEV_{name}"
            lines += [f"# HELP {series} {text}", f"# TYPE {series} {kind}"]
            for labels, values in rows:
                if (value := values[name]) is not None:
                    lines.append(f"{series}{{{labels}}} {value}")
        return "\n".join(lines) + "\n"

    def _values(
        self, index: int, celsius: float | None, memory_celsius: float | None
    ) -> dict[str, str | None]:
        """The metrics of one GPU; degrees are whole, as NVIDIA's are."""
        noise = 1 + self._random.uniform(-WATTS_NOISE_RATIO, WATTS_NOISE_RATIO)
        is_slowed = self.plant.gpu_celsius(index) >= self.plant.options.slowed_celsius
        return {
            "GPU_TEMP": None if celsius is None else str(round(celsius)),
            "MEMORY_TEMP": None if memory_celsius is None else str(round(memory_celsius)),
            "POWER_USAGE": f"{self.plant.gpu_watts(index) * noise:.6f}",
            "GPU_UTIL": str(round(100 * self._busy_ratio)),
            "FB_USED": str(self._used_bytes // _MIB),
            "CLOCKS_EVENT_REASONS": str(_THERMAL if is_slowed else 0),
        }


def plant_options(gpus: int, ambient_celsius: float, hot_gpu: int | None) -> PlantOptions:
    """The plant of an engine with so many GPUs; raises `ValueError` for what cannot be."""
    return PlantOptions(
        gpus=gpus, ambient_celsius=ambient_celsius, hot_gpu=hot_gpu, memory_offset_celsius=8.0
    )


def _labels(index: int, host: str) -> str:
    uuid = f"GPU-00000000-0000-0000-0000-{index:012d}"
    return (
        f'gpu="{index}",UUID="{uuid}",pci_bus_id="00000000:{index + 1:02X}:00.0",'
        f'device="nvidia{index}",modelName="simulated",Hostname="{host}"'
    )
