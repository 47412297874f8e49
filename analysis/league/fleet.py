"""The engines of a league's run, and the scale of a regime: its load and KV."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from proxy.core.admission.queue import QueueLimits
from replayer.arguments import positive
from replayer.engine.costs import StepCost
from replayer.engine.types import EngineOptions
from replayer.virtual.requests import (
    ONE_REPLICA,
    QUEUE,
    HeatOptions,
    Loss,
    ReplicaOptions,
    Retry,
    WayNoise,
)

ABORT_TIMEOUT_S = 60.0
"""VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT as docs/deploy advises; vLLM's default pins KV for 480 s."""
PRESET = EngineOptions()


@dataclass(frozen=True, slots=True)
class EngineFleet:
    """Engines and client of a run; `options` are fields of RouterConfig.

    `longest_tokens`: tokens of the trace's longest request, the least KV of an engine. `way`,
    `joins_s`, `reports_kv`, `losses`, `migration_limit`, `heat`,
    `replicas`, `retry`, `queue`: see `VirtualOptions`. `cap`: most requests in flight on an engine.
    """

    engines: tuple[EngineOptions, ...]
    timeout_s: float = 60.0
    longest_tokens: int = 0
    estimate_factor: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    way: WayNoise = field(default_factory=WayNoise)
    joins_s: tuple[float, ...] = ()
    reports_kv: bool = True
    losses: tuple[Loss, ...] = ()
    migration_limit: int = 0
    heat: HeatOptions | None = None
    replicas: ReplicaOptions = ONE_REPLICA
    retry: Retry = field(default_factory=Retry)
    queue: QueueLimits = QUEUE
    cap: int | None = None

    @property
    def kv_tokens(self) -> int:
        """KV of the whole fleet, in tokens."""
        return sum(one.num_blocks * one.block_size for one in self.engines)


@dataclass(frozen=True, slots=True)
class Scale:
    """A regime's fleet KV per engine, saturation rate, and working set at that rate.

    `doubt`: what the regime claims and this scale does not keep, in words; empty if nothing.
    """

    regime: str
    kv_tokens: float
    rate: float
    working_set_tokens: float
    doubt: str = ""


def engines(
    instances: int, kv_tokens: float, block_tokens: int, like: EngineOptions = PRESET
) -> tuple[EngineOptions, ...]:
    """Make equal engines with this many tokens of KV each."""
    blocks = max(2, math.ceil(kv_tokens / block_tokens))
    one = replace(
        like,
        block_size=block_tokens,
        num_blocks=blocks,
        max_model_len=blocks * block_tokens,
        abort_timeout_s=ABORT_TIMEOUT_S,
    )
    return (one,) * instances


def slower(engine: EngineOptions, factor: float) -> EngineOptions:
    """Return the engine with every step `factor` times longer."""
    seconds = {name: value * factor for name, value in asdict(engine.step).items()}
    return replace(engine, step=StepCost(**seconds))


def given_scale(text: str) -> Scale:
    """Read RATE:KV, session starts per second at load 1.0 and KV tokens per engine."""
    rate, _, kv_tokens = text.partition(":")
    if not kv_tokens:
        raise argparse.ArgumentTypeError(f"must be RATE:KV, not {text!r}")
    return Scale("given", positive(kv_tokens), positive(rate), 0.0)
