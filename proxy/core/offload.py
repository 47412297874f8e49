"""should_offload: prefill a HEAVY request on a peer P and hand its KV to D, or compute it on D.

Every policy is a pure function `Question -> Decision`; POLICIES holds them by name. An offload is
a preference: whatever a policy says, a failure of the offload means colocation, never an error.

`seed-heuristic` and `seed-cost` are the rules that this project began with: by load alone, and by
seconds won and lost. `threshold` is llm-d's prefix-based P/D decider (nonCachedTokens).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proxy.core.types import Candidate, Reason

OVERLOAD_FACTOR = 1.5
"""`seed-heuristic`: P above this multiple of the fleet's mean ongoing tokens is overloaded."""
DISRUPTION_FACTOR = 0.5
"""`seed-cost`: chunked prefill blocks decoding only in part."""


@dataclass(frozen=True, slots=True)
class Question:
    """One HEAVY request before the choice. Times in seconds, throughput in tokens per second."""

    decode: Candidate
    prefill: Candidate | None
    mean_ongoing_tokens: float
    prompt_tokens: int
    heavy_threshold: int
    prefill_throughput: float
    kv_transfer_time_s: float
    non_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to offload to the question's P, and why."""

    offload: bool
    reason: Reason


def offload(reason: Reason) -> Decision:
    """Prefill on P."""
    return Decision(offload=True, reason=reason)


def colocate(reason: Reason) -> Decision:
    """Compute on D."""
    return Decision(offload=False, reason=reason)


def seed_heuristic(q: Question, p: Candidate) -> Decision:
    """Offload when P carries less than D, is not overloaded, and D decodes."""
    if p.load.ongoing_tokens >= q.decode.load.ongoing_tokens:
        d_idle = not q.decode.load.ongoing_tokens
        return colocate(Reason.D_IDLE if d_idle else Reason.P_BUSIER_THAN_D)
    if p.load.ongoing_tokens > OVERLOAD_FACTOR * q.mean_ongoing_tokens:
        return colocate(Reason.P_OVERLOADED)
    if q.decode.load.decode_tokens > 0:
        return offload(Reason.P_IDLE_D_BUSY)
    return colocate(Reason.D_IDLE)


def seed_cost(q: Question, p: Candidate) -> Decision:
    """Seconds of decode disruption saved on D against P's queue and transfer."""
    if q.decode.load.decode_tokens <= 0:
        return colocate(Reason.D_IDLE)
    benefit_s = DISRUPTION_FACTOR * q.decode.new_tokens / q.prefill_throughput
    cost_s = p.load.ongoing_tokens / q.prefill_throughput + q.kv_transfer_time_s
    if benefit_s > cost_s:
        return offload(Reason.P_IDLE_D_BUSY)
    pays_with_idle_p = benefit_s > q.kv_transfer_time_s
    return colocate(Reason.P_OVERLOADED if pays_with_idle_p else Reason.MARGIN)


def threshold(q: Question, p: Candidate) -> Decision:
    """llm-d's rule: remote iff prompt and its part not cached on D reach the limit; 0 is off."""
    del p
    limit = q.non_cached_tokens
    if limit > 0 and min(q.prompt_tokens, q.decode.new_tokens) >= limit:
        return offload(Reason.NON_CACHED_TOKENS)
    return colocate(Reason.BELOW_THRESHOLD)


def never(q: Question, p: Candidate) -> Decision:
    """Compute everything where it decodes."""
    del q, p
    return colocate(Reason.POLICY_NEVER)


def always(q: Question, p: Candidate) -> Decision:
    """Offload every HEAVY request that has a peer."""
    del q, p
    return offload(Reason.POLICY_ALWAYS)


Policy = Callable[[Question, Candidate], Decision]

POLICIES: dict[str, Policy] = {
    "seed-heuristic": seed_heuristic,
    "seed-cost": seed_cost,
    "threshold": threshold,
    "never": never,
    "always": always,
}


def should_offload(policy: str, q: Question) -> Decision:
    """The decision for one request; KeyError for a name that is not in POLICIES."""
    if q.decode.new_tokens < q.heavy_threshold:
        return colocate(Reason.BELOW_THRESHOLD)
    if q.prefill is None:
        return colocate(Reason.NO_PEER)
    return POLICIES[policy](q, q.prefill)
