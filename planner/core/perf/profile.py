"""A profile: what one instance took while nothing else ran on it, and the times between its points.

Throughput is per GPU. It alone says what a load costs, whatever the size of the batch behind it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from planner.core.perf.regression import Inputs

Row = tuple[float, float, float]
"""A length in tokens, a throughput, and the seconds at both."""


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """One prompt alone. `throughput`: its tokens per second and GPU."""

    isl_tokens: float
    ttft_s: float
    throughput: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Streams side by side. `kv_ratio`: of the KV cache, 0..1; `throughput`: tokens generated."""

    kv_ratio: float
    context_tokens: float
    itl_s: float
    throughput: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time at a throughput and a length.

    `is_feasible`: the throughput is at most the largest; else the time is that of the largest.
    `is_edge`: no such length was measured, and the time is that of the nearest one.
    """

    seconds: float
    is_feasible: bool
    is_edge: bool


@dataclass(frozen=True, slots=True)
class Precision:
    """Errors of points that are left out one by one, as shares of what was measured.

    `points`: how many stand between others. The errors are None where none does.
    """

    points: int
    mean: float | None
    worst: float | None


class Surface:
    """Seconds by throughput and length, linear between measured points in both.

    Between two lengths both are read at the same share of their largest throughput. At the same
    throughput a length could be asked for more than it has ever reached.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        found: dict[float, list[tuple[float, float]]] = {}
        for length, throughput, seconds in rows:
            found.setdefault(length, []).append((throughput, seconds))
        self._lengths = sorted(found)
        self._fronts = [_front(found[length]) for length in self._lengths]

    def at(self, throughput: float, length: float) -> Estimate:
        """Read the time; a throughput below the smallest measured takes as long as that one."""
        lengths = self._lengths
        held = min(max(length, lengths[0]), lengths[-1])
        low = max(0, min(bisect_right(lengths, held), len(lengths) - 1) - 1)
        near = self._fronts[low : low + 2]
        part = (held - lengths[low]) / (lengths[low + 1] - lengths[low]) if len(near) > 1 else 0.0
        most = _between([front[-1][0] for front in near], part)
        share = min(1.0, throughput / most)
        seconds = _between([_read(front, share * front[-1][0]) for front in near], part)
        return Estimate(seconds, throughput <= most, held != length)


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points by throughput, without those that another one beats in throughput and time."""
    kept: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: (-point[0], point[1])):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept[::-1]


def _between(values: Sequence[float], part: float) -> float:
    return values[0] + part * (values[-1] - values[0])


def _read(front: Sequence[tuple[float, float]], throughput: float) -> float:
    throughputs, seconds = zip(*front, strict=True)
    return float(np.interp(throughput, throughputs, seconds))


def precision(rows: Sequence[Row]) -> Precision:
    """Leave out each row that stands between others, and foretell it from them."""
    errors = []
    for at, (length, throughput, seconds) in enumerate(rows):
        rest = [*rows[:at], *rows[at + 1 :]]
        if _is_inside(rest, length, throughput):
            told = Surface(rest).at(throughput, length).seconds
            errors.append(abs(told - seconds) / seconds)
    if not errors:
        return Precision(0, None, None)
    return Precision(len(errors), sum(errors) / len(errors), max(errors))


def _is_inside(rest: Sequence[Row], length: float, throughput: float) -> bool:
    """Whether others of the same length are on both sides; without such, other lengths are."""
    own = [row[1] for row in rest if row[0] == length]
    others, value = (own, throughput) if own else ([row[0] for row in rest], length)
    return min(others) < value < max(others)


@dataclass(frozen=True, slots=True)
class Profile:
    """Both tables of one instance; `max_kv_tokens`: what its KV cache holds."""

    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]
    max_kv_tokens: int

    def prefill_rows(self) -> list[Row]:
        """Times to the first token, by prompt and throughput."""
        return [(p.isl_tokens, p.throughput, p.ttft_s) for p in self.prefill]

    def decode_rows(self) -> list[Row]:
        """Times between two tokens, by context and throughput."""
        return [(p.context_tokens, p.throughput, p.itl_s) for p in self.decode]

    def priors(self, step_tokens: int) -> list[tuple[Inputs, float]]:
        """Steps as the points show them: tokens of prompts, KV tokens decoded, and seconds.

        A prompt of at most `step_tokens` is one step. A longer one is several, each slower than the
        last as its context grows, which a line does not know. Their mean stands in where fewer than
        two prompts are short.
        """
        short = [p for p in self.prefill if p.isl_tokens <= step_tokens]
        used = short if len(short) > 1 else self.prefill
        steps = [(p, math.ceil(p.isl_tokens / step_tokens)) for p in used]
        prompts = (((p.isl_tokens / n, 0.0), p.ttft_s / n) for p, n in steps)
        streams = (((0.0, p.kv_ratio * self.max_kv_tokens), p.itl_s) for p in self.decode)
        return list(chain(prompts, streams))
