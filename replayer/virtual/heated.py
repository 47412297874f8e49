"""One engine model whose work warms a plant, under a thermal controller, in virtual time.

Requests come at given times and wait before the engine while the controller's limits say so, as
they wait at the proxy's gate. Every second the plant is stepped with what the engine did, sensors
are read, the controller says its limits and an actuator writes them, or fails. Evicted requests go
to the end of the queue with what they have generated, and compute it again. Hardware that is too
hot slows the engine down.

Only a simulator shows any of this: not hardware validated.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

from proxy.core.thermal.controller import Controller
from proxy.core.thermal.readings import COOL, HeatLimits, InstanceWork
from proxy.core.thermal.victims import Victim, select_victims
from replayer.engine.engine import Engine
from replayer.engine.heat import FirstOrderPlant, Plant, Sensors, clock_ratio
from replayer.engine.types import EngineOptions, Finished, FirstToken, Job, SimRequest

TICK_S = 1.0
"""Sensors are read and limits are made once a second."""


@dataclass(frozen=True, slots=True)
class LoadPhase:
    """From `from_s` on: requests per second, and the air that cools the GPUs."""

    from_s: float
    requests_per_s: float
    ambient_celsius: float | None = None


@dataclass(frozen=True, slots=True)
class HeatedOptions:
    """A run: its length, its load, and when limits cannot be written.

    Lengths of prompts and answers are drawn evenly from half to one and a half of the means.
    """

    seconds: int = 600
    phases: tuple[LoadPhase, ...] = (LoadPhase(0.0, 6.0),)
    prompt_tokens: int = 1500
    output_tokens: int = 300
    seed: int = 0
    engine: EngineOptions = field(default_factory=EngineOptions)
    dead_from_s: float = math.inf
    dead_until_s: float = math.inf
    victims: str = "max_relief"


@dataclass(slots=True)
class HeatedRequest:
    """One request of a run, over all its legs."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None = None
    end_s: float | None = None
    leg: SimRequest | None = None
    delivered_tokens: int = 0
    evictions: int = 0
    evicted_s: float = -math.inf
    began_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HeatedSecond:
    """One second of a run. `celsius` is the plant's, not what a sensor says."""

    at_s: float
    celsius: float
    watts: float
    running: int
    waiting: int
    cap: int | None
    state: str
    generated_tokens: int


@dataclass(slots=True)
class HeatedRun:
    """The results of a run."""

    seconds: list[HeatedSecond]
    requests: list[HeatedRequest]
    evictions: int = 0


def make_load(options: HeatedOptions) -> list[HeatedRequest]:
    """Requests at random times, at each phase's rate."""
    drawn = random.Random(options.seed)
    requests: list[HeatedRequest] = []
    for number, phase in enumerate(options.phases):
        rest = options.phases[number + 1 :]
        end_s = rest[0].from_s if rest else float(options.seconds)
        at_s = phase.from_s
        while phase.requests_per_s > 0.0:
            at_s += drawn.expovariate(phase.requests_per_s)
            if at_s >= end_s:
                break
            sizes = [
                max(2, round(mean * drawn.uniform(0.5, 1.5)))
                for mean in (options.prompt_tokens, options.output_tokens)
            ]
            requests.append(HeatedRequest(at_s, sizes[0], sizes[1]))
    return requests


class HeatedEngine:
    """A run; `controller` None is the baseline, on which nothing is limited."""

    def __init__(
        self, options: HeatedOptions, sensors: Sensors, controller: Controller | None
    ) -> None:
        self.options = options
        self.sensors = sensors
        self.plant: Plant = sensors.plant
        self.controller = controller
        self.limits = COOL
        """The limits last written."""
        self._engine = Engine(options.engine)
        self._engine_s = 0.0
        self._load = deque(make_load(options))
        self._waiting: deque[HeatedRequest] = deque()
        self._live: dict[SimRequest, HeatedRequest] = {}
        self._run = HeatedRun([], list(self._load))
        self._generated = self._computed = 0

    def run(self) -> HeatedRun:
        """Run to the end of its seconds; what has not ended by then has no end."""
        for second in range(self.options.seconds):
            now_s = float(second)
            self._weather(now_s)
            self._serve(now_s, clock_ratio(self.plant.celsius, self.plant.options.slowed_celsius))
            self._tick(now_s + TICK_S)
        return self._run

    def _weather(self, now_s: float) -> None:
        for phase in self.options.phases:
            is_now = phase.from_s <= now_s < phase.from_s + TICK_S
            if is_now and phase.ambient_celsius is not None:
                assert isinstance(self.plant, FirstOrderPlant), "no air in the harness's plant"
                self.plant.ambient_celsius = phase.ambient_celsius

    def _serve(self, now_s: float, ratio: float) -> None:
        """One second of arrivals and engine events; the engine's own clock runs at `ratio`."""
        end_s = now_s + TICK_S
        begin_engine_s = self._engine_s
        while True:
            due_s = now_s + (self._engine.next_event_s() - begin_engine_s) / ratio
            next_s = min(due_s, self._load[0].arrived_s if self._load else math.inf)
            if next_s >= end_s:
                break
            self._engine_s = max(self._engine_s, begin_engine_s + (next_s - now_s) * ratio)
            while self._load and self._load[0].arrived_s <= next_s:
                self._waiting.append(self._load.popleft())
            self._advance(next_s)
            self._admit(next_s)
        self._engine_s = begin_engine_s + TICK_S * ratio
        self._advance(end_s)

    def _advance(self, now_s: float) -> None:
        # Engine time is rounded on its way through the ratio, so an event may be a hair later.
        until_s = self._engine_s
        due_s = self._engine.next_event_s()
        if until_s < due_s < until_s + 1e-9:
            self._engine_s = until_s = due_s
        for event in self._engine.advance(until_s):
            if not isinstance(event, FirstToken | Finished):
                continue
            request = self._live.get(event.request)
            if request is None:
                continue
            if isinstance(event, FirstToken):
                if request.ttft_s is None:
                    request.ttft_s = now_s - request.arrived_s
            else:
                del self._live[event.request]
                request.leg, request.end_s = None, now_s

    def _admit(self, now_s: float) -> None:
        while self._waiting and self.limits.admits(len(self._live)):
            request = self._waiting.popleft()
            done = request.delivered_tokens
            job = Job(
                request_id=str(id(request)),
                prompt_tokens=request.prompt_tokens + done,
                block_hashes=(),
                output_tokens=request.output_tokens - done,
            )
            request.leg = self._engine.submit(job, self._engine_s)
            request.began_s = now_s
            self._live[request.leg] = request

    def _tick(self, now_s: float) -> None:
        work = self._work()
        self.plant.step(TICK_S, work.running, work.kv_tokens, work.prefill_tps)
        if self.controller is not None:
            wanted = self.controller.tick(self.sensors.read(now_s), work, now_s)
            self._write(self.controller, wanted, now_s)
        self._admit(now_s)
        counted = self._engine.counters.generated
        self._run.seconds.append(
            HeatedSecond(
                now_s,
                self.plant.celsius,
                self.plant.watts,
                len(self._live),
                len(self._waiting),
                self.limits.cap,
                "" if self.controller is None else self.controller.state.value,
                counted - self._generated,
            )
        )
        self._generated = counted

    def _work(self) -> InstanceWork:
        computed = self._engine.counters.prompt_computed
        prefill_tps = (computed - self._computed) / TICK_S
        self._computed = computed
        kv_tokens = sum([leg.computed_tokens for leg in self._live])
        return InstanceWork(len(self._live), kv_tokens, prefill_tps, len(self._waiting))

    def _write(self, controller: Controller, wanted: HeatLimits, now_s: float) -> None:
        if not controller.is_due:
            return
        if self.options.dead_from_s <= now_s < self.options.dead_until_s:
            controller.actuator_failed(now_s)
            return
        controller.actuator_worked()
        self.limits = wanted
        if wanted.evict:
            self._evict(wanted.evict, now_s)

    def _evict(self, most: int, now_s: float) -> None:
        by_id = {leg.job.request_id: request for leg, request in self._live.items()}
        rows = [_row(leg, request) for leg, request in self._live.items()]
        for victim in select_victims(self.options.victims, rows, most, now_s):
            request = by_id[victim.request_id]
            leg = request.leg
            assert leg is not None
            request.delivered_tokens += leg.output_tokens
            request.leg = None
            request.evictions += 1
            request.evicted_s = now_s
            del self._live[leg]
            self._engine.abort(leg, self._engine_s)
            self._waiting.append(request)
            self._run.evictions += 1


def _row(leg: SimRequest, request: HeatedRequest) -> Victim:
    left = leg.job.output_tokens - leg.output_tokens
    return Victim(
        leg.job.request_id,
        kv_tokens=leg.computed_tokens,
        remaining_tokens=left,
        is_movable=leg.output_tokens > 0 and left > 1,
        moves=request.evictions,
        moved_s=request.evicted_s,
        arrived_s=request.began_s,
    )


def seconds_above(run: HeatedRun, limit_celsius: float) -> int:
    """Seconds of a run that ended at the limit or above it."""
    return sum([second.celsius >= limit_celsius for second in run.seconds])


def peak_celsius(run: HeatedRun) -> float:
    """The highest temperature of a run."""
    return max([second.celsius for second in run.seconds])


def throughput_tps(run: HeatedRun) -> float:
    """Generated tokens per second over the whole run."""
    return sum([second.generated_tokens for second in run.seconds]) / len(run.seconds)
