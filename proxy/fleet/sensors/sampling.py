"""Asks the sensors of every instance, one task per sensor, and keeps what they say."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping

from proxy.config.in_force import OptionsInForce
from proxy.config.sensors import SensorAt
from proxy.config.values import InstanceSpec
from proxy.fleet.instances import Instances
from proxy.fleet.sensors.base import MakesSensor, Sensor, SensorError
from proxy.fleet.sensors.readings import SHOWN_S, GpuReadings
from proxy.protocol.errors import DEFECTS
from proxy.telemetry.log import Throttle

LOOK_S = 0.5
"""How often the instances are compared with those whose sensors are asked."""
LEAST_PAUSE_S = 0.05
"""Pause behind an answer that took longer than the interval."""
_OLD = f"its figures are those of {SHOWN_S:g} s ago or more, to the last digit"
_log = logging.getLogger(__name__)


class Sampling:
    """The sensors of all instances, into `GpuReadings`; `kinds`: SENSORS."""

    def __init__(
        self,
        instances: Instances,
        options: OptionsInForce,
        readings: GpuReadings,
        kinds: Mapping[str, MakesSensor],
    ) -> None:
        self._instances, self._options = instances, options
        self._readings, self._kinds = readings, kinds
        self._throttle = Throttle()

    async def run(self) -> None:
        """Ask the sensors of every instance from its arrival until it leaves, until cancelled."""
        tasks: dict[str, tuple[InstanceSpec, asyncio.Task[None]]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                there = {n: spec for n, spec in self._instances.specs.items() if spec.sensors}
                for name, (spec, task) in list(tasks.items()):
                    if there.get(name) is not spec:
                        task.cancel()
                        self._readings.forget(name)
                        del tasks[name]
                for name in there.keys() - tasks.keys():
                    task = group.create_task(self._follow(there[name]), name=f"sensors {name}")
                    tasks[name] = there[name], task
                await asyncio.sleep(LOOK_S)

    async def _follow(self, spec: InstanceSpec) -> None:
        """Ask all sensors of one instance, each at its own pace, until cancelled."""
        options, connect_s = self._instances.connect_options, self._options.settings.connect_timeout
        named = {n: at.host for at in spec.sensors for g in spec.gpus for n in g.names(at.host)}
        self._readings.watch(spec.name, named, self._instances.clock.now_s())
        hosts = Counter(at.host for at in spec.sensors)
        sensors = [(at, self._kinds[at.kind](at, options, connect_s)) for at in spec.sensors]
        try:
            async with asyncio.TaskGroup() as group:
                for at, sensor in sensors:
                    # Of several sensors of one host each may tell a part of its GPUs.
                    is_alone = hosts[at.host] == 1
                    own = {gpu for gpu, host in named.items() if host == at.host and is_alone}
                    group.create_task(self._ask(spec.name, at, sensor, own))
        finally:
            for _, sensor in sensors:
                await sensor.close()

    async def _ask(self, name: str, at: SensorAt, sensor: Sensor, own: Collection[str]) -> None:
        """Ask one sensor at the interval in force; `own`: the GPUs that it has to tell."""
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            self._tell(name, at, await self._read(name, sensor, own))
            interval_s = min(self._options.settings.sensor_interval, self._readings.needed_every_s)
            await asyncio.sleep(max(LEAST_PAUSE_S, began_s + interval_s - loop.time()))

    async def _read(self, name: str, sensor: Sensor, own: Collection[str]) -> str | None:
        """Take in what a sensor says now; returns what is wrong with it."""
        now_s = self._instances.clock.now_s()
        try:
            found = await sensor.read(now_s)
        except SensorError as error:
            return str(error)
        except DEFECTS:  # no answer of a sensor may end the periodic tasks
            if self._throttle.turn(name, now_s) is not None:
                _log.exception("instance %s: a sensor's answer could not be read", name)
            return "its answer could not be read"
        if name not in self._instances.specs:
            return None  # it was removed meanwhile
        is_idle = self._instances.router.ledger.load(name).is_idle
        self._readings.observe(name, found, is_idle=is_idle)
        gpus = {reading.gpu for reading in found}
        if lacking := sorted(set(own) - gpus):
            return f"it does not tell of GPU {', '.join(lacking)}"
        kept = [r for r in self._readings.of(name) if r.gpu in gpus]
        return _OLD if any(now_s - r.at_s >= SHOWN_S for r in kept) else None

    def _tell(self, name: str, at: SensorAt, fault: str | None) -> None:
        """Log and show what is wrong with a sensor, once, or that it is in order again."""
        # Without the query, which may have a token in it: /health shows this to everybody.
        topic = f"sensor {at.kind} {at.url or ''}{at.path.partition('?')[0]}"
        told = self._instances.warnings.get(name, {}).get(topic)
        if fault is None:
            if told is not None:
                self._instances.warn(name, topic, None)
            return
        text = f"{topic}: {fault}"
        now_s = self._instances.clock.now_s()
        if told != text and self._throttle.turn((name, topic), now_s) is not None:
            self._instances.warn(name, topic, text)
