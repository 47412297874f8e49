"""Loads without a trace: a ramp, a step, spikes, a day, a late start. The seed draws all of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from replayer.loads.load import Blocks, Load, Request

RAMP = ((2, 330), (4, 360), (6, 360), (8, 360), (10, 360), (4, 360), (1, 300))
"""llm-d's staged ramp: requests per second, and for how many seconds."""
RAMP_SCALE = 1.45
"""Of its rates: eight of these engines are just enough for the peak, as there."""
QUIET_RPS, STEP_RPS, SPIKE_RPS = 6.0, 18.0, 24.0
STEP_S = (600.0, 1500.0)
SPIKES_S = ((480.0, 90.0), (1080.0, 180.0), (1800.0, 90.0))
"""Begin and length of each."""
SHORT_S, DAY_S = 2400.0, 2880.0
DAY_PEAK_RPS = 29.0
"""No rate of the day is above this one."""
Rate = Callable[[float], float]


def ramp(seed: int) -> Load:
    """Constant rates in stages; about 4,000 tokens in, 1,000 out, nothing shared."""
    draw, blocks = random.Random(f"ramp{seed}"), Blocks()
    offset, start_s = draw.random(), 0.0
    requests, ends_s = [], []
    for rate, seconds in RAMP:
        n = round(rate * RAMP_SCALE * seconds)
        for i in range(n):
            tokens = _clipped(draw, 4000, 300, (3500, 4500))
            output = _clipped(draw, 1000, 80, (900, 1100))
            at_s = start_s + (i + offset) * seconds / n
            requests.append(Request(at_s, tokens, output, blocks.take(tokens)))
        start_s += seconds
        ends_s.append(start_s)
    return Load(
        name="ramp",
        seed=seed,
        requests=requests,
        end_s=start_s,
        slo_ttft_s=3.0,
        slo_itl_s=0.1,
        min_replicas=3,
        max_replicas=8,
        rises_s=tuple(ends_s[:4]),
    )


def _clipped(draw: random.Random, mean: float, sd: float, limits: tuple[int, int]) -> int:
    low, high = limits
    return int(min(high, max(low, draw.gauss(mean, sd))))


def step(seed: int) -> Load:
    """Three times the rate from minute 10 to minute 25."""
    begin_s, end_s = STEP_S

    def rate(at_s: float) -> float:
        return STEP_RPS if begin_s <= at_s < end_s else QUIET_RPS

    requests = _drawn("step", seed, rate, (SHORT_S, STEP_RPS))
    return Load(name="step", seed=seed, requests=requests, end_s=SHORT_S, rises_s=(begin_s,))


def spike(seed: int) -> Load:
    """Four times the rate, three times, for a minute or three."""

    def rate(at_s: float) -> float:
        is_in = any(begin_s <= at_s < begin_s + length_s for begin_s, length_s in SPIKES_S)
        return SPIKE_RPS if is_in else QUIET_RPS

    requests = _drawn("spike", seed, rate, (SHORT_S, SPIKE_RPS))
    rises_s = tuple(begin_s for begin_s, _ in SPIKES_S)
    return Load(name="spike", seed=seed, requests=requests, end_s=SHORT_S, rises_s=rises_s)


def late(seed: int) -> Load:
    """Nothing for ten minutes, then the quiet rate, then three times that."""
    begin_s, end_s = STEP_S

    def rate(at_s: float) -> float:
        return 0.0 if at_s < begin_s else STEP_RPS if at_s >= end_s else QUIET_RPS

    requests = _drawn("late", seed, rate, (SHORT_S, STEP_RPS))
    return Load(name="late", seed=seed, requests=requests, end_s=SHORT_S, rises_s=STEP_S)


def day(seed: int) -> Load:
    """A day in 48 minutes: 2 to 26 requests per second, a lunch dip, a ripple of 5 %."""
    requests = _drawn("day", seed, day_rps, (DAY_S, DAY_PEAK_RPS))
    return Load(name="day", seed=seed, requests=requests, end_s=DAY_S)


def day_rps(at_s: float) -> float:
    """The day's rate: a raised cosine."""
    part = at_s / DAY_S
    dip = 1 - 0.35 * math.exp(-(((part - 0.5) / 0.06) ** 2))
    base = 2 + 25 * (0.5 - 0.5 * math.cos(2 * math.pi * part)) * dip
    return base * (1 + 0.05 * math.sin(2 * math.pi * at_s / 37))


def _drawn(name: str, seed: int, rate: Rate, limits: tuple[float, float]) -> list[Request]:
    """Poisson arrivals; lognormal lengths, about 3,800 tokens in and 280 out."""
    draw, blocks, requests = random.Random(f"{name}{seed}"), Blocks(), []
    for at_s in arrivals(draw, rate, *limits):
        tokens = max(64, min(16000, int(draw.lognormvariate(math.log(2600), 0.9))))
        output = max(16, min(1500, int(draw.lognormvariate(math.log(220), 0.7))))
        requests.append(Request(at_s, tokens, output, blocks.take(tokens)))
    return requests


def arrivals(draw: random.Random, rate: Rate, end_s: float, peak_rps: float) -> Iterator[float]:
    """Times of a Poisson process whose rate changes: drawn at its peak, then thinned."""
    at_s = 0.0
    while True:
        at_s += draw.expovariate(peak_rps)
        if at_s >= end_s:
            return
        if draw.random() * peak_rps < rate(at_s):
            yield at_s
