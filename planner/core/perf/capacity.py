"""How many replicas a predicted load takes, from the time of a step.

Formulas of Dynamo's planner design, throughput-based scaling. I, O: tokens of a prompt and of an
answer; h: share of a prompt that is cached; A: tokens that a stream gets per step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.core.perf.regression import Line
from planner.core.perf.steps import chunked, largest
from planner.core.types import Capabilities


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets: seconds to the first token, and between two tokens of a stream."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Demand:
    """A load to be carried. `rate`: requests per second; `accept_length`: tokens per step."""

    rate: float
    isl_tokens: float
    osl_tokens: float
    hit_ratio: float = 0.0
    accept_length: float = 1.0

    @property
    def new_tokens(self) -> float:
        """Tokens of a prompt that are computed."""
        return self.isl_tokens * (1.0 - self.hit_ratio)

    @property
    def context_tokens(self) -> float:
        """Mean tokens of a running stream."""
        return self.isl_tokens + self.osl_tokens / 2


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one replica can carry: requests per second, with these times.

    `is_feasible`: the targets are kept; else even the smallest batch is too slow.
    """

    rate: float
    ttft_s: float
    itl_s: float
    batch: int
    is_feasible: bool = True

    def replicas(self, demand: Demand, min_replicas: int) -> int:
        """Replicas for a demand, at full use."""
        needed = math.ceil(demand.rate / self.rate - 1e-9) if self.rate > 0 else 0
        return max(needed, min_replicas)


def prefill(line: Line, demand: Demand, slo: Slo, of: Capabilities) -> Capacity:
    """Of a replica that only computes prompts, one after the other."""
    ttft_s = chunked(demand.new_tokens, of.step_tokens, line)
    rate = 1.0 / ttft_s if ttft_s > 0 else math.inf
    return Capacity(rate, ttft_s, 0.0, 1, ttft_s <= slo.ttft_s)


def prefill_replicas(line: Line, demand: Demand, slo: Slo, of: Capabilities, fewest: int) -> int:
    """Replicas that only compute prompts; a prompt too slow for one takes several."""
    one = prefill(line, demand, slo, of)
    spread = math.ceil(one.ttft_s / slo.ttft_s) if one.ttft_s > slo.ttft_s else 1
    return max(one.replicas(demand, fewest), spread)


def most_streams(demand: Demand, of: Capabilities) -> int:
    """Streams that a replica can hold."""
    if of.kv_tokens is None:
        return of.max_seqs
    return max(1, min(of.max_seqs, int(of.kv_tokens / max(1.0, demand.context_tokens))))


def decode(line: Line, demand: Demand, slo: Slo, of: Capabilities) -> Capacity:
    """Of a replica that only decodes: the largest batch whose tokens keep the target.

    The rate follows from Little's law: a stream is there for O / A steps.
    """

    def wall_s(batch: int) -> float:
        return line(batch * demand.context_tokens)

    accept = demand.accept_length
    most = most_streams(demand, of)
    batch = largest(1, most, lambda b: wall_s(b) / accept <= slo.itl_s)
    used = max(1, batch)
    rate = accept * used / (demand.osl_tokens * wall_s(used)) if demand.osl_tokens > 0 else math.inf
    return Capacity(rate, 0.0, wall_s(used) / accept, used, batch >= 1)


def aggregated(line: Line, demand: Demand, slo: Slo, of: Capabilities) -> Capacity:
    """Of a replica that does both: the largest batch that keeps both targets.

    In balance each step brings as many prompts as answers end, so it computes b A x / O tokens of
    prompts beside b streams, which has to fit into the step.
    """
    x, accept, osl = demand.new_tokens, demand.accept_length, max(1.0, demand.osl_tokens)
    context = demand.context_tokens

    def wall_s(b: int) -> float:
        return line(min(b * accept * x / osl, max(1.0, of.step_tokens - b)), b * context)

    def ttft_s(b: int) -> float:
        budget = max(1.0, of.step_tokens - b)
        return chunked(x, budget, lambda tokens: line(tokens, b * context))

    def holds(b: int) -> bool:
        is_balanced = b * accept * x / osl <= of.step_tokens - b
        return is_balanced and wall_s(b) / accept <= slo.itl_s and ttft_s(b) <= slo.ttft_s

    batch = largest(1, most_streams(demand, of), holds)
    used = max(1, batch)
    rate = accept * used / (osl * wall_s(used))
    if x > 0:
        rate = min(rate, (of.step_tokens - used) / (x * wall_s(used)))
    return Capacity(rate, ttft_s(used), wall_s(used) / accept, used, batch >= 1)
