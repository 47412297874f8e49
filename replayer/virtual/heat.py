"""Thermal control in virtual time: plants that a run's engines warm, and limits on its router.

The control tick is that of the proxy: work and readings in, limits to the router, which caps,
weighs, prices and lets requests wait in the proxy's own queue. Nothing is evicted here: requests
over a cap end by themselves. Only a simulator shows any of this: not hardware validated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from proxy.core.routing.router import Router
from proxy.core.thermal.fleet_control import FleetControl
from proxy.core.thermal.readings import InstanceWork
from replayer.engine.engine import Engine
from replayer.engine.heat import FirstOrderPlant, Plant, SensorFaults, Sensors

TICK_S = 1.0


def _first_order(name: str) -> Plant:
    del name
    return FirstOrderPlant()


@dataclass(frozen=True, slots=True)
class HeatOptions:
    """Thermal control of a run. `make_control`: of the whole fleet; `make_plant`: by the engine.

    `faults`: what is wrong with every engine's sensors.
    """

    make_control: Callable[[], FleetControl]
    make_plant: Callable[[str], Plant] = _first_order
    faults: SensorFaults = field(default_factory=SensorFaults)


@dataclass(frozen=True, slots=True)
class HeatRow:
    """One engine at one tick. `celsius` is the plant's, not what a sensor says."""

    at_s: float
    name: str
    celsius: float
    running: int
    cap: int | None
    state: str


class VirtualHeat:
    """The plants, sensors and control of one run."""

    def __init__(self, options: HeatOptions, router: Router, engines: Mapping[str, Engine]) -> None:
        self.control = options.make_control()
        self.rows: list[HeatRow] = []
        self._router, self._engines = router, engines
        plants = {name: options.make_plant(name) for name in engines}
        self._sensors = {name: Sensors(plants[name], name, options.faults) for name in engines}
        self._computed = dict.fromkeys(engines, 0)

    def tick(self, now_s: float, waiting: int) -> None:
        """Warm each plant by a second of what its engine does, and limit the engine's instance."""
        for name, engine in self._engines.items():
            sensors = self._sensors[name]
            self._warm(sensors.plant, name, engine)
            if self._router.fleet.get(name) is None:
                continue
            load = self._router.ledger.load(name)
            computed = self._router.latency.of(name).computed_tokens
            work = InstanceWork(
                load.running_requests,
                load.ongoing_tokens,
                self.control.prefill_tps(name, computed, now_s),
                waiting,
            )
            limits = self.control.tick(name, sensors.read(now_s), work, now_s)
            self._router.limit_heat(name, limits)
            state = self.control.state(name)
            row = HeatRow(now_s, name, sensors.plant.celsius, work.running, limits.cap, state)
            self.rows.append(row)

    def _warm(self, plant: Plant, name: str, engine: Engine) -> None:
        """As of the engine's last event: asking for the present would cut its decode runs."""
        done = engine.counters.prompt_computed
        tps, self._computed[name] = (done - self._computed[name]) / TICK_S, done
        kv_tokens = round(engine.pool.usage_ratio * engine.pool.total * engine.options.block_size)
        plant.step(TICK_S, len(engine.running), kv_tokens, tps)
