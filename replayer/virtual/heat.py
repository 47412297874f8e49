"""Thermal control in virtual time: plants that a run's engines warm, and limits on its router.

The control tick is the proxy's own: work and readings in, limits to the router. The router caps,
weighs, prices and queues requests as in the proxy. Evicted streams migrate if `--migration-limit`
allows it. Only a simulator shows any of this: not hardware validated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from proxy.core.routing.evictions import Evictions, Running
from proxy.core.routing.router import Router
from proxy.core.thermal.readings import InstanceWork
from replayer.engine.engine import Engine
from replayer.engine.heat import Plant, Sensors
from replayer.virtual.requests import HeatOptions

TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class HeatRow:
    """One engine at one tick. `celsius` is the plant's, not what a sensor says."""

    at_s: float
    name: str
    celsius: float
    running: int
    cap: int | None
    state: str


class Streams(Protocol):
    """The requests of a run, as far as its heat concerns them."""

    def running_on(self, name: str, now_s: float) -> list[Running]:
        """The requests that an engine works on."""

    def leave_hot(self, request_id: str, now_s: float) -> None:
        """Migrate a stream if it can."""


class VirtualHeat:
    """The plants, sensors and control of one run; `engines`: those that live, by name."""

    def __init__(self, options: HeatOptions, router: Router, engines: Mapping[str, Engine]) -> None:
        self.control = options.make_control()
        self._evictions = Evictions(router, self.control)
        self.rows: list[HeatRow] = []
        self._known, self._engines = router.known, engines
        plants = {name: options.make_plant(name) for name in engines}
        self._sensors = {name: Sensors(plants[name], name, options.faults) for name in engines}
        self._computed: dict[str, tuple[Engine | None, int]] = {}

    def tick(self, now_s: float, waiting: int, streams: Streams) -> None:
        """Warm each plant by a second of what its engine does, and limit the engine's instance."""
        for name, sensors in self._sensors.items():
            self._warm(sensors.plant, name)
            if self._known.fleet.get(name) is None:
                continue
            load = self._known.ledger.load(name)
            computed = self._known.latency.of(name).computed_tokens
            work = InstanceWork(
                load.running_requests,
                load.ongoing_tokens,
                self.control.prefill_tps(name, computed, now_s),
                waiting,
            )
            limits = self.control.tick(name, sensors.read(now_s), work, now_s)
            self._known.limit_heat(name, limits)
            state = self.control.state(name)
            row = HeatRow(now_s, name, sensors.plant.celsius, work.running, limits.cap, state)
            self.rows.append(row)
            wanted = self._evictions.wanted(name, limits, now_s)
            if wanted.most:
                running = streams.running_on(name, now_s)
                for one in self._evictions.plan(name, running, wanted, now_s):
                    if self._evictions.take(one, now_s):
                        streams.leave_hot(one.victim.request_id, now_s)

    def _warm(self, plant: Plant, name: str) -> None:
        """The state at the engine's last event: the present state would cut its decode runs."""
        engine = self._engines.get(name)
        if engine is None:
            plant.step(TICK_S, 0, 0, 0.0)
            return
        done = engine.counters.prompt_computed
        counted, before = self._computed.get(name, (None, 0))
        self._computed[name] = (engine, done)
        tps = (done - (before if counted is engine else 0)) / TICK_S
        kv_tokens = round(engine.pool.usage_ratio * engine.pool.total * engine.options.block_size)
        plant.step(TICK_S, len(engine.running), kv_tokens, tps)
