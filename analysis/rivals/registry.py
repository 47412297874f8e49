"""The league's policies: published routing rules of other projects, and the proxy's own.

Each is a pure function over a PlacementView, with the defaults that its project publishes. Prefix
hits and loads are as this proxy knows them; only the decision is the rival's.

Rules for separate prefill and decode pools are adapted to a fleet in which every instance does
both. D is chosen by the project's decode (or only) profile, P by its prefill profile among the
others. A rival's state is in an object made per run. RIVALS names them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from analysis.rivals.dynamo import DynamoKv, isl_or_load, rule_of_2025
from analysis.rivals.offload import AibrixCombined, Placed, always_remote, llm_d_decider
from analysis.rivals.placement import (
    AibrixPrefixCache,
    ConsistentHash,
    RoundRobin,
    Smetric,
    cache_aware,
    least_requests,
    llm_d_scorers,
    sticky,
)
from proxy.core.placement.decision import Decide


@dataclass(frozen=True, slots=True)
class Rival:
    """A rule's source, how to make it for one run, and the fields of RouterConfig that it sets.

    `make` gets one engine's KV tokens, since some rules depend on KV use. It returns None if the
    router decides by its own options.
    """

    source: str
    make: Callable[[int], Decide | None]
    options: Mapping[str, Any] = field(default_factory=dict)


def _ours(policy: str, source: str) -> Rival:
    return Rival(source, lambda _kv: None, {"offload_policy": policy})


RIVALS: dict[str, Rival] = {
    "cost": _ours("cost", "this project: proxy/core/placement/cost.py"),
    "session-sticky": Rival(
        "the baseline: vllm-project/router sticky_least_loaded, everything computed at home",
        lambda _kv: Placed(sticky),
    ),
    "round-robin": Rival("vllm-project/router round_robin", lambda _kv: Placed(RoundRobin())),
    "least-requests": Rival(
        "production-stack, LiteLLM: fewest requests in flight", lambda _kv: Placed(least_requests)
    ),
    "consistent-hash": Rival(
        "vllm-project/router consistent_hash over the session id",
        lambda _kv: Placed(ConsistentHash()),
    ),
    "cache-aware": Rival(
        "SGLang gateway (smg) cache_aware: abs 64, rel 1.5, cache_threshold 0.3",
        lambda _kv: Placed(cache_aware),
    ),
    "smetric": Rival("vllm-project/router src/policies/smetric.rs", lambda _kv: Smetric()),
    "dynamo-kv": Rival(
        "Dynamo KV router: prefill scale 1, overlap credit 1, temperature 0",
        lambda _kv: DynamoKv(),
    ),
    "dynamo-lmetric": Rival(
        "Dynamo router_selection_policy=lmetric", lambda _kv: DynamoKv(multiplies=True)
    ),
    "dynamo-isl-or-load": Rival(
        "Dynamo --router-conditional-disagg isl_or_load: 2048, 0.7, queue threshold 4",
        lambda _kv: DynamoKv(isl_or_load),
    ),
    "dynamo-2025": Rival(
        "Dynamo 2025: max-local-prefill-length 1000, max-prefill-queue-size 2",
        lambda _kv: DynamoKv(rule_of_2025),
    ),
    "llm-d-scorers": Rival(
        "llm-d EPP defaults: prefix 3, queue 2, kv-cache-utilization 2",
        lambda kv: Placed(llm_d_scorers(kv)),
    ),
    "llm-d": Rival(
        "llm-d EPP default scorers with prefix-based-pd-decider, nonCachedTokens 512",
        lambda kv: Placed(llm_d_scorers(kv), llm_d_decider),
    ),
    "aibrix-prefix-cache": Rival(
        "AIBrix prefix-cache: imbalance 8, 1 standard deviation",
        lambda _kv: Placed(AibrixPrefixCache()),
    ),
    "aibrix-combined": Rival(
        "AIBrix pd with combined pods: drain scores 0.25 and 1.0", lambda _kv: AibrixCombined()
    ),
    "seed-heuristic": _ours(
        "seed-heuristic", "ours, by load: P has less load than D, is not overloaded, and D decodes"
    ),
    "seed-cost": _ours(
        "seed-cost", "ours, by seconds: half the prefill on D against P's queue and the transfer"
    ),
    "threshold": _ours("threshold", "llm-d nonCachedTokens 512 on our placement, HEAVY only"),
    "always": _ours("always", "offload every HEAVY request, on our placement"),
    "never": _ours("never", "our placement, everything computed where it decodes"),
    "always-remote": Rival(
        "llm-d always-disagg-pd-decider on its default scorers",
        lambda kv: Placed(llm_d_scorers(kv), always_remote),
    ),
}
BASELINE = "session-sticky"
"""The policy whose saturation rate is load 1.0."""
DEFAULT = "cost"
"""The proxy's default policy."""
