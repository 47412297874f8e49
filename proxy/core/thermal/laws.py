"""The laws of the cap: most requests of a hot instance.

A law says what cap it wants; `controller` decides when a change is made. `p` is the founding
document's reference, `power` the default. An operator's own policy is a class with the founding
document's methods (`OperatorPolicy`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proxy.core.thermal.options import ThermalOptions
from proxy.core.thermal.policy import OperatorPolicy, Scheduler, SchedulerConfig
from proxy.core.thermal.power import Observer, PowerLine, Resistance, Smoothed, sequences_of
from proxy.core.thermal.readings import GpuReading, InstanceWork

BELOW_TARGET_CELSIUS = 0.25
"""The temperature that is held lies so far below the target, at which throttling begins."""
TOO_HOT_CELSIUS, TOO_COOL_CELSIUS = 0.75, -1.25
"""No change for an error between these: sensors say whole degrees, and prompts come in bursts."""
NOISE_CELSIUS = 1.0
"""A temperature that would rise by less until the look-ahead may be a sensor's noise."""
FALLING_PER_S = 0.1
"""A temperature that falls faster ends below where it is."""
GAIN = 0.6
"""Part of the predicted error that one change removes; the model is never exact."""
MORE_GAIN, MOST_GAIN = 1.5, 3.0
"""Each further change in the same direction is so many times larger, up to this: what was changed
before had less effect than predicted."""
MOST_RAISE_RATIO, LEAST_RAISE_PART = 0.25, 8
"""A cap grows by a quarter at once at most, or by an eighth of `max_running`."""
AIMD_CUT_RATIO = 0.5
AIMD_RAISE_RATIO = 0.05
"""aimd: half of the cap, or a twentieth more. Doubling, as in the harness, is what oscillates."""


@dataclass(frozen=True, slots=True)
class LawView:
    """Inputs of a law at a tick."""

    now_s: float
    excess_celsius: float
    """Degrees above the target, smoothed."""
    lookahead_celsius: float
    """The predicted excess."""
    slope: float
    """Degrees per second."""
    work: InstanceWork
    watts: float | None
    gpus: int
    cap: int
    """Cap in force, `max_running` without one."""
    since_s: float
    """Time since its last change."""


class Law:
    """Holds the cap as it is; the laws override both methods."""

    def __init__(self, options: ThermalOptions) -> None:
        self.options = options

    def observe(self, view: LawView) -> None:
        """Learn from a tick with fresh readings, whatever the state is."""

    def wanted(self, view: LawView) -> int:
        """The cap that is wanted, of `min_cap` to `max_running`."""
        return view.cap

    def restart(self) -> None:
        """Readings come again after a gap."""

    def within(self, cap: float) -> int:
        """A cap within the bounds."""
        options = self.options
        return int(min(max(cap, options.min_cap), options.max_running))


class ProportionalLaw(Law):
    """`p`: max(1, max - int(k_p * err)), as in the founding document; no look-ahead."""

    def wanted(self, view: LawView) -> int:
        """At 0.5 a degree costs half a request, whatever the batch is."""
        options = self.options
        if view.excess_celsius <= 0.0:
            return options.max_running
        return self.within(max(1, options.max_running - int(options.k_p * view.excess_celsius)))


class AimdLaw(Law):
    """`aimd`: half while hot, a twentieth more while there is headroom."""

    def wanted(self, view: LawView) -> int:
        """Halved below what runs, so that a cap far above it takes effect at once."""
        if view.lookahead_celsius >= 0.0:
            runs = min(view.cap, max(view.work.running, self.options.min_cap))
            return self.within(math.floor(runs * AIMD_CUT_RATIO))
        if view.lookahead_celsius < TOO_COOL_CELSIUS:
            return self.within(view.cap + max(1, math.floor(view.cap * AIMD_RAISE_RATIO)))
        return view.cap


class PiLaw(Law):
    """`pi`: steps of k_p times the error's change and k_i times its time.

    As each step begins at the cap in force, which is within its bounds, nothing winds up.
    """

    def __init__(self, options: ThermalOptions) -> None:
        super().__init__(options)
        self._last: float | None = None
        self._changed_s = math.nan
        self._area = 0.0
        self._at_s: float | None = None

    def observe(self, view: LawView) -> None:
        """Add up the error since the last change of the cap."""
        error = view.lookahead_celsius + BELOW_TARGET_CELSIUS
        changed_s = view.now_s - view.since_s
        if self._last is None or changed_s != self._changed_s:
            self._changed_s, self._last, self._area = changed_s, error, 0.0
        elif self._at_s is not None:
            self._area += error * (view.now_s - self._at_s)
        self._at_s = view.now_s

    def wanted(self, view: LawView) -> int:
        """Begin at what runs where the cap does not bind and the instance is too hot."""
        error = view.lookahead_celsius + BELOW_TARGET_CELSIUS
        if TOO_COOL_CELSIUS < error < TOO_HOT_CELSIUS:
            return view.cap
        options = self.options
        before = error if self._last is None else self._last
        less = options.pi_k_p * (error - before) + options.pi_k_i * self._area
        if view.cap >= options.max_running:
            less = options.pi_k_p * error
        runs = min(view.cap, view.work.running)
        if error > 0.0:
            return min(view.cap, self.within(math.ceil(runs - max(1.0, less))))
        return max(view.cap, self.within(math.floor(view.cap - min(-1.0, less))))

    def restart(self) -> None:
        """Reset the sum: it belongs to the time before."""
        self._last, self._area, self._at_s = None, 0.0, None


class PowerLaw(Law):
    """`power`: how many requests fit the power at which the temperature would end at the target."""

    def __init__(self, options: ThermalOptions) -> None:
        super().__init__(options)
        self.line = PowerLine(options.watts_per_sequence)
        self.resistance: Resistance | None = None
        self._observer = Observer(options.tau_s)
        self._now = Smoothed()
        self._cap: int | None = None
        self._alike = 0
        """Changes of the cap in one direction since the error was last small; cuts are negative."""

    def observe(self, view: LawView) -> None:
        """Learn watts of the work, degrees of the watts, and where the temperature is going."""
        work = view.work
        # What is in flight beyond that waits in the engine, and draws nothing.
        running = min(work.running, self.options.max_running)
        if view.watts is not None:
            self.line.observe(running, work.kv_tokens, work.prefill_tps, view.watts)
            watts = view.watts
        else:
            watts = self.line.watts(running, work.kv_tokens, work.prefill_tps)
        if self.resistance is None:
            # A group's GPUs share its power.
            begin = self.options.rth_celsius_per_watt / max(1, view.gpus)
            self.resistance = Resistance(begin, self.options.tau_s)
        self._now.observe(view.now_s, running, work.kv_tokens, work.prefill_tps, watts)
        rth = self.resistance.celsius_per_watt
        self._observer.observe(view.now_s, view.excess_celsius, rth * self._now.watts)
        self.resistance.observe(view.now_s, self._now.watts, view.excess_celsius)
        before, self._cap = self._cap, view.cap
        if before is not None and view.cap != before:
            direction = 1 if view.cap > before else -1
            self._alike = direction + (self._alike if self._alike * direction > 0 else 0)
        if TOO_COOL_CELSIUS < self._error(view) < TOO_HOT_CELSIUS:
            self._alike = 0

    def _error(self, view: LawView) -> float:
        """Degrees by which the temperature would end above what is held."""
        steady = self._observer.steady(self.celsius_per_watt * self._now.watts)
        if view.slope > -FALLING_PER_S:
            # It does not end below where it is, or is going, whatever the observer knows by now.
            part = min(1.0, self.options.tau_s / max(self.options.lead_s, 1.0))
            rise = view.lookahead_celsius - view.excess_celsius - NOISE_CELSIUS
            steady = max(steady, view.excess_celsius + part * max(0.0, rise))
        else:
            steady = min(steady, view.excess_celsius)
        return steady + BELOW_TARGET_CELSIUS

    def _gain(self, error: float, view: LawView) -> float:
        """Larger after changes that were not enough, where they have taken effect."""
        more = self._alike if error < 0.0 else -self._alike
        if more < 1 or view.work.running > view.cap:
            return GAIN
        return min(MOST_GAIN, GAIN * MORE_GAIN**more)

    def wanted(self, view: LawView) -> int:
        """The cap that would remove the predicted error, in sequences."""
        now, error = self._now, self._error(view)
        if self.resistance is None or TOO_COOL_CELSIUS < error < TOO_HOT_CELSIUS:
            return view.cap
        change_watts = self._gain(error, view) * error / self.celsius_per_watt
        fits = now.running - sequences_of(change_watts, self.watts_per_seq)
        if error > 0.0:
            return min(view.cap, self.within(math.floor(fits)))
        slow = max(1, self.options.max_running // LEAST_RAISE_PART)
        most = view.cap + max(slow, int(MOST_RAISE_RATIO * view.cap))
        return max(view.cap, self.within(math.floor(min(fits, most))))

    def restart(self) -> None:
        """Keep the watts; moments before the gap do not pair with moments after it."""
        if self.resistance is not None:
            self.resistance.restart()

    @property
    def celsius_per_watt(self) -> float:
        """Degrees of one watt more, as learned."""
        begin = self.options.rth_celsius_per_watt
        return begin if self.resistance is None else self.resistance.celsius_per_watt

    @property
    def watts_per_seq(self) -> float:
        """Watts of one more sequence like those that run."""
        return self.line.of_sequence(self._now.mean_kv_tokens)

    @property
    def watts_per_seq_spread(self) -> float:
        """Standard deviation of `watts_per_seq`."""
        return self.line.spread_watts

    def watts_of(self, kv_tokens: Sequence[int]) -> float:
        """Watts of sequences that hold so many tokens."""
        return math.fsum([self.line.of_sequence(tokens) for tokens in kv_tokens])


LAWS: dict[str, Callable[[ThermalOptions], Law]] = {
    "p": ProportionalLaw,
    "aimd": AimdLaw,
    "pi": PiLaw,
    "power": PowerLaw,
}
"""Each law by the name that the option `law` has."""


class OperatorLaw(Law):
    """A law that asks an operator's policy."""

    def __init__(self, options: ThermalOptions, policy: OperatorPolicy) -> None:
        super().__init__(options)
        self.policy = policy

    def read(self, readings: Sequence[GpuReading]) -> None:
        """Tell the policy of new readings; a GPU without a number at its end is number 0."""
        for reading in readings:
            if reading.celsius is not None:
                _host, _colon, index = reading.gpu.rpartition(":")
                number = int(index) if index.isdecimal() and len(index) < 6 else 0
                self.policy.on_temp_reading(number, reading.celsius)

    def wanted(self, view: LawView) -> int:
        """The policy's own cap, kept within the bounds."""
        config = SchedulerConfig(self.options.max_running)
        work = view.work
        return self.within(
            self.policy.get_max_running_seqs(Scheduler(config, work.running, work.waiting))
        )
