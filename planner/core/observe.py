"""What counters and accounts say of a fleet: traffic of a window, the mean state of instances."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median_low

from planner.core.types import Engine, Traffic

HARDLY_S = 1e-6
MOST_ACCEPTED = 32.0
"""Drafted tokens of a step that can hold; vLLM drafts some 2 to 16."""


class Counters:
    """The last values of counters by their keys, of sources that come and go.

    A value below the last one is that of a process which has begun anew: all of it has grown since.
    What is read for the first time has not grown: it may have counted for days.
    """

    def __init__(self) -> None:
        self._last: dict[str, Mapping[str, float]] = {}

    def grown(self, source: str, values: Mapping[str, float]) -> dict[str, float]:
        """Growth of each counter of a source since its last reading; nothing at the first one."""
        known = self._last.get(source)
        told = {key: value for key, value in values.items() if math.isfinite(value)}
        self._last[source] = told
        if known is None:
            return {}
        return {key: _growth(known.get(key, 0.0), value) for key, value in told.items()}

    def forget(self, source: str) -> None:
        """A source has left, or has become another."""
        self._last.pop(source, None)


def _growth(before: float, now: float) -> float:
    return now - before if now >= before else now


def total(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sums of several sources' growth."""
    sums: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            sums[key] = sums.get(key, 0.0) + value
    return sums


@dataclass(frozen=True, slots=True)
class Totals:
    """What the proxies have counted so far; requests, or tokens where the name says so.

    `offered`: placed, refused, and what waits. `prompts`, `answers`: how many have been measured.
    `looked_up_tokens`: of prompts, in prefix caches; `cached_tokens`: those of them found there.
    `ttft_s`: the sum over `first_tokens` answers; `itl_s`: that of `paced` answers' mean gaps.
    """

    offered: float = 0.0
    prompts: float = 0.0
    prompt_tokens: float = 0.0
    answers: float = 0.0
    answer_tokens: float = 0.0
    looked_up_tokens: float = 0.0
    cached_tokens: float = 0.0
    first_tokens: float = 0.0
    ttft_s: float = 0.0
    paced: float = 0.0
    itl_s: float = 0.0

    def __add__(self, grown: Totals) -> Totals:
        """These counts and what they have grown by."""
        return Totals(*(getattr(self, f.name) + getattr(grown, f.name) for f in fields(Totals)))


def traffic_between(before: Totals, now: Totals, window_s: float) -> Traffic:
    """The traffic between two readings."""

    def mean(total: str, count: str) -> float | None:
        grown = getattr(now, count) - getattr(before, count)
        return (getattr(now, total) - getattr(before, total)) / grown if grown > 0 else None

    return Traffic(
        window_s,
        max(0.0, now.offered - before.offered),
        mean("prompt_tokens", "prompts"),
        mean("answer_tokens", "answers"),
        mean("cached_tokens", "looked_up_tokens"),
        ttft_s=mean("ttft_s", "first_tokens"),
        itl_s=mean("itl_s", "paced"),
        ended=now.answers - before.answers,
    )


class TrafficWindow:
    """The traffic of the last `window_s` seconds, from readings of counters."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._readings: deque[tuple[float, Totals]] = deque()

    def add(self, now_s: float, totals: Totals) -> Traffic | None:
        """The traffic behind this reading; None before the first window is whole."""
        readings, since_s = self._readings, now_s - self._window_s
        readings.append((now_s, totals))
        while len(readings) > 1 and readings[1][0] <= since_s + HARDLY_S:
            readings.popleft()
        begin_s, before = readings[0]
        if begin_s > since_s + HARDLY_S:
            return None
        return traffic_between(before, totals, now_s - begin_s)


@dataclass(frozen=True, slots=True)
class Account:
    """What the proxies know exactly of an instance now.

    `prefill_tokens`: new ones of requests before their first token; `decode_*`: running streams.
    """

    prefill_tokens: float = 0.0
    decode_requests: float = 0.0
    decode_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """What an engine has counted since its start.

    `steps`: iterations. `computed_tokens`: of prompts. `gaps`, `gap_s`: number and sum of the times
    between two tokens of a stream: tokens of a step come together, so a gap is a step. `drafts`,
    `accepted`: of speculative decoding, steps with drafted tokens, and those tokens that held.
    """

    steps: float = 0.0
    computed_tokens: float = 0.0
    gaps: float = 0.0
    gap_s: float = 0.0
    drafts: float = 0.0
    accepted: float = 0.0


class EngineWindows:
    """The mean state of every instance since the last look."""

    def __init__(self) -> None:
        self._counters = Counters()
        self._accounts: Mapping[str, Account] = {}
        self._read_s: dict[str, float] = {}
        """When the counters of each were read last."""
        self.accept_length: float | None = None
        """Tokens per step and stream of the median instance; None: nothing was drafted."""

    def look(
        self,
        now_s: float,
        accounts: Mapping[str, Account],
        work: Mapping[str, Work],
        waiting_tokens: float = 0.0,
    ) -> tuple[Engine, ...]:
        """The instances of `accounts`; those without `work` show no iteration.

        `waiting_tokens`: of prompts, per instance, that the proxies have not placed yet.
        """
        grown = {name: self._grown_by(now_s, name, work.get(name)) for name in accounts}
        self.accept_length = _accept_length(list(grown.values()))
        found = tuple(
            self._engine(name, now, grown[name], waiting_tokens) for name, now in accounts.items()
        )
        for name in self._accounts.keys() - accounts.keys():
            self._counters.forget(name)
            self._read_s.pop(name, None)
        self._accounts = dict(accounts)
        return found

    def _grown_by(self, now_s: float, name: str, work: Work | None) -> Mapping[str, float]:
        """What an engine has counted since it was read last, and `seconds` since then."""
        if work is None:
            return {}
        told = {field.name: getattr(work, field.name) for field in fields(Work)}
        before_s, self._read_s[name] = self._read_s.get(name, now_s), now_s
        return {**self._counters.grown(name, told), "seconds": now_s - before_s}

    def _engine(
        self, name: str, now: Account, grown: Mapping[str, float], waiting_tokens: float
    ) -> Engine:
        before, steps = self._accounts.get(name, now), grown.get("steps", 0.0)
        return Engine(
            name,
            wall_s=_step_s(grown),
            prefill_tokens=grown["computed_tokens"] / steps if steps else 0.0,
            decode_requests=(before.decode_requests + now.decode_requests) / 2,
            decode_kv_tokens=(before.decode_tokens + now.decode_tokens) / 2,
            queued_prefill_tokens=now.prefill_tokens + waiting_tokens,
        )


def _accept_length(grown: Sequence[Mapping[str, float]]) -> float | None:
    """Tokens per step and stream of the median instance; no instance speaks for the others."""
    told = [
        1.0 + min(MOST_ACCEPTED, one["accepted"] / one["drafts"])
        for one in grown
        if one.get("drafts", 0.0) > 0.0
    ]
    return median_low(told) if told else None


def _step_s(grown: Mapping[str, float]) -> float | None:
    """The mean time of a step; None where no stream ran.

    The mean gap counts a step once per stream, and the pauses of preempted streams: under overload
    it is far above the mean of steps, over which prompts' tokens are counted. But all steps of a
    window fit into it, so that mean is no longer than the window by its steps.
    """
    gaps, steps = grown.get("gaps", 0.0), grown.get("steps", 0.0)
    if not gaps:
        return None
    gap_s = grown["gap_s"] / gaps
    return min(gap_s, grown["seconds"] / steps) if steps else gap_s
