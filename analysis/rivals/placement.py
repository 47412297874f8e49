"""Published rules that choose one instance for a request: placement without an offload.

Load is counted as each project counts it: requests in flight, tokens, or work waiting for prefill.
Ties go to the instance that has waited longest for a placement, where a project draws at random.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from proxy.core.placement.candidates import Candidate
from proxy.core.placement.decision import Choice, PlacementView, chosen
from proxy.core.routing.route import Route
from proxy.core.types import Load, Reason, RequestFacts

Place = Callable[[PlacementView], Candidate]
BALANCE_ABS_THRESHOLD, BALANCE_REL_THRESHOLD, CACHE_THRESHOLD = 64, 1.5, 0.3
"""SGLang gateway's command line defaults (vllm-project/router: 32, 1.1 and 0.5)."""
PREFIX_WEIGHT, QUEUE_WEIGHT, KV_WEIGHT = 3.0, 2.0, 2.0
"""llm-d's built-in weights of prefix-cache-, queue- and kv-cache-utilization-scorer."""
AIBRIX_IMBALANCE, AIBRIX_DEVIATIONS = 8, 1.0
"""AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT and ..._STANDARD_DEVIATION_FACTOR."""


def requests(load: Load) -> int:
    """Count the requests in flight, in any phase."""
    return load.prefill_requests + load.inbound_requests + load.decode_requests


def _least(c: Candidate) -> tuple[float, int]:
    return requests(c.load), c.last_placed


def least_requests(scene: PlacementView) -> Candidate:
    """Choose the instance with the fewest requests in flight."""
    return min(scene.free, key=_least)


def sticky(scene: PlacementView) -> Candidate:
    """Choose the session's home; for a new session, the instance with the fewest requests."""
    home = next((c for c in scene.free if c.instance.name == scene.home), None)
    return home or least_requests(scene)


class RoundRobin:
    """Each request goes to the next instance in turn."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, scene: PlacementView) -> Candidate:
        """Choose the next instance."""
        self._next += 1
        return scene.free[self._next % len(scene.free)]


class ConsistentHash:
    """Choose by the session id's place on a ring of virtual nodes; the load does not count."""

    NODES = 160

    def __init__(self) -> None:
        self._rings: dict[tuple[str, ...], list[tuple[int, int]]] = {}

    def __call__(self, scene: PlacementView) -> Candidate:
        """Choose the instance of the first node at or after the session's hash."""
        names = tuple(c.instance.name for c in scene.free)
        ring = self._rings.get(names)
        if ring is None:
            ring = self._rings[names] = sorted(
                (_digest(f"{name}:{node}"), number)
                for number, name in enumerate(names)
                for node in range(self.NODES)
            )
        key = _digest(scene.facts.session_id or str(scene.facts.block_hashes))
        return scene.free[next((n for at, n in ring if at >= key), ring[0][1])]


def _digest(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode())


def cache_aware(scene: PlacementView) -> Candidate:
    """SGLang gateway: shortest queue if imbalanced, else the longest match, else least loaded.

    A request without a match goes to the least loaded instance as in smg; older versions chose the
    smallest prefix tree.
    """
    loads = [requests(c.load) for c in scene.free]
    low, high = min(loads), max(loads)
    if high - low > BALANCE_ABS_THRESHOLD and high > BALANCE_REL_THRESHOLD * low:
        return least_requests(scene)
    best = max(scene.free, key=lambda c: c.hit_tokens)
    if best.hit_tokens / scene.facts.prompt_tokens > CACHE_THRESHOLD:
        return best
    return least_requests(scene)


def llm_d_scorers(kv_tokens: int) -> Place:
    """llm-d: the highest weighted sum of prefix match, free queue and free KV, each in 0..1."""

    def place(scene: PlacementView) -> Candidate:
        queues = [c.load.prefill_requests for c in scene.free]
        low, high = min(queues), max(queues)

        def score(c: Candidate) -> tuple[float, int]:
            prefix = c.hit_tokens / scene.facts.prompt_tokens
            queue = (high - c.load.prefill_requests) / (high - low) if high > low else 1.0
            kv = 1.0 - min(1.0, (c.load.ongoing_tokens + c.load.pinned_tokens) / kv_tokens)
            total = PREFIX_WEIGHT * prefix + QUEUE_WEIGHT * queue + KV_WEIGHT * kv
            return total, -c.last_placed

        return max(scene.free, key=score)

    return place


class AibrixPrefixCache:
    """AIBrix: the longest match whose load is within one standard deviation of the mean."""

    def __call__(self, scene: PlacementView) -> Candidate:
        """Choose the instance."""
        loads = [requests(c.load) for c in scene.free]
        if max(loads) - min(loads) > AIBRIX_IMBALANCE:
            return least_requests(scene)
        limit = statistics.fmean(loads) + AIBRIX_DEVIATIONS * statistics.pstdev(loads)
        matched = [c for c in scene.free if c.hit_tokens and requests(c.load) <= limit]
        matched.sort(key=lambda c: (-c.hit_tokens, requests(c.load)))
        return matched[0] if matched else least_requests(scene)


@dataclass(slots=True)
class _Worker:
    pending: float = 0.0
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=64))


class Smetric:
    """vllm-project/router's smetric: stay with the cache while its queue meets the TTFT target.

    The project gives no defaults. These are the ratio of the two terms of an 8B model's prefill,
    its tests' hit ratio and slack, and the league's own TTFT target. Work is in tokens where the
    project counts characters. Rates are learned as in the project: 90th percentile of 64, from 8
    on.
    """

    C_ATT = 1.9e-5
    HIT_RATIO = 0.5
    SLACK = 1.0
    TTFT_BASE_S, TTFT_PER_TOKEN_S = 2.0, 1e-4
    MIN_SAMPLES = 8

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._seen_tokens: dict[str, int] = {}
        self._charged: dict[int, tuple[RequestFacts, str, float]] = {}
        """By a request's `id`: itself, so that no other one gets that, its worker and its work."""

    def __call__(self, scene: PlacementView) -> Choice:
        """Choose, and charge the work until the first token, in place of an earlier attempt's."""
        facts = scene.facts
        self._release(facts)
        works = {c.instance.name: self._work(c, facts.prompt_tokens) for c in scene.free}
        queues = {name: self._queue(name) + work for name, work in works.items()}
        meets = {name: self._meets(name, queue, facts) for name, queue in queues.items()}
        previous = max(scene.free, key=lambda c: c.hit_tokens)
        expected = self._seen_tokens.get(facts.session_id or "", 0)
        stays = expected and previous.hit_tokens > self.HIT_RATIO * expected
        if stays and (meets[previous.instance.name] or not any(meets.values())):
            best = previous
        else:
            best = min(
                scene.free,
                key=lambda c: (queues[c.instance.name] * requests(c.load), c.last_placed),
            )
        name = best.instance.name
        self._charged[id(facts)] = facts, name, works[name]
        self._workers[name].pending += works[name]
        if facts.session_id is not None:
            self._seen_tokens[facts.session_id] = facts.prompt_tokens
        return chosen(scene, best, None, Reason.POLICY_NEVER, placed=True)

    def on_first_token(
        self, route: Route, facts: RequestFacts, ttft_s: float, cached: int, now_s: float
    ) -> None:
        """Release the work and learn the rate."""
        del cached, now_s
        work = self._release(facts)
        if work and ttft_s > 0.0:
            self._workers[route.decode.name].rates.append(work / ttft_s)

    def on_failed(self, route: Route, facts: RequestFacts, now_s: float) -> None:
        """Release the work of a request that never got its first token."""
        del route, now_s
        self._release(facts)

    def on_finish(
        self, route: Route, facts: RequestFacts, output_tokens: int, decode_s: float, now_s: float
    ) -> None:
        """Release what a stream was charged when it moved."""
        del route, output_tokens, decode_s, now_s
        self._release(facts)

    def _release(self, facts: RequestFacts) -> float:
        """Take back what a request is charged; gives its work, 0 where there is none."""
        _, name, work = self._charged.pop(id(facts), (facts, "", 0.0))
        if name:
            self._workers[name].pending -= work
        return work

    def _work(self, c: Candidate, length: int) -> float:
        n = c.new_tokens
        return n + self.C_ATT * n * (length - n / 2)

    def _queue(self, name: str) -> float:
        return max(0.0, self._workers.setdefault(name, _Worker()).pending)

    def _meets(self, name: str, queue: float, facts: RequestFacts) -> bool:
        rates = sorted(self._workers[name].rates)
        if len(rates) < self.MIN_SAMPLES:
            return True
        rate = rates[round((len(rates) - 1) * 0.9)]
        limit_s = self.TTFT_BASE_S + self.TTFT_PER_TOKEN_S * facts.prompt_tokens
        return queue / rate <= self.SLACK * limit_s
