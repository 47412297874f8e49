"""Reads each sensor of the instances in its own task, and stores the readings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from proxy.config.in_force import OptionsInForce
from proxy.config.sensors import SensorAt
from proxy.config.values import InstanceSpec
from proxy.core.thermal.headroom import MOST_GPUS
from proxy.core.thermal.readings import GpuReading
from proxy.fleet.instances import Instances
from proxy.fleet.sensors.base import MakesSensor, Sensor, SensorError
from proxy.fleet.sensors.readings import SHOWN_S, GpuReadings
from proxy.protocol.errors import DEFECTS
from proxy.telemetry.log import Throttle

LOOK_S = 0.5
"""Interval of comparing the instances with those whose sensors are read."""
LEAST_PAUSE_S = 0.05
"""Pause behind an answer that took longer than the interval."""
_OLD = f"its readings have been the same, to the last digit, for {SHOWN_S:g} s"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A sensor's readings, or its fault."""

    readings: tuple[GpuReading, ...]
    fault: str | None = None


class Sampling:
    """The sensors of all instances, into `GpuReadings`; `kinds`: SENSORS.

    A sensor that several instances name, such as the exporter of a host with an instance per GPU,
    is asked once for all of them.
    """

    def __init__(
        self,
        instances: Instances,
        options: OptionsInForce,
        readings: GpuReadings,
        kinds: Mapping[str, MakesSensor],
    ) -> None:
        self._instances, self._options = instances, options
        self._readings, self._kinds = readings, kinds
        self._specs: dict[str, InstanceSpec] = {}
        """The instances that have sensors, as they were when their readings began."""
        self._said: dict[SensorAt, _Answer] = {}
        """The last answer of each sensor that is asked."""
        self._throttle = Throttle()

    async def run(self) -> None:
        """Read each sensor while an instance names it, until cancelled."""
        tasks: dict[SensorAt, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._compare()
                wanted = {at for spec in self._specs.values() for at in spec.sensors}
                for at in tasks.keys() - wanted:
                    tasks.pop(at).cancel()
                    self._said.pop(at, None)
                for at in wanted - tasks.keys():
                    tasks[at] = group.create_task(self._ask(at), name=f"sensor {at.kind}")
                await asyncio.sleep(LOOK_S)

    def _compare(self) -> None:
        """Begin and end the readings of the instances that came, left, or have other sensors."""
        there = {name: spec for name, spec in self._instances.specs.items() if spec.sensors}
        for name, spec in list(self._specs.items()):
            if there.get(name) is not spec:
                del self._specs[name]
                self._readings.forget(name)
                for at in spec.sensors:
                    self._tell(name, at, None)
        for name in there.keys() - self._specs.keys():
            spec = self._specs[name] = there[name]
            named = (n for at in spec.sensors for n in _names(spec, at))
            self._readings.watch(name, named, self._instances.clock.now_s())
            for at in spec.sensors:
                if (answer := self._said.get(at)) is not None:
                    self._note(spec, at, answer)

    async def _ask(self, at: SensorAt) -> None:
        """Read one sensor at its interval, for every instance that names it."""
        options, connect_s = self._instances.connect_options, self._options.settings.connect_timeout
        sensor, loop = self._kinds[at.kind](at, options, connect_s), asyncio.get_running_loop()
        try:
            while True:
                began_s = loop.time()
                answer = self._said[at] = await self._read(at, sensor)
                for spec in list(self._specs.values()):
                    if at in spec.sensors:
                        self._note(spec, at, answer)
                every_s = min(self._options.settings.sensor_interval, self._readings.needed_every_s)
                await asyncio.sleep(max(LEAST_PAUSE_S, began_s + every_s - loop.time()))
        finally:
            await sensor.close()

    async def _read(self, at: SensorAt, sensor: Sensor) -> _Answer:
        """A sensor's readings now, or its fault."""
        now_s = self._instances.clock.now_s()
        try:
            return _Answer(tuple(await sensor.read(now_s)))
        except SensorError as error:
            return _Answer((), str(error))
        except (
            *DEFECTS,
            OSError,
            RuntimeError,
        ):  # no answer of a sensor may end the periodic tasks
            if self._throttle.turn(at, now_s) is not None:
                _log.exception("sensor %s of %s: its answer could not be read", at.kind, at.host)
            return _Answer((), "its answer could not be read")

    def _note(self, spec: InstanceSpec, at: SensorAt, answer: _Answer) -> None:
        """Take in what a sensor said of one instance's GPUs."""
        if spec.name not in self._instances.specs:
            return  # it was removed meanwhile
        if answer.fault is not None:
            self._tell(spec.name, at, answer.fault)
            return
        is_idle = self._instances.known.ledger.load(spec.name).is_idle
        self._readings.observe(spec.name, answer.readings, is_idle=is_idle)
        self._tell(spec.name, at, self._lack(spec, at, {r.gpu for r in answer.readings}))

    def _lack(self, spec: InstanceSpec, at: SensorAt, told: Collection[str]) -> str | None:
        """The fault of an answer on these GPUs."""
        if not spec.gpus and len(told) > MOST_GPUS:
            return f"it tells {len(told)} GPUs, and {MOST_GPUS} are taken"
        # Of several sensors of one host each may tell a part of its GPUs.
        is_alone = sum(other.host == at.host for other in spec.sensors) == 1
        if is_alone and (lacking := [name for name in _names(spec, at) if name not in told]):
            return f"it does not report GPU {', '.join(lacking)}"
        now_s = self._instances.clock.now_s()
        kept = [reading for reading in self._readings.of(spec.name) if reading.gpu in told]
        return _OLD if any(now_s - reading.at_s >= SHOWN_S for reading in kept) else None

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


def _names(spec: InstanceSpec, at: SensorAt) -> list[str]:
    """The GPUs that an entry names on the host of one of its sensors."""
    return [name for gpus in spec.gpus for name in gpus.names(at.host)]
