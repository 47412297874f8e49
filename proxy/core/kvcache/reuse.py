"""What will be reused of a prompt: predicted when it is placed, corrected when it is answered.

The prefix index knows what was routed where, in the order in which an engine evicts: what is being
computed takes its room when it is placed, what is in use stays, what an answer gave back is the
newest. Siblings of a request in flight count the blocks that it will leave (`inflight`).

What the engine evicted all the same shows in its answer. Fewer cached tokens than the index had
blocks mean that all of it is gone that was used before them; as many blocks as are left are what
the engine held, and where it reports no size, this is learned. Only the computing instance is
asked, and only about what was there: KV from a peer counts as cached at D, and what a sibling still
computes may be computed twice without anything having been evicted.
"""

from __future__ import annotations

from proxy.core.kvcache.eviction_order import Use
from proxy.core.kvcache.inflight import Inflight
from proxy.core.kvcache.prefix_index import PrefixIndex
from proxy.core.types import RequestFacts

JOIN_TOKENS = 16_384
"""From this length on a sibling's computation is worth waiting for; a shorter prefix is cheaper
computed twice than all its sessions in one place (seen in the league)."""
SLACK_BLOCKS = 2
SLACK_RATIO = 0.1
"""A shortfall within these is none: the index counts bytes, the engine tokens in blocks of its own,
and text is not equally dense in tokens everywhere."""
GROWTH = 1.05
"""A learned size that is too small shows in hits that nobody expected: it grows by this factor."""
STEP = 0.5
"""Part of the way that a learned size goes towards a smaller one: a flushed cache is not small."""


def cached_ratio(cached_tokens: object, prompt_tokens: object) -> float | None:
    """The part of a prompt that an engine found in its cache, where its usage tells."""
    if isinstance(cached_tokens, int) and isinstance(prompt_tokens, int) and prompt_tokens > 0:
        return max(0.0, min(1.0, cached_tokens / prompt_tokens))
    return None


def usage_ratio(usage: object) -> float | None:
    """The same of an OpenAI usage object."""
    counts = usage if isinstance(usage, dict) else {}
    details = counts.get("prompt_tokens_details")
    found = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached_ratio(found, counts.get("prompt_tokens"))


class Reuse:
    """Uses of prefixes, over one PrefixIndex."""

    def __init__(self, prefixes: PrefixIndex) -> None:
        self._prefixes = prefixes
        self._inflight = Inflight()
        self._learned: dict[str, float] = {}
        self._sized: dict[str, int] = {}

    def forget(self, instance: str) -> None:
        """An instance restarted or left."""
        self._prefixes.forget(instance)
        self._inflight.forget(instance)
        self._learned.pop(instance, None)
        self._sized.pop(instance, None)

    def limit(self, instance: str, kv_tokens: int | None, facts: RequestFacts) -> None:
        """The engine reports the size of its KV cache.

        What a block has in tokens is learned: as long as it hardly changes the limit stays, for
        what a smaller one evicts does not come back.
        """
        if kv_tokens and facts.block_tokens > 0:
            blocks, last = int(kv_tokens / facts.block_tokens), self._sized.get(instance)
            if last is None or abs(blocks - last) > SLACK_RATIO * last:
                self._sized[instance] = blocks
                self._learned.pop(instance, None)
                self._prefixes.limit(instance, blocks)

    def hits(self, facts: RequestFacts) -> dict[str, int]:
        """Leading blocks of the prompt that each instance has, or will once it has computed.

        What is in flight counts where it spares a long computation.
        """
        hashes = facts.block_hashes
        hit = self._prefixes.hits(hashes)
        if len(hashes) * facts.block_tokens < JOIN_TOKENS or not self._inflight:
            return hit
        # Who computes something else than what follows on a hit, as most do, is not looked at.
        for there in {0, *hit.values()}:
            for name in self._inflight.begun_at(hashes, there):
                if hit.get(name, 0) == there:
                    reach = self._inflight.reach(name, hashes, there)
                    if (reach - there) * facts.block_tokens >= JOIN_TOKENS:
                        hit[name] = reach
        return hit

    def begin(self, instance: str, incarnation: int, facts: RequestFacts) -> Use:
        """An instance is going to compute a prompt."""
        hashes = facts.block_hashes
        blocks = self._prefixes.held(instance, hashes)
        hold = self._prefixes.hold(instance, hashes, blocks)
        use = Use(instance, incarnation, blocks, hold.age if hold else 0, hold)
        if blocks < len(hashes):
            reach = self._inflight.reach(instance, hashes, blocks)
            self._inflight.enter(instance, use, hashes, reach)
            self._reserve(instance)
        return use

    def received(self, instance: str, incarnation: int, facts: RequestFacts) -> Use:
        """An instance got a prompt's KV from a peer."""
        use = Use(instance, incarnation, None)
        self.computed(use, facts)
        return use

    def computed(self, use: Use, facts: RequestFacts) -> None:
        """The prompt's blocks are there, and in use."""
        self.end(use)
        hashes = facts.block_hashes
        self._prefixes.insert(use.instance, hashes)
        blocks = self._prefixes.held(use.instance, hashes)
        use.hold = self._prefixes.hold(use.instance, hashes, blocks)

    def released(self, use: Use, facts: RequestFacts) -> None:
        """The answer is whole: its blocks are in use no more, and the newest."""
        hold, hashes = use.hold, facts.block_hashes
        self.end(use)
        if hold is None or not self._prefixes.is_newest(use.instance, hashes, hold.age):
            self._prefixes.insert(use.instance, hashes)

    def end(self, use: Use) -> None:
        """Over or given up; without effect when this was said before."""
        if use.hold is not None:
            self._prefixes.release(use.hold)
            use.hold = None
        if self._inflight.leave(use.instance, use):
            self._reserve(use.instance)

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is being computed and nothing held in use."""
        return not self._inflight.instances() and not self._prefixes.holds

    def _reserve(self, instance: str) -> None:
        self._prefixes.reserve(instance, self._inflight.blocks(instance))

    def reported(self, use: Use, facts: RequestFacts, cached_ratio: float) -> None:
        """The engine had found `cached_ratio` of the prompt in its cache, 0..1."""
        if use.blocks is None or not facts.offloadable or facts.block_tokens <= 0:
            # Answers in several parts, or with the prompt in them, read the cache in other ways.
            return
        found = cached_ratio * facts.prompt_tokens / facts.block_tokens
        slack = max(SLACK_BLOCKS, SLACK_RATIO * use.blocks)
        if found < use.blocks - slack:
            self._prefixes.trim(use.instance, use.age)
            left = self._prefixes.blocks(use.instance)
            size = self._learned.get(use.instance, left)
            self._learn(use.instance, min(size, size + STEP * (left - size)), facts)
        elif found > use.blocks + slack and use.instance in self._learned:
            self._learn(use.instance, self._learned[use.instance] * GROWTH, facts)

    def _learn(self, instance: str, blocks: float, facts: RequestFacts) -> None:
        if instance not in self._sized:
            # It held this prompt, at least.
            self._learned[instance] = max(blocks, len(facts.block_hashes))
            self._prefixes.limit(instance, int(self._learned[instance]))
