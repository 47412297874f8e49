"""What a tick sees, and what plugins say: observations, predictions, proposals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

COMPONENT = "combined"
"""The one component of a fleet whose instances prefill and decode."""


class Kind(StrEnum):
    """What a target says of a component's number of replicas."""

    SET = "set"
    AT_LEAST = "at_least"
    AT_MOST = "at_most"
    REJECT = "reject"


class Stage(StrEnum):
    """The stages of a tick at which plugins are asked, in their order."""

    PREDICT = "predict"
    PROPOSE = "propose"
    RECONCILE = "reconcile"
    CONSTRAIN = "constrain"


@dataclass(frozen=True, slots=True)
class Target:
    """One wish for one component; `replicas` has no meaning in a REJECT."""

    component: str
    kind: Kind
    replicas: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a plugin says at one stage. The smallest `priority` counts first."""

    plugin: str
    targets: tuple[Target, ...]
    priority: int = 100
    is_final: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Replicas:
    """A component's instances: those that serve, and those that were wanted last.

    `pending`: ordered and never ready yet, or leaving and still there. One that was ready and is
    down is lost, not pending.
    """

    ready: int
    expected: int
    pending: int = 0

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way."""
        return not self.pending


@dataclass(frozen=True, slots=True)
class Traffic:
    """What clients asked for in a window of `window_s` seconds.

    `requests`: offered, not completed. `isl_tokens`, `osl_tokens`: means of those that ended; None
    where none did. `hit_ratio`: of prompts, 0..1. `accept_length`: tokens per step and stream.
    `ttft_s`, `itl_s`: means of what clients saw; nothing is decided from them. `ended`: how many
    ended.
    """

    window_s: float
    requests: float
    isl_tokens: float | None = None
    osl_tokens: float | None = None
    hit_ratio: float | None = None
    accept_length: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Engine:
    """The mean state of one instance over a load interval.

    `wall_s`: of an iteration; None where no stream ran. `prefill_tokens`: computed per iteration.
    `decode_requests`, `decode_kv_tokens`: running. `queued_*`: waiting.
    """

    name: str
    wall_s: float | None
    prefill_tokens: float = 0.0
    decode_requests: float = 0.0
    decode_kv_tokens: float = 0.0
    queued_prefill_tokens: float = 0.0
    queued_decode_kv_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one instance of a component can hold and cost.

    `step_tokens`: the most of a step (`--max-num-batched-tokens`); `kv_tokens`: None while unknown.
    """

    gpus: int = 1
    step_tokens: int = 8192
    max_seqs: int = 256
    kv_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the next interval brings; None: not predicted."""

    next_num_req: float | None = None
    next_isl: float | None = None
    next_osl: float | None = None
    hit_ratio: float | None = None
    accept_length: float | None = None


class FinalPrediction(Prediction):
    """A prediction behind which none of a larger priority counts, not even for other figures."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Context:
    """One tick, as every plugin sees it. `now_s` is monotonic; what is not known is None.

    `traffic`: of the last throughput interval. `recent`: since the tick before. `prediction`: at
    the stage PREDICT what a builtin forecast has said, behind it what the stage has come to.
    """

    tick: int
    now_s: float
    replicas: Mapping[str, Replicas]
    capabilities: Mapping[str, Capabilities]
    traffic: Traffic | None = None
    engines: Mapping[str, tuple[Engine, ...]] = field(default_factory=dict)
    prediction: Prediction = Prediction()
    baseline: Mapping[str, int] = field(default_factory=dict)
    recent: Traffic | None = None
