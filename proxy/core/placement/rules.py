"""Policies made of rules: the session's home or a score gives D, an offload rule may give a P.

`--placement` names a scorer (SCORERS): one number per candidate, the lowest wins. Equal scores go
to the instance with fewer ongoing tokens, then fewer sessions, then the longest wait for a
placement. `--offload-policy` names an offload rule (POLICIES): a pure function from a Question to a
Decision, asked for HEAVY requests only. An offload is a preference: whatever a rule says, a
failure of the offload means colocation, never an error.

`seed-heuristic` and `seed-cost` are the rules that this project began with: by load alone, and by
seconds won and lost. `threshold` is llm-d's prefix-based P/D decider (nonCachedTokens).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proxy.core.connectors import CONNECTORS
from proxy.core.placement.scene import Choice, PlacementView, Size, peers, size_on
from proxy.core.types import Candidate, Reason

Scorer = Callable[[Candidate], float]


def affinity(c: Candidate) -> float:
    """Tokens the instance computes before this request's first: its backlog and the new tokens."""
    return c.load.prefill_tokens + c.new_tokens


def least_tokens(c: Candidate) -> float:
    """Ongoing tokens, blind to prefixes."""
    return c.load.ongoing_tokens


def round_robin(c: Candidate) -> float:
    """The instance that has waited longest for a placement."""
    return c.last_placed


SCORERS: dict[str, Scorer] = {
    "affinity": affinity,
    "least-tokens": least_tokens,
    "round-robin": round_robin,
}
STICKY = frozenset({"affinity", "least-tokens"})
"""Placements that keep a session on its home."""
OVERLOAD_FACTOR = 1.5
"""`seed-heuristic`: P above this multiple of the fleet's mean ongoing tokens is overloaded."""
DISRUPTION_FACTOR = 0.5
"""`seed-cost`: chunked prefill blocks decoding only in part."""


@dataclass(frozen=True, slots=True)
class OffloadQuestion:
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
class OffloadDecision:
    """Whether to offload to the question's P, and why."""

    offload: bool
    reason: Reason


def offload(reason: Reason) -> OffloadDecision:
    """Prefill on P."""
    return OffloadDecision(offload=True, reason=reason)


def colocate(reason: Reason) -> OffloadDecision:
    """Compute on D."""
    return OffloadDecision(offload=False, reason=reason)


def seed_heuristic(q: OffloadQuestion, p: Candidate) -> OffloadDecision:
    """Offload when P carries less than D, is not overloaded, and D decodes."""
    if p.load.ongoing_tokens >= q.decode.load.ongoing_tokens:
        d_idle = not q.decode.load.ongoing_tokens
        return colocate(Reason.D_IDLE if d_idle else Reason.P_BUSIER_THAN_D)
    if p.load.ongoing_tokens > OVERLOAD_FACTOR * q.mean_ongoing_tokens:
        return colocate(Reason.P_OVERLOADED)
    if q.decode.load.decode_tokens > 0:
        return offload(Reason.P_IDLE_D_BUSY)
    return colocate(Reason.D_IDLE)


def seed_cost(q: OffloadQuestion, p: Candidate) -> OffloadDecision:
    """Seconds of decode disruption saved on D against P's queue and transfer."""
    if q.decode.load.decode_tokens <= 0:
        return colocate(Reason.D_IDLE)
    benefit_s = DISRUPTION_FACTOR * q.decode.new_tokens / q.prefill_throughput
    cost_s = p.load.ongoing_tokens / q.prefill_throughput + q.kv_transfer_time_s
    if benefit_s > cost_s:
        return offload(Reason.P_IDLE_D_BUSY)
    pays_with_idle_p = benefit_s > q.kv_transfer_time_s
    return colocate(Reason.P_OVERLOADED if pays_with_idle_p else Reason.MARGIN)


def threshold(q: OffloadQuestion, p: Candidate) -> OffloadDecision:
    """llm-d's rule: remote iff prompt and its part not cached on D reach the limit; 0 is off."""
    del p
    limit = q.non_cached_tokens
    if limit > 0 and min(q.prompt_tokens, q.decode.new_tokens) >= limit:
        return offload(Reason.NON_CACHED_TOKENS)
    return colocate(Reason.BELOW_THRESHOLD)


def never(q: OffloadQuestion, p: Candidate) -> OffloadDecision:
    """Compute everything where it decodes."""
    del q, p
    return colocate(Reason.POLICY_NEVER)


def always(q: OffloadQuestion, p: Candidate) -> OffloadDecision:
    """Offload every HEAVY request that has a peer."""
    del q, p
    return offload(Reason.POLICY_ALWAYS)


Policy = Callable[[OffloadQuestion, Candidate], OffloadDecision]
POLICIES: dict[str, Policy] = {
    "seed-heuristic": seed_heuristic,
    "seed-cost": seed_cost,
    "threshold": threshold,
    "never": never,
    "always": always,
}


def should_offload(policy: str, q: OffloadQuestion) -> OffloadDecision:
    """The decision for one request; KeyError for a name that is not in POLICIES."""
    if q.decode.new_tokens < q.heavy_threshold:
        return colocate(Reason.BELOW_THRESHOLD)
    if q.prefill is None:
        return colocate(Reason.NO_PEER)
    return POLICIES[policy](q, q.prefill)


def by_rules(scene: PlacementView) -> Choice:
    """What `--placement` and `--offload-policy` say."""
    d, placed = place(scene)
    size, p, decision = _offload(scene, d)
    return Choice(d, p if decision.offload else None, size, decision.reason, placed)


def place(scene: PlacementView) -> tuple[Candidate, bool]:
    """The session's home while it is free, else the best score."""
    config = scene.config
    if config.placement in STICKY:
        for candidate in scene.free:
            if candidate.instance.name == scene.home:
                return candidate, False
    scores = list(map(SCORERS[config.placement], scene.free))
    lowest = min(scores)
    best = [c for c, score in zip(scene.free, scores, strict=True) if score == lowest]
    return (best[0] if len(best) == 1 else min(best, key=_longest_unused)), True


def _longest_unused(c: Candidate) -> tuple[int, int, int]:
    return c.load.ongoing_tokens, c.sessions, c.last_placed


def _offload(scene: PlacementView, d: Candidate) -> tuple[Size, Candidate | None, OffloadDecision]:
    config, size = scene.config, size_on(scene, d)
    if size is not Size.HEAVY:
        return size, None, colocate(Reason.BELOW_THRESHOLD)
    if not CONNECTORS[config.kv_connector].can_offload:
        return size, None, colocate(Reason.NO_CONNECTOR)
    if not scene.facts.offloadable:
        return size, None, colocate(Reason.NOT_OFFLOADABLE)
    p = min(peers(scene, d), key=lambda c: (c.load.ongoing_tokens, c.new_tokens), default=None)
    question = OffloadQuestion(
        decode=d,
        prefill=p,
        mean_ongoing_tokens=scene.mean_ongoing_tokens(),
        prompt_tokens=scene.facts.prompt_tokens,
        heavy_threshold=config.heavy_threshold,
        prefill_throughput=config.prefill_throughput,
        kv_transfer_time_s=config.kv_transfer_time_s,
        non_cached_tokens=config.offload_non_cached_tokens,
    )
    return size, p, should_offload(config.offload_policy, question)
