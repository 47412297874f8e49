"""Scenarios of thermal control: a load, a plant, and faults (SCENARIOS).

Two minutes of a load that the instance serves coolly, then more than its cooling stands. Only a
simulator shows any of this: not hardware validated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from analysis.measures import percentile
from proxy.core.thermal.controller import Controller
from proxy.core.thermal.options import ThermalOptions
from replayer.engine.heat import FirstOrderPlant, PlantOptions, SensorFaults, Sensors
from replayer.engine.types import EngineOptions
from replayer.virtual.heated import (
    HeatedEngine,
    HeatedOptions,
    HeatedRun,
    HeatedSecond,
    LoadPhase,
    peak_celsius,
    seconds_above,
    throughput_tps,
)

SETTLED_CELSIUS = 1.5
"""The temperature is settled while its mean over MEAN_S is within so much of the target."""
MEAN_S = 15
COOL_S = 120.0
_COOL = LoadPhase(0.0, 1.5)
_HOT = LoadPhase(COOL_S, 4.8)
_ONE = PlantOptions(ambient_celsius=38.0)
_EIGHT = PlantOptions(
    ambient_celsius=34.0,
    gpus=8,
    hot_gpu=3,
    hot_celsius=5.0,
    watts_per_sequence=8 * _ONE.watts_per_sequence,
    watts_per_kv_token=8 * _ONE.watts_per_kv_token,
    watts_per_prefill_tps=8 * _ONE.watts_per_prefill_tps,
)
"""A group of eight that draws eight times as much together, and one of them is badly cooled."""
_HUNGRY = PlantOptions(
    ambient_celsius=42.0,
    watts_per_sequence=2 * _ONE.watts_per_sequence,
    watts_per_kv_token=2 * _ONE.watts_per_kv_token,
)
"""Two times the founding document's watts per sequence, so that 150 of them draw 700 W."""
_NOISE = 0.5
_FAULTS = SensorFaults(noise_celsius=_NOISE)
_ENGINE = EngineOptions(block_size=128, num_blocks=3072)
"""The usual KV in larger blocks, which are eight times less to count."""
_LOAD = HeatedOptions(phases=(_COOL, _HOT), prompt_tokens=800, output_tokens=1500, engine=_ENGINE)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`what` is one line; `settles_from_s`: from then on the temperature has to be settled."""

    what: str
    load: HeatedOptions = _LOAD
    plant: PlantOptions = _ONE
    faults: SensorFaults = _FAULTS
    settles_from_s: float = 300.0


SCENARIOS: dict[str, Scenario] = {
    "quiet": Scenario("sensors without any fault", faults=SensorFaults()),
    "noise": Scenario("noise of +-1 degree", faults=SensorFaults(noise_celsius=1.0)),
    "dropouts": Scenario(
        "three of ten readings are missing", faults=SensorFaults(_NOISE, dropout_ratio=0.3)
    ),
    "air": Scenario(
        "the air grows 6 degrees warmer after five minutes",
        replace(_LOAD, phases=(_COOL, _HOT, LoadPhase(300.0, 4.8, 44.0))),
        settles_from_s=450.0,
    ),
    "dead-actuator": Scenario(
        "for 80 seconds no limit can be written",
        replace(_LOAD, dead_from_s=140.0, dead_until_s=220.0),
        settles_from_s=400.0,
    ),
    "hot-gpu": Scenario("one of eight GPUs is 5 degrees hotter", plant=_EIGHT),
    "frozen": Scenario(
        "sensors say nothing new for a minute",
        faults=SensorFaults(_NOISE, frozen_from_s=240.0, frozen_until_s=300.0),
        settles_from_s=450.0,
    ),
    "stuck": Scenario(
        "the sensor of the hot one of eight says an old temperature as if it were new",
        plant=_EIGHT,
        faults=SensorFaults(_NOISE, frozen_from_s=125.0, frozen_until_s=300.0, stuck_gpu=3),
        settles_from_s=450.0,
    ),
    "slow": Scenario(
        "the plant is four times slower than the law assumes",
        plant=replace(_ONE, tau_s=80.0),
        settles_from_s=450.0,
    ),
    "soak": Scenario(
        "without control every GPU draws its limit of 700 W",
        plant=_HUNGRY,
        settles_from_s=320.0,
    ),
    "cool": Scenario(
        "a load that the cooling stands: nothing may be limited",
        replace(_LOAD, phases=(_COOL,)),
        settles_from_s=1e9,
    ),
}
"""Each by its name."""


@dataclass(slots=True)
class Tried:
    """One run of a scenario, and the controller of it; None is the baseline."""

    run: HeatedRun
    controller: Controller | None
    figures: dict[str, Any] = field(default_factory=dict)


def try_scenario(
    scenario: Scenario, thermal: ThermalOptions | None, seed: int, seconds: int = 600
) -> Tried:
    """Run a scenario, with a controller where options are given."""
    controller = None if thermal is None else Controller(thermal)
    load = replace(scenario.load, seed=seed, seconds=seconds)
    sensors = Sensors(FirstOrderPlant(scenario.plant), faults=replace(scenario.faults, seed=seed))
    tried = Tried(HeatedEngine(load, sensors, controller).run(), controller)
    options = thermal or ThermalOptions()
    tried.figures = figures(tried, options, scenario.settles_from_s)
    return tried


def figures(tried: Tried, options: ThermalOptions, settles_from_s: float) -> dict[str, Any]:
    """The printed values of a run; seconds and degrees."""
    run, controller = tried.run, tried.controller
    target = options.target_celsius
    ok = [one for one in run.requests if one.end_s is not None]
    seconds_all = float(len(run.seconds))
    late = [one.ttft_s for one in run.requests if one.ttft_s is not None]
    # What has no first token by the end has waited at least that long.
    late += [seconds_all - one.arrived_s for one in run.requests if one.ttft_s is None]
    late.sort()
    return {
        "law": "none" if controller is None else options.law,
        "peak_celsius": peak_celsius(run),
        "above_s": seconds_above(run, target + SETTLED_CELSIUS),
        "settled_ratio": settled_ratio(run.seconds, target, settles_from_s),
        "overshoots": overshoots(run.seconds, target),
        "directions": 0 if controller is None else controller.oscillations,
        "throughput_tps": throughput_tps(run),
        "ttft_p50_s": percentile(late, 50) if late else math.inf,
        "ttft_p99_s": percentile(late, 99) if late else math.inf,
        "ended": len(ok),
        "requests": len(run.requests),
        "evictions": run.evictions,
        "watts_per_seq": None if controller is None else controller.watts_per_seq,
        "watts_per_seq_spread": None if controller is None else controller.watts_per_seq_spread,
    }


def means(seconds: Sequence[HeatedSecond]) -> list[tuple[float, float]]:
    """Mean temperature of each MEAN_S, with the time at which it ends."""
    found = []
    for number in range(MEAN_S, len(seconds) + 1):
        window = seconds[number - MEAN_S : number]
        found.append((window[-1].at_s, sum([one.celsius for one in window]) / MEAN_S))
    return found


def settled_ratio(
    seconds: Sequence[HeatedSecond], target_celsius: float, from_s: float
) -> float | None:
    """Part of the time from `from_s` on in which the temperature was settled; None without any."""
    late = [celsius for at_s, celsius in means(seconds) if at_s >= from_s]
    if not late:
        return None
    return sum([abs(celsius - target_celsius) <= SETTLED_CELSIUS for celsius in late]) / len(late)


def overshoots(seconds: Sequence[HeatedSecond], target_celsius: float) -> int:
    """Number of rises of the temperature from below the target to above the settled range."""
    count, is_over = 0, False
    for _at_s, celsius in means(seconds):
        if celsius > target_celsius + SETTLED_CELSIUS:
            count += not is_over
            is_over = True
        elif celsius <= target_celsius:
            is_over = False
    return count
