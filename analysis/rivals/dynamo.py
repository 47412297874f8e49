"""Dynamo's rules: KV-aware placement, and whether another instance prefills.

Dynamo charges an instance the prefill tokens that it has not yet computed, and the blocks of its
unfinished prompts. A block that several prompts share counts once. Output is not counted
(`--router-track-output-blocks` is off by default).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from analysis.rivals.offload import Decider, placed_on
from proxy.core.placement.candidates import Candidate
from proxy.core.placement.decision import Choice, PlacementView
from proxy.core.routing.route import Route
from proxy.core.types import RequestFacts

BLOCK_TOKENS = 16
"""vLLM's block size: Dynamo counts load in blocks, which matters only for lmetric's +1."""
ISL_TOKENS, ISL_RATIO, QUEUE_THRESHOLD = 2048, 0.7, 4.0
"""Dynamo: eff_isl and ratio below which a prefill is local; --router-queue-threshold."""
MAX_LOCAL_PREFILL_TOKENS, MAX_PREFILL_QUEUE = 1000, 2
"""Dynamo 2025: max-local-prefill-length and max-prefill-queue-size."""


class ActiveBlocks:
    """Number of unfinished requests per block of an instance's prompts.

    Hashes chain, so an instance that has a block of a prompt has all before it.
    """

    def __init__(self) -> None:
        self._holders: dict[str, Counter[int]] = {}
        self._given: dict[int, tuple[RequestFacts, str]] = {}
        """By a request's `id`: itself, so that no other one gets that, and its instance."""

    def with_prompt(self, name: str, facts: RequestFacts) -> float:
        """Return the tokens of the instance's blocks if it were given the request too."""
        holders, blocks = self._holders.get(name, Counter()), facts.block_hashes
        shared = bisect_left(blocks, 1, key=lambda block: block not in holders)
        return (len(holders) + len(blocks) - shared) * facts.block_tokens

    def give(self, name: str, facts: RequestFacts) -> None:
        """Count a request that the instance has been given."""
        self._given[id(facts)] = facts, name
        self._holders.setdefault(name, Counter()).update(facts.block_hashes)

    def release(self, facts: RequestFacts) -> None:
        """Count a request no longer, if it is counted."""
        _, name = self._given.pop(id(facts), (facts, ""))
        if not name:
            return
        holders = self._holders[name]
        for block in facts.block_hashes:
            holders[block] -= 1
            if not holders[block]:
                del holders[block]


class DynamoKv:
    """Dynamo's KV router: prefill load after the request, less its overlap, plus the decode load.

    `multiplies`: `router_selection_policy=lmetric`, the product of the two. `remote`: its
    conditional disaggregation, if any.
    """

    def __init__(self, remote: Decider | None = None, *, multiplies: bool = False) -> None:
        self._remote = remote
        self._multiplies = multiplies
        self._active = ActiveBlocks()

    def __call__(self, scene: PlacementView) -> Choice:
        """Choose, and count the request there, in place of an earlier attempt."""
        facts = scene.facts
        self._active.release(facts)
        d = min(scene.free, key=lambda c: (self._cost(c, facts), c.last_placed))
        self._active.give(d.instance.name, facts)
        return placed_on(scene, d, self._remote)

    def on_finish(
        self, route: Route, facts: RequestFacts, output_tokens: int, decode_s: float, now_s: float
    ) -> None:
        """Count a request that has ended no longer."""
        del route, output_tokens, decode_s, now_s
        self._active.release(facts)

    def on_failed(self, route: Route, facts: RequestFacts, now_s: float) -> None:
        """Count a request that has failed no longer."""
        del route, now_s
        self._active.release(facts)

    def _cost(self, c: Candidate, facts: RequestFacts) -> float:
        prefill = max(0, c.load.prefill_tokens + facts.prompt_tokens - c.hit_tokens)
        decode = self._active.with_prompt(c.instance.name, facts)
        if self._multiplies:
            return prefill / BLOCK_TOKENS * (decode / BLOCK_TOKENS + 1.0)
        return prefill + decode


def isl_or_load(scene: PlacementView, d: Candidate, p: Candidate) -> bool:
    """Dynamo conditional disaggregation: local if few tokens are new on D, or if P is busy."""
    new, prompt = d.new_tokens, scene.facts.prompt_tokens
    short = new < ISL_TOKENS and new / prompt < ISL_RATIO
    busy = p.load.prefill_tokens > QUEUE_THRESHOLD * scene.config.max_num_batched_tokens
    return not (short or busy)


def rule_of_2025(scene: PlacementView, d: Candidate, p: Candidate) -> bool:
    """Dynamo's first router: remote if many tokens are new and the prefill queue is short."""
    del scene
    return d.new_tokens > MAX_LOCAL_PREFILL_TOKENS and p.load.prefill_requests < MAX_PREFILL_QUEUE
