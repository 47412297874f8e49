"""The heat of an instance's GPUs in the engine model: work in, watts and degrees out. Pure.

A plant is stepped by a clock that is handed in, as the engine is: virtual time and `engine-sim` use
the same one. Its figures are assumptions and stand for no GPU: not hardware validated.

`FirstOrderPlant`: `dT/dt = (P*rth + ambient - T) / tau`, with power linear in the work: `P = idle +
per_sequence*running + per_kv_token*kv + per_prefill_tps*prefill_tps`, at most the board's limit. A
sequence of 4,096 tokens draws the 3.2 W of the founding document, half of it for its KV.
`HarnessPlant`: the founding document's companion harness. Its temperature follows a `pressure` of
request rate, batch and KV, once a second: `T' = .82 T + .18 (ambient + 40.8 pressure - cooling -
relief) + noise`.

What sensors say of a plant can be wrong: noise, readings that are missing, a sensor that repeats
its last word. `GpuReading.at_s` of a frozen sensor stays as well; one that is `stuck` says the same
temperature as if it were new.
"""

import math
import random
from dataclasses import dataclass, field
from typing import Literal, Protocol

from proxy.core.thermal.readings import GpuReading

PlantName = Literal["first-order", "harness"]


@dataclass(frozen=True, slots=True)
class PlantOptions:
    """GPUs of one instance, alike but for `hot_gpu`, which is `hot_celsius` above the others.

    `watts_*` are per GPU: each of a tensor-parallel group draws its part of a sequence's power, so
    that the sum over `gpus` is what the formula says. `slowed_celsius`: the hardware slows itself
    down from there. `memory_offset_celsius`: memory above the chip, None where no sensor says it.
    """

    gpus: int = 1
    ambient_celsius: float = 32.0
    initial_celsius: float | None = None
    rth_celsius_per_watt: float = 0.08
    tau_s: float = 20.0
    watts_idle: float = 120.0
    watts_per_sequence: float = 1.6
    watts_per_kv_token: float = 1.6 / 4096
    watts_per_prefill_tps: float = 0.012
    watts_limit: float = 700.0
    slowed_celsius: float = 92.0
    hot_gpu: int | None = None
    hot_celsius: float = 6.0
    memory_offset_celsius: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no plant can be."""
        if self.gpus < 1:
            raise ValueError(f"gpus must be >= 1, not {self.gpus}")
        if self.tau_s <= 0 or self.rth_celsius_per_watt <= 0:
            raise ValueError("tau_s and rth_celsius_per_watt must be > 0")
        if self.hot_gpu is not None and not 0 <= self.hot_gpu < self.gpus:
            raise ValueError(f"hot_gpu must be 0 to {self.gpus - 1}, not {self.hot_gpu}")


@dataclass(frozen=True, slots=True)
class SensorFaults:
    """Faults of a plant's sensors."""

    noise_celsius: float = 0.0
    """Half of the range of uniform noise."""
    dropout_ratio: float = 0.0
    """Share of the readings that are missing."""
    frozen_from_s: float = math.inf
    """Start of a time without new readings."""
    frozen_until_s: float = math.inf
    """End of that time."""
    stuck_gpu: int | None = None
    """This GPU repeats its temperature of that time with a new time stamp."""
    seed: int = 0


class Plant(Protocol):
    """GPUs of an instance that grow warm from its work."""

    options: PlantOptions

    def step(self, dt_s: float, running: int, kv_tokens: int, prefill_tps: float) -> None:
        """Let time pass with this work."""

    @property
    def celsius(self) -> float:
        """The true temperature of the hottest GPU."""

    @property
    def watts(self) -> float:
        """Watts of all GPUs together."""

    def gpu_celsius(self, gpu: int) -> float:
        """The true temperature of one GPU."""

    def gpu_watts(self, gpu: int) -> float:
        """Watts of one GPU."""


class FirstOrderPlant:
    """Power linear in the work, temperature a first-order lag behind it."""

    def __init__(self, options: PlantOptions | None = None) -> None:
        self.options = options or PlantOptions()
        self.ambient_celsius = self.options.ambient_celsius
        """May be set while the plant runs: cooling that fails."""
        self._watts = self.power_of(0, 0, 0.0)
        initial = self.options.initial_celsius
        self._celsius = self._steady_celsius() if initial is None else initial

    def power_of(self, running: int, kv_tokens: int, prefill_tps: float) -> float:
        """Watts of one GPU for this work."""
        o = self.options
        work = (
            o.watts_per_sequence * running
            + o.watts_per_kv_token * kv_tokens
            + o.watts_per_prefill_tps * prefill_tps
        )
        return min(o.watts_limit, o.watts_idle + work / o.gpus)

    def step(self, dt_s: float, running: int, kv_tokens: int, prefill_tps: float) -> None:
        """Let time pass with this work; exact for any `dt_s`, since the work is constant in it."""
        self._watts = self.power_of(running, kv_tokens, prefill_tps)
        steady = self._steady_celsius()
        self._celsius = steady + (self._celsius - steady) * math.exp(-dt_s / self.options.tau_s)

    def _steady_celsius(self) -> float:
        return self.ambient_celsius + self._watts * self.options.rth_celsius_per_watt

    @property
    def celsius(self) -> float:
        """The true temperature of the hottest GPU."""
        return self._celsius + self._hotter(self.options.hot_gpu)

    @property
    def watts(self) -> float:
        """Watts of all GPUs together."""
        return self._watts * self.options.gpus

    def gpu_celsius(self, gpu: int) -> float:
        """The true temperature of one GPU."""
        return self._celsius + self._hotter(gpu)

    def gpu_watts(self, gpu: int) -> float:
        """Watts of one GPU: all of a group draw alike."""
        return self._watts

    def _hotter(self, gpu: int | None) -> float:
        o = self.options
        return o.hot_celsius if gpu is not None and gpu == o.hot_gpu else 0.0


@dataclass(frozen=True, slots=True)
class HarnessFormula:
    """The constants of the harness's plant, as its configurations have them.

    `requests_per_prefill_tps` is ours: the harness knows its request rate, an engine only what it
    prefills; 1/2000 is a request of 2,000 new tokens. `kv_capacity_tokens` likewise.
    """

    ambient_celsius: float = 32.0
    celsius_per_pressure: float = 1.7 * 24.0
    cooling_celsius: float = 0.4
    relief_celsius: float = 2.0
    inertia_ratio: float = 0.82
    noise_celsius: float = 0.35
    most_pressure: float = 1.6
    full_batch: int = 256
    requests_per_prefill_tps: float = 1 / 2000
    kv_capacity_tokens: int = 393_216


class HarnessPlant:
    """The harness's temperature: it follows a pressure, there are no watts in it.

    `watts` is the founding document's 3.2 W per sequence over an idle draw, so that what reads
    watts has something to read. The temperature does not depend on it.
    """

    def __init__(
        self,
        options: PlantOptions | None = None,
        formula: HarnessFormula | None = None,
        seed: int = 7,
    ) -> None:
        self.options = options or PlantOptions(initial_celsius=72.0)
        self.formula = formula or HarnessFormula()
        self.is_relieved = False
        """Whether KV was moved away in the last seconds."""
        self._random = random.Random(seed)
        initial = self.options.initial_celsius
        self._celsius = 72.0 if initial is None else initial
        self._running = 0

    def pressure_of(self, requests_per_s: float, running: int, kv_ratio: float) -> float:
        """The harness's measure of work."""
        f = self.formula
        pressure = requests_per_s / 10 + running / f.full_batch * 0.55 + kv_ratio * 0.55
        return min(f.most_pressure, pressure)

    def step(self, dt_s: float, running: int, kv_tokens: int, prefill_tps: float) -> None:
        """Let time pass with an engine's work."""
        f = self.formula
        kv_ratio = min(1.0, kv_tokens / f.kv_capacity_tokens)
        self._running = running
        requests_per_s = prefill_tps * f.requests_per_prefill_tps
        self.press(dt_s, self.pressure_of(requests_per_s, running, kv_ratio), running)

    def press(self, dt_s: float, pressure: float, running: int) -> None:
        """Let time pass under a pressure; steps of a second are the harness's own."""
        f = self.formula
        self._running = running
        relief = f.relief_celsius if self.is_relieved else 0.0
        warm = f.ambient_celsius + pressure * f.celsius_per_pressure - f.cooling_celsius - relief
        kept = f.inertia_ratio**dt_s
        noise = self._random.uniform(-f.noise_celsius, f.noise_celsius) * math.sqrt(dt_s)
        self._celsius = kept * self._celsius + (1 - kept) * max(f.ambient_celsius, warm) + noise

    @property
    def celsius(self) -> float:
        """The temperature of the hottest GPU."""
        return self._celsius + (self.options.hot_celsius if self._has_hot() else 0.0)

    @property
    def watts(self) -> float:
        """Watts of all GPUs by the founding document's figure."""
        return self.gpu_watts(0) * self.options.gpus

    def gpu_celsius(self, gpu: int) -> float:
        """The temperature of one GPU."""
        is_hot = self._has_hot() and gpu == self.options.hot_gpu
        return self._celsius + (self.options.hot_celsius if is_hot else 0.0)

    def gpu_watts(self, gpu: int) -> float:
        """Watts of one GPU by that figure."""
        o = self.options
        return min(o.watts_limit, o.watts_idle + 3.2 * self._running / o.gpus)

    def _has_hot(self) -> bool:
        return self.options.hot_gpu is not None


def make_plant(name: PlantName, options: PlantOptions | None = None, seed: int = 7) -> Plant:
    """Make a plant by its name."""
    if name == "harness":
        return HarnessPlant(options, seed=seed)
    return FirstOrderPlant(options)


def clock_ratio(celsius: float, slowed_celsius: float) -> float:
    """Speed of a hot GPU, 1: full.

    From `slowed_celsius` on 6 % less per degree, as the harness has it, and never below 35 %.
    """
    return max(0.35, 1.0 - max(0.0, celsius - slowed_celsius) * 0.06)


@dataclass(slots=True)
class Sensors:
    """Readings of a plant by sensors with faults. `host` names the GPUs."""

    plant: Plant
    host: str = "sim"
    faults: SensorFaults = field(default_factory=SensorFaults)
    _random: random.Random = field(init=False)
    _last: dict[int, GpuReading] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin the sensors' own random numbers."""
        self._random = random.Random(self.faults.seed)

    def read(self, now_s: float) -> list[GpuReading]:
        """One reading per GPU that answers now."""
        said = []
        for gpu in range(self.plant.options.gpus):
            reading = self._read(gpu, now_s)
            if reading is not None:
                said.append(reading)
        return said

    def _read(self, gpu: int, now_s: float) -> GpuReading | None:
        faults, last = self.faults, self._last.get(gpu)
        drawn = self._random.random()
        noise = self._random.uniform(-faults.noise_celsius, faults.noise_celsius)
        if faults.frozen_from_s <= now_s < faults.frozen_until_s and last is not None:
            if faults.stuck_gpu is None:
                return last
            if faults.stuck_gpu == gpu:
                return self._reading(gpu, now_s, last.celsius or 0.0)
        if drawn < faults.dropout_ratio:
            return None
        self._last[gpu] = self._reading(gpu, now_s, self.plant.gpu_celsius(gpu) + noise)
        return self._last[gpu]

    def _reading(self, gpu: int, now_s: float, celsius: float) -> GpuReading:
        o = self.plant.options
        offset = o.memory_offset_celsius
        return GpuReading(
            gpu=f"{self.host}:{gpu}",
            at_s=now_s,
            celsius=celsius,
            memory_celsius=None if offset is None else celsius + offset,
            watts=self.plant.gpu_watts(gpu),
            is_slowed=self.plant.gpu_celsius(gpu) >= o.slowed_celsius,
        )
