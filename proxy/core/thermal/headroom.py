"""Headroom of an instance: predicted degrees from its hottest GPU to the target.

The GPUs of an instance compute every layer together, so the hottest GPU decides (the founding
document's "any hot is all hot"). Of its chip and its memory, the one nearer to its target counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.thermal.options import ThermalOptions
from proxy.core.thermal.readings import GpuReading

MOST_GPUS = 64
"""GPUs of one instance; readings of further ones are ignored."""
MOST_SAMPLES = 256
"""Readings of one sensor that its slope is computed from; the oldest ones leave."""
STUCK_S = 30.0
"""A sensor with the same reading for this time is compared with the power of its GPU."""
WATTS_S = 8.0
"""Watts are smoothed over this time: prompts come in bursts."""


@dataclass(frozen=True, slots=True)
class Heat:
    """An instance's readings at one moment."""

    gpu: str
    celsius: float
    """Smoothed reading of the deciding sensor."""
    latest: float
    """Its unsmoothed reading."""
    slope: float
    """Degrees per second."""
    excess_celsius: float
    """Degrees of `celsius` above its target."""
    lookahead_celsius: float
    """The predicted excess, never below the present one."""
    to_critical_celsius: float
    """Smallest distance of any sensor to its critical temperature, smoothed."""
    is_critical: bool
    """An unsmoothed reading has reached it, or a GPU throttles."""
    is_slowed: bool
    watts: float | None
    """Watts of all GPUs, None if one does not report."""
    gpus: int
    """Number of GPUs."""
    age_s: float
    """Age of the oldest of their last readings."""
    unexplained_watts: float
    """Power change of a GPU whose temperature stayed."""

    @property
    def headroom_celsius(self) -> float:
        """Degrees to the target, looked ahead; negative above it."""
        return -self.lookahead_celsius


class Track:
    """One sensor: its smoothed temperature and its slope by least squares."""

    __slots__ = ("_ewma_s", "_samples", "_window_s", "at_s", "celsius", "changed_s", "latest")

    def __init__(self, ewma_s: float, window_s: float) -> None:
        self._ewma_s = ewma_s
        self._window_s = window_s
        self._samples: list[tuple[float, float]] = []
        self.at_s = -math.inf
        self.celsius = 0.0
        self.latest = 0.0
        self.changed_s = -math.inf
        """When it last said anything else than before."""

    def add(self, at_s: float, celsius: float) -> None:
        """Take a reading; one that is not later than the last is the last one again."""
        if at_s <= self.at_s or not math.isfinite(celsius):
            return
        if not self._samples or celsius != self.latest:
            self.changed_s = at_s
        if self._samples and self._ewma_s > 0.0:
            part = 1.0 - math.exp(-(at_s - self.at_s) / self._ewma_s)
            self.celsius += part * (celsius - self.celsius)
        else:
            self.celsius = celsius
        self.latest, self.at_s = celsius, at_s
        oldest_s = at_s - self._window_s
        kept = [sample for sample in self._samples if sample[0] >= oldest_s]
        kept.append((at_s, celsius))
        self._samples = kept[-MOST_SAMPLES:]

    def slope(self) -> float:
        """Degrees per second over the window; 0 where there are fewer than three readings."""
        samples = self._samples
        count = len(samples)
        if count < 3:
            return 0.0
        mean_s = math.fsum([at_s for at_s, _ in samples]) / count
        mean = math.fsum([celsius for _, celsius in samples]) / count
        across = math.fsum([(at_s - mean_s) * (celsius - mean) for at_s, celsius in samples])
        along = math.fsum([(at_s - mean_s) ** 2 for at_s, _ in samples])
        return across / along if along > 0.0 else 0.0


class _Gpu:
    __slots__ = (
        "at_s",
        "chip",
        "drawn",
        "drawn_then",
        "is_slowed",
        "memory",
        "unexplained",
        "watts",
    )

    def __init__(self, options: ThermalOptions) -> None:
        self.chip = Track(options.ewma_s, options.slope_window_s)
        self.memory = Track(options.ewma_s, options.slope_window_s)
        self.at_s = -math.inf
        self.watts: float | None = None
        self.drawn: float | None = None
        """Its watts, smoothed; `drawn_then`: when its chip last said another temperature."""
        self.drawn_then: float | None = None
        self.unexplained = 0.0
        """The largest change of its power since, after a while. Otherwise a doubted sensor would be
        trusted again as soon as the power is the same as before."""
        self.is_slowed = False

    def take(self, reading: GpuReading) -> None:
        """Take a reading that is later than the last one."""
        if reading.celsius is not None:
            self.chip.add(reading.at_s, reading.celsius)
        if reading.memory_celsius is not None:
            self.memory.add(reading.at_s, reading.memory_celsius)
        watts = reading.watts
        if watts is not None and self.drawn is not None and self.at_s > -math.inf:
            part = 1.0 - math.exp(-(reading.at_s - self.at_s) / WATTS_S)
            self.drawn += part * (watts - self.drawn)
        else:
            self.drawn = watts
        if self.chip.changed_s == reading.at_s:
            self.drawn_then, self.unexplained = self.drawn, 0.0
        elif reading.at_s - self.chip.changed_s >= STUCK_S:
            self._compare()
        has_degrees = reading.celsius is not None or reading.memory_celsius is not None
        if has_degrees or self.at_s == -math.inf:  # one that never says any ages from its first
            self.at_s = reading.at_s
        self.watts = watts
        self.is_slowed = reading.is_slowed

    def _compare(self) -> None:
        if self.drawn is not None and self.drawn_then is not None:
            self.unexplained = max(self.unexplained, abs(self.drawn - self.drawn_then))


class GroupHeat:
    """All GPUs of one instance, by name."""

    def __init__(self, options: ThermalOptions) -> None:
        self._options = options
        self._gpus: dict[str, _Gpu] = {}

    def observe(self, readings: Sequence[GpuReading]) -> None:
        """Take readings; of one GPU in the order of their times, repeated ones count once.

        They are of all GPUs that are known now: others do not serve the instance any more.
        """
        if readings:
            there = {reading.gpu for reading in readings}
            for name in [name for name in self._gpus if name not in there]:
                del self._gpus[name]
        for reading in readings:
            gpu = self._gpus.get(reading.gpu)
            if gpu is None:
                if len(self._gpus) >= MOST_GPUS:
                    continue
                gpu = self._gpus[reading.gpu] = _Gpu(self._options)
            if reading.at_s <= gpu.at_s:
                continue
            gpu.take(reading)

    def forget(self) -> None:
        """Forget all GPUs: other ones serve the instance now."""
        self._gpus.clear()

    def heat(self, now_s: float, target_celsius: float | None = None) -> Heat | None:
        """The latest values; None before the first reading. `target_celsius` replaces the chip's.

        A GPU that has gone silent keeps its last temperature, and its age is the group's.
        """
        options = self._options
        target = options.target_celsius if target_celsius is None else target_celsius
        best: Heat | None = None
        watts: float | None = 0.0
        oldest_s, left, unexplained = now_s, math.inf, 0.0
        is_critical = is_slowed = False
        for gpu in self._gpus.values():
            oldest_s = min(oldest_s, gpu.at_s)
            watts = None if watts is None or gpu.watts is None else watts + gpu.watts
            is_slowed = is_slowed or gpu.is_slowed
            is_critical = is_critical or gpu.is_slowed
            unexplained = max(unexplained, gpu.unexplained)
            for track, most in (
                (gpu.chip, options.critical_celsius),
                (gpu.memory, options.memory_critical_celsius),
            ):
                if _is_known(track):
                    is_critical = is_critical or track.latest >= most
                    left = min(left, most - track.celsius)
        for name, gpu in self._gpus.items():
            for track, wanted in ((gpu.chip, target), (gpu.memory, options.memory_target_celsius)):
                if not _is_known(track):
                    continue
                slope = track.slope()
                excess = track.celsius - wanted
                ahead = excess + options.lead_s * max(0.0, slope)
                if best is None or ahead > best.lookahead_celsius:
                    best = Heat(
                        name,
                        track.celsius,
                        track.latest,
                        slope,
                        excess,
                        ahead,
                        left,
                        is_critical,
                        is_slowed,
                        watts,
                        len(self._gpus),
                        max(0.0, now_s - oldest_s),
                        unexplained,
                    )
        return best


def _is_known(track: Track) -> bool:
    return track.at_s > -math.inf
