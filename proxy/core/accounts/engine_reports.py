"""Reports of an engine and checks on them: its /metrics, and the usage of its answers.

A frozen report stays the same to the last byte although the engine has answered requests, or
although it shows KV in use. Every step of a running engine changes some counter. The load of a
frozen report is ignored; the proxy's own counters decide alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One report, over all data-parallel ranks: sums, and the highest KV usage. None: unknown.

    `kv_used_by_rank`: the KV usage of each rank, in their order; empty where no rank is named.
    """

    kv_used_ratio: float | None = None
    kv_used_by_rank: tuple[float | None, ...] = ()
    kv_total_tokens: int | None = None
    requests_running: int | None = None
    requests_waiting: int | None = None
    looked_up_tokens: float | None = None
    """Prompt tokens that were looked up in a cache since the process started."""
    local_hit_tokens: float | None = None
    """Looked-up tokens found in the engine's own prefix cache."""
    external_hit_tokens: float | None = None
    """Looked-up tokens that came from a peer or a shared store."""
    start_s: float | None = None
    """Start time of the engine's process, unix seconds."""
    is_asleep: bool | None = None
    """Whether it sleeps (vLLM's sleep mode)."""

    @property
    def hit_ratio(self) -> float | None:
        """Local hits per token looked up, 0..1."""
        return _ratio(self.local_hit_tokens, self.looked_up_tokens)

    @property
    def external_hit_ratio(self) -> float | None:
        """External hits per token looked up, 0..1."""
        return _ratio(self.external_hit_tokens, self.looked_up_tokens)

    @property
    def combined_hit_ratio(self) -> float | None:
        """Local and external hits per token looked up, 0..1; None where either is unknown."""
        if self.local_hit_tokens is None or self.external_hit_tokens is None:
            return None
        return _ratio(self.local_hit_tokens + self.external_hit_tokens, self.looked_up_tokens)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return min(1.0, part / whole) if part is not None and whole else None


@dataclass(frozen=True, slots=True)
class EngineKv:
    """KV cache as the engine reports it: size in tokens and the share in use, 0..1.

    With data-parallel ranks the size is the sum, `used_ratio` is the fullest rank's, and
    `used_by_rank` has each rank; empty without ranks.
    """

    total_tokens: int | None = None
    used_ratio: float | None = None
    used_by_rank: tuple[float | None, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks, at least 1."""
        return max(1, len(self.used_by_rank))

    @property
    def least_used_ratio(self) -> float | None:
        """The usage of the rank with the most room; None while that of any rank is unknown."""
        if not self.used_by_rank:
            return self.used_ratio
        least = 1.0
        for used in self.used_by_rank:
            if used is None:
                return None
            least = min(least, used)
        return least


FROZEN_S, ANSWERS = 60.0, 8
"""A report is frozen if it has not changed for FROZEN_S while the instance gave ANSWERS answers.
Fewer answers may come between the making of a report and its reading."""
IN_USE_S: Final = 600.0
"""A report is also frozen when it has shown the same KV in use for this long. A shorter time would
be wrong: a broken hand-over pins KV for 480 s, and no counter need change meanwhile."""


class ReportHistory:
    """One instance's last changed report: its digest, its time and the answers given until then."""

    __slots__ = ("_answers", "_mark", "_since_s", "is_frozen")

    def __init__(self) -> None:
        self._mark: int | None = None
        self._since_s = 0.0
        self._answers = 0
        self.is_frozen = False

    def observe(self, mark: int, now_s: float, *, answers: int, is_in_use: bool) -> bool:
        """Add a report; True if it is frozen.

        `mark`: a digest, equal for equal reports. `answers`: total given by the instance so far.
        `is_in_use`: the report shows KV in use.
        """
        if self._mark != mark:
            self._mark, self._since_s, self._answers = mark, now_s, answers
            self.is_frozen = False
            return False
        same_s = now_s - self._since_s
        has_worked = same_s >= FROZEN_S and answers - self._answers >= ANSWERS
        if has_worked or (is_in_use and same_s >= IN_USE_S):
            self.is_frozen = True
        return self.is_frozen


EARLY: Final = 8
GAIN: Final = 0.1
CLIP: Final = math.log(1.3)
"""One report moves an instance's ratio by at most GAIN * CLIP: 2.7 %."""
QUORUM: Final = 3
"""With fewer instances it is unknown which of them is wrong."""
FACTOR, FACTOR_BACK = math.log(2.0), math.log(1.6)
"""An instance is doubted beyond the first distance from the fleet's value, until it is within the
second; different texts alone differ by less."""
ENOUGH: Final = 32
"""Reports of an instance before it can be doubted."""
EVERY: Final = 8
"""After ENOUGH reports the fleet's median is taken at every eighth one of an instance, since its
cost grows with the fleet."""


class OwnRatio:
    """A ratio that one instance reports with each answer, as bytes of prompt per token.

    Logarithms are averaged, so twice and half count alike. The start is the mean of the first EARLY
    reports; each later one moves it by GAIN of its distance, clipped to CLIP. `is_doubted`: it
    disagrees with the fleet.
    """

    __slots__ = ("count", "is_doubted", "log")

    def __init__(self, start: float | None = None) -> None:
        """`start`: a value known from before, None if there is none."""
        self.count = 0 if start is None else EARLY
        self.log = 0.0 if start is None else math.log(start)
        self.is_doubted = False

    @property
    def value(self) -> float:
        """The average."""
        return math.exp(self.log)

    def observe(self, ratio: float) -> bool:
        """Add a report, above 0; True if the fleet's median is to be taken again."""
        self.count += 1
        distance = math.log(ratio) - self.log
        if self.count <= EARLY:
            self.log += distance / self.count
        else:
            self.log += GAIN * min(CLIP, max(-CLIP, distance))
        return self.count <= ENOUGH or self.count % EVERY == 0

    def judge(self, fleet: float, instances: int) -> bool:
        """Compare with the value of a fleet of `instances`; True if `is_doubted` has changed."""
        distance, was = abs(self.log - math.log(fleet)), self.is_doubted
        if instances < QUORUM or distance < FACTOR_BACK:
            self.is_doubted = False
        elif self.count >= ENOUGH and distance > FACTOR:
            self.is_doubted = True
        return self.is_doubted is not was


def fleet_ratio(own: Sequence[OwnRatio], prior: float) -> float:
    """The median of the instances' own ratios; where their number is even, `prior` is one more.

    So nothing that one of three reports moves it beyond those of the other two.
    """
    logs = [one.log for one in own]
    if len(logs) % 2 == 0:
        logs.append(math.log(prior))
    logs.sort()
    return math.exp(logs[len(logs) // 2])
