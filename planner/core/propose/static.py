"""Scaling by fixed thresholds of use, without a model: the targets throughput, latency and load.

Thresholds of Dynamo's planner, for engines that only compute prompts, and for those that decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from planner.core.types import Capabilities, Engine


class Aim(StrEnum):
    """What load scaling keeps: times, by a model of the engines, or a use of them."""

    SLA = "sla"
    THROUGHPUT = "throughput"
    LATENCY = "latency"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Up where any instance is above `up`, down where all are below `down`.

    `is_closed`: a value at a threshold counts as past it.
    """

    up: float
    down: float
    is_closed: bool = False

    def change(self, uses: Sequence[float]) -> int:
        """One more, one fewer, or none.

        None fewer where the others would be past `up` with its share.
        """
        if any(use >= self.up if self.is_closed else use > self.up for use in uses):
            return 1
        is_idle = all(use <= self.down if self.is_closed else use < self.down for use in uses)
        if len(uses) < 2 or not is_idle:
            return 0
        return 0 if max(uses) * len(uses) / (len(uses) - 1) >= self.up else -1


PREFILL = {Aim.THROUGHPUT: Thresholds(1.0, 0.1), Aim.LATENCY: Thresholds(0.1, 0.0, is_closed=True)}
"""Of `prefill_use`."""
DECODE = {Aim.THROUGHPUT: Thresholds(1.0, 0.6), Aim.LATENCY: Thresholds(0.4, 0.1)}
"""Of `decode_use`, and of `combined_use`."""


def prefill_use(engine: Engine, context_tokens: int) -> float:
    """Tokens of prompts that wait, in longest contexts."""
    return engine.queued_prefill_tokens / context_tokens


def decode_use(engine: Engine, of: Capabilities) -> float | None:
    """The share of the KV cache that streams take, waiting ones as well; None while unknown."""
    if of.kv_tokens is None:
        return None
    return (engine.decode_kv_tokens + engine.queued_decode_kv_tokens) / of.kv_tokens


def combined_use(engine: Engine, of: Capabilities) -> float | None:
    """The same of an instance that does both: prompts that wait will be there too."""
    use = decode_use(engine, of)
    if use is None or of.kv_tokens is None:
        return None
    return use + engine.queued_prefill_tokens / of.kv_tokens


def change(engines: Sequence[Engine], of: Capabilities, thresholds: Thresholds) -> int | None:
    """One more, one fewer, or none, of instances that do both; None while that is not known."""
    uses = [use for engine in engines if (use := combined_use(engine, of)) is not None]
    return thresholds.change(uses) if uses else None
