"""Watts per request and degrees per watt, learned while an instance works.

Power is `P = P0 + wn*running + wk*kv_tokens + wp*prefill_tps`, by recursive least squares from the
sensors' watts. It starts at the founding document's 3.2 W per sequence. Temperature follows `dT/dt
= (rth*P + c - T) / tau`, where `c` is the air and everything not modelled. An observer runs that
formula beside the plant and corrects T and `c` by the sensors. So a change of load shows in the
watts before the degrees. Errors of `rth` or `tau` end up in `c`, so the loop settles without
knowing them. `rth` is corrected by changes of power and the changes of temperature that follow.

Where sensors give no watts, the formula's own are used.
"""

from __future__ import annotations

import math

ATTENTION_S = 8.0
"""Power, running requests and KV are smoothed alike over this time, and so belong together."""
SCALES = (1.0, 100.0, 400_000.0, 10_000.0)
"""Unit of each term: 1, 100 requests, 400,000 tokens of KV, 10,000 tokens/s."""
SPREADS = (200.0, 100.0, 100.0, 100.0)
"""Initial uncertainty of each term, in watts per unit."""
NOISE_WATTS = 10.0
"""Distance of a board's reading from the line."""
FORGET = 0.998
"""Memory of the line: 500 readings."""
MOST_SPREAD = 1000.0
"""Uncertainty of a term, in watts per unit, beyond which nothing is forgotten: without news the
uncertainty would grow until the next reading throws the line about."""
LEAST_FACTOR, MOST_FACTOR = 0.2, 10.0
"""Watts per sequence stay within these factors of where they begin."""
LEAST_RTH, MOST_RTH = 0.5, 4.0
"""Learned degrees per watt stay within these factors of where they begin: half of the truth would
make the loop's gain 1.2, and it is stable below 2."""
WINDOW_S = 20.0
"""Length of the windows whose changes of power and temperature are compared."""
LEAST_IN_WINDOW, MOST_IN_WINDOW = 5, 256
"""Moments of a window; with fewer it says nothing."""
LEAST_CHANGE_RATIO = 0.05
"""A change of power below this part of it teaches nothing of degrees per watt."""
PRIOR_CHANGE_RATIO = 0.2
"""The beginning counts as one change of this part of the power."""
KEEP_PAIRS = 0.9
"""Memory of degrees per watt: ten changes."""
OBSERVER_PER_S = 0.08
"""Speed at which the observer follows a different temperature and air: some 12 s, or faster if the
temperature is. Twice as fast it would follow the sensors' noise."""
_TERMS = 4


class PowerLine:
    """Recursive least squares of watts over the work, with a limited uncertainty."""

    def __init__(self, watts_per_sequence: float) -> None:
        self._begin = watts_per_sequence
        self._w = [0.0, watts_per_sequence * SCALES[1], 0.0, 0.0]
        self._p: list[list[float]] = []
        self._doubt()

    def watts(self, running: float, kv_tokens: float, prefill_tps: float) -> float:
        """Watts of this work."""
        x = _scaled(running, kv_tokens, prefill_tps)
        return math.fsum([self._w[i] * x[i] for i in range(_TERMS)])

    def observe(self, running: float, kv_tokens: float, prefill_tps: float, watts: float) -> None:
        """Learn from one moment."""
        x = _scaled(running, kv_tokens, prefill_tps)
        px = [math.fsum([self._p[i][j] * x[j] for j in range(_TERMS)]) for i in range(_TERMS)]
        spread = math.fsum([x[i] * px[i] for i in range(_TERMS)])
        noise = NOISE_WATTS**2
        gain = [px[i] / (noise + spread) for i in range(_TERMS)]
        error = watts - math.fsum([self._w[i] * x[i] for i in range(_TERMS)])
        most = max([self._p[i][i] for i in range(_TERMS)])
        kept = FORGET if most < MOST_SPREAD**2 else 1.0
        for i in range(_TERMS):
            self._w[i] += gain[i] * error
            for j in range(i, _TERMS):
                # Kept symmetric: what rounding puts between the halves would grow by `kept`.
                self._p[i][j] = self._p[j][i] = (self._p[i][j] - gain[i] * px[j]) / kept
        spreads = [self._p[i][i] for i in range(_TERMS)]
        if min(spreads) <= 0.0 or not math.isfinite(math.fsum(spreads)):
            self._doubt()

    def _doubt(self) -> None:
        """Be as uncertain of every term as at the beginning."""
        self._p = [[0.0] * _TERMS for _ in range(_TERMS)]
        for row in range(_TERMS):
            self._p[row][row] = SPREADS[row] ** 2

    def of_sequence(self, mean_kv_tokens: float) -> float:
        """Watts of one sequence that holds so many tokens, within bounds of where it began."""
        watts = self._w[1] / SCALES[1] + self._w[2] / SCALES[2] * mean_kv_tokens
        return min(max(watts, self._begin * LEAST_FACTOR), self._begin * MOST_FACTOR)

    @property
    def spread_watts(self) -> float:
        """The uncertainty of the watts per sequence, one standard deviation."""
        return math.sqrt(max(0.0, self._p[1][1])) / SCALES[1]


def _scaled(running: float, kv_tokens: float, prefill_tps: float) -> tuple[float, ...]:
    return (1.0, running / SCALES[1], kv_tokens / SCALES[2], prefill_tps / SCALES[3])


class Resistance:
    """Degrees per watt, from changes of power and of the temperature that they lead to.

    The formula, averaged over a window: `tau * slope + mean T = rth * mean P + air`. Two windows in
    a row differ in `rth` times their powers, where the air stays as it is.
    """

    def __init__(self, begin: float, tau_s: float) -> None:
        self._begin = begin
        self._tau_s = tau_s
        self._window: list[tuple[float, float, float]] = []
        self._before: tuple[float, float] | None = None
        self._across = self._along = 0.0
        self.celsius_per_watt = begin

    def observe(self, now_s: float, watts: float, celsius: float) -> None:
        """Take a moment; a window that is full is compared with the one before."""
        window = self._window
        window.append((now_s, watts, celsius))
        if now_s - window[0][0] < WINDOW_S and len(window) < MOST_IN_WINDOW:
            return
        self._window = []
        if len(window) < LEAST_IN_WINDOW:
            self._before = None
            return
        count = len(window)
        mean_s = math.fsum([one[0] for one in window]) / count
        mean_watts = math.fsum([one[1] for one in window]) / count
        mean = math.fsum([one[2] for one in window]) / count
        across = math.fsum([(one[0] - mean_s) * (one[2] - mean) for one in window])
        along = math.fsum([(one[0] - mean_s) ** 2 for one in window])
        steady = mean + self._tau_s * (across / along if along > 0.0 else 0.0)
        before, self._before = self._before, (mean_watts, steady)
        if before is not None:
            self._compare(mean_watts, mean_watts - before[0], steady - before[1])

    def _compare(self, watts: float, change: float, celsius: float) -> None:
        if abs(change) < LEAST_CHANGE_RATIO * max(1.0, watts):
            return
        self._across = KEEP_PAIRS * self._across + change * celsius
        self._along = KEEP_PAIRS * self._along + change * change
        prior = (PRIOR_CHANGE_RATIO * watts) ** 2
        found = (self._across + prior * self._begin) / (self._along + prior)
        low, high = LEAST_RTH * self._begin, MOST_RTH * self._begin
        self.celsius_per_watt = min(max(found, low), high)

    def restart(self) -> None:
        """Forget the moments, not what they taught: time has passed without readings."""
        self._window = []
        self._before = None


class Observer:
    """The temperature that the formula has, corrected by what the sensors say."""

    def __init__(self, tau_s: float) -> None:
        self._tau_s = tau_s
        # Both poles of the corrected formula are there.
        pole_per_s = max(OBSERVER_PER_S, 0.6 / tau_s)
        self._taken_per_s = 2.0 * pole_per_s - 1.0 / tau_s
        self._drift_per_s = pole_per_s**2 * tau_s
        self._at_s: float | None = None
        self._celsius = 0.0
        self._air = 0.0

    def observe(self, now_s: float, celsius: float, warming: float) -> None:
        """Take a temperature; `warming`: degrees that the power of now is worth."""
        at_s, self._at_s = self._at_s, now_s
        if at_s is None or not 0.0 < now_s - at_s <= 10.0 * self._tau_s:
            if at_s != now_s:
                self._celsius, self._air = celsius, celsius - warming
            return
        # Steps of a second at most, so that the corrections stay small.
        steps = max(1, math.ceil(now_s - at_s))
        dt_s = (now_s - at_s) / steps
        for _ in range(steps):
            kept = math.exp(-dt_s / self._tau_s)
            steady = self._air + warming
            self._celsius = steady + (self._celsius - steady) * kept
            wrong = celsius - self._celsius
            self._celsius += min(1.0, self._taken_per_s * dt_s) * wrong
            self._air += min(1.0, self._drift_per_s * dt_s) * wrong

    def steady(self, warming: float) -> float:
        """Final temperature at this power."""
        return self._air + warming


class Smoothed:
    """Power and work, smoothed alike."""

    def __init__(self) -> None:
        self._at_s: float | None = None
        self.running = self.kv_tokens = self.prefill_tps = self.watts = 0.0

    def observe(
        self, now_s: float, running: float, kv_tokens: float, prefill_tps: float, watts: float
    ) -> None:
        """Take one moment."""
        part = 1.0
        if self._at_s is not None:
            part = 1.0 - math.exp(-max(0.0, now_s - self._at_s) / ATTENTION_S)
        self._at_s = now_s
        self.running += part * (running - self.running)
        self.kv_tokens += part * (kv_tokens - self.kv_tokens)
        self.prefill_tps += part * (prefill_tps - self.prefill_tps)
        self.watts += part * (watts - self.watts)

    @property
    def mean_kv_tokens(self) -> float:
        """KV tokens of a running request."""
        return self.kv_tokens / self.running if self.running >= 1.0 else 0.0


def sequences_of(watts: float, watts_per_sequence: float) -> int:
    """Number of sequences for a power: 100 W are 31 at 3.2 W."""
    return round(watts / watts_per_sequence)
