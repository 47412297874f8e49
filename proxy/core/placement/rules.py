"""Policies made of rules: a placement (or the session's home) gives D, an offload rule a P.

`--placement` is one of PLACEMENTS: a number per candidate, the lowest wins. Ties go to the instance
with fewer ongoing tokens, then fewer sessions, then the longest time since its last placement. An
offload rule (OFFLOAD_RULES) is a pure function from an OffloadQuestion to an OffloadDecision, asked
for HEAVY requests only; `ruled` makes a policy of it. An offload is a preference: whatever a rule
says, a failure of the offload means colocation, never an error.

`seed-heuristic` and `seed-cost` are this project's first rules: by load alone, and by seconds won
and lost. `threshold` is llm-d's prefix-based P/D decider (nonCachedTokens).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from proxy.core.placement.candidates import Candidate, Candidates
from proxy.core.placement.decision import (
    Choice,
    Decide,
    PlacementView,
    Size,
    chosen,
    no_peer,
    peers,
    size_on,
)
from proxy.core.types import Reason

Placement = Callable[[Candidates], list[float]]


def affinity(free: Candidates) -> list[float]:
    """Tokens to compute before the first token: the instance's backlog and the new tokens."""
    most = free.prompt_tokens
    pairs = zip(free.loads, free.hit_tokens, strict=True)
    return [load.prefill_tokens + most - hit for load, hit in pairs]


def least_tokens(free: Candidates) -> list[float]:
    """Ongoing tokens, whatever prefix is cached."""
    return [load.ongoing_tokens for load in free.loads]


def round_robin(free: Candidates) -> list[float]:
    """Sequence number of the last placement: the instance unused for longest wins."""
    return list(free.last_placed)


PLACEMENTS: dict[str, Placement] = {
    "affinity": affinity,
    "least-tokens": least_tokens,
    "round-robin": round_robin,
}
STICKY = frozenset({"affinity", "least-tokens"})
"""Placements that keep a session on its home."""
OVERLOAD_FACTOR: Final = 1.5
"""`seed-heuristic`: P above this multiple of the fleet's mean ongoing tokens is overloaded."""
DISRUPTION_FACTOR: Final = 0.5
"""`seed-cost`: share of a prefill's time that decoding loses, since prefills are chunked."""


@dataclass(frozen=True, slots=True)
class OffloadQuestion:
    """The facts for an offload rule. Times in seconds, throughput in tokens per second.

    `no_peer`: the reason to give where there is no `prefill`.
    """

    decode: Candidate
    prefill: Candidate | None
    mean_ongoing_tokens: float
    prompt_tokens: int
    heavy_threshold: int
    prefill_throughput: float
    kv_transfer_time_s: float
    non_cached_tokens: int
    no_peer: Reason = Reason.NO_PEER


@dataclass(frozen=True, slots=True)
class OffloadDecision:
    """Whether to offload to the question's P, and the reason."""

    offload: bool
    reason: Reason


def offload(reason: Reason) -> OffloadDecision:
    """Decision to compute on P."""
    return OffloadDecision(offload=True, reason=reason)


def colocate(reason: Reason) -> OffloadDecision:
    """Decision to compute on D."""
    return OffloadDecision(offload=False, reason=reason)


def seed_heuristic(q: OffloadQuestion, p: Candidate) -> OffloadDecision:
    """Offload when P has less load than D, is not overloaded, and D decodes."""
    if p.load.ongoing_tokens >= q.decode.load.ongoing_tokens:
        d_idle = not q.decode.load.ongoing_tokens
        return colocate(Reason.D_IDLE if d_idle else Reason.P_BUSIER_THAN_D)
    if p.load.ongoing_tokens > OVERLOAD_FACTOR * q.mean_ongoing_tokens:
        return colocate(Reason.P_OVERLOADED)
    if q.decode.load.decode_tokens > 0:
        return offload(Reason.P_IDLE_D_BUSY)
    return colocate(Reason.D_IDLE)


def seed_cost(q: OffloadQuestion, p: Candidate) -> OffloadDecision:
    """Offload when the decode time saved on D exceeds P's queue plus the transfer."""
    if q.decode.load.decode_tokens <= 0:
        return colocate(Reason.D_IDLE)
    benefit_s = DISRUPTION_FACTOR * q.decode.new_tokens / q.prefill_throughput
    cost_s = p.load.ongoing_tokens / q.prefill_throughput + q.kv_transfer_time_s
    if benefit_s > cost_s:
        return offload(Reason.P_IDLE_D_BUSY)
    pays_with_idle_p = benefit_s > q.kv_transfer_time_s
    return colocate(Reason.P_OVERLOADED if pays_with_idle_p else Reason.MARGIN)


def threshold(q: OffloadQuestion, p: Candidate) -> OffloadDecision:
    """llm-d's rule: offload when prompt and new tokens on D both reach the limit; 0 is off."""
    del p
    limit = q.non_cached_tokens
    if limit > 0 and min(q.prompt_tokens, q.decode.new_tokens) >= limit:
        return offload(Reason.NON_CACHED_TOKENS)
    return colocate(Reason.BELOW_THRESHOLD)


def never(q: OffloadQuestion, p: Candidate) -> OffloadDecision:
    """Compute every request on D."""
    del q, p
    return colocate(Reason.POLICY_NEVER)


def always(q: OffloadQuestion, p: Candidate) -> OffloadDecision:
    """Offload every HEAVY request that has a P."""
    del q, p
    return offload(Reason.POLICY_ALWAYS)


OffloadRule = Callable[[OffloadQuestion, Candidate], OffloadDecision]
OFFLOAD_RULES: dict[str, OffloadRule] = {
    "seed-heuristic": seed_heuristic,
    "seed-cost": seed_cost,
    "threshold": threshold,
    "never": never,
    "always": always,
}


def should_offload(rule: str, q: OffloadQuestion) -> OffloadDecision:
    """The decision for one request; KeyError for a name that is not in OFFLOAD_RULES."""
    if q.decode.new_tokens < q.heavy_threshold:
        return colocate(Reason.BELOW_THRESHOLD)
    if q.prefill is None:
        return colocate(q.no_peer)
    return OFFLOAD_RULES[rule](q, q.prefill)


def ruled(rule: str) -> Decide:
    """The policy of an offload rule: `--placement` gives D, the rule says whether a P computes."""

    def decide(view: PlacementView) -> Choice:
        home = _home_that_only_decodes(view)
        if home is not None:
            p, reason = _offload(view, rule, home)
            if p is not None:
                return chosen(view, home, p, reason, placed=False)
        d, placed = place(view)
        p, reason = _offload(view, rule, d)
        return chosen(view, d, p, reason, placed=placed)

    return decide


def place(view: PlacementView) -> tuple[Candidate, bool]:
    """The session's home while it is free, else the best placement; True for the latter."""
    free, placement = view.free, view.config.placement
    home = free.place_of(view.home) if placement in STICKY else None
    if home is not None:
        return free.at(home), False
    scores = PLACEMENTS[placement](free)
    lowest = min(scores)
    best = [at for at, score in enumerate(scores) if score == lowest]
    if len(best) > 1:
        loads, sessions, last_placed = free.loads, free.sessions, free.last_placed
        best.sort(key=lambda at: (loads[at].ongoing_tokens, sessions[at], last_placed[at]))
    return free.at(best[0]), True


def _home_that_only_decodes(view: PlacementView) -> Candidate | None:
    """The session's home, if it may not compute but may be D of an offload."""
    if view.decode_only is None or view.config.placement not in STICKY:
        return None
    at = view.decode_only.place_of(view.home)
    return None if at is None else view.decode_only.at(at)


def _offload(view: PlacementView, rule: str, d: Candidate) -> tuple[Candidate | None, Reason]:
    """P (None: D computes) for a request that decodes on D, and the reason."""
    config = view.config
    if size_on(view, d) is not Size.HEAVY:
        return None, Reason.BELOW_THRESHOLD
    if not view.transfers.can_offload:
        return None, Reason.NO_CONNECTOR
    if not view.facts.offloadable:
        return None, Reason.NOT_OFFLOADABLE
    p = min(peers(view, d), key=lambda c: (c.load.ongoing_tokens, c.new_tokens), default=None)
    question = OffloadQuestion(
        decode=d,
        prefill=p,
        mean_ongoing_tokens=view.mean_ongoing_tokens,
        prompt_tokens=view.free.prompt_tokens,
        heavy_threshold=config.heavy_threshold,
        prefill_throughput=config.prefill_throughput,
        kv_transfer_time_s=config.kv_transfer_time_s,
        non_cached_tokens=config.offload_non_cached_tokens,
        no_peer=Reason.NO_PEER if p is not None else no_peer(view, d),
    )
    decision = should_offload(rule, question)
    return p if decision.offload else None, decision.reason
