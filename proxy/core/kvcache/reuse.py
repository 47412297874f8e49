"""Reuse of cached prefixes: predicted when a request is placed, corrected by its answer.

The prefix index knows the prompts routed to each instance, in the order of eviction. A prompt takes
its room when it is placed. Blocks in use stay until their request ends. Blocks freed by an answer
are the newest. Siblings of a request in flight count the blocks that it will leave (`inflight`).

What the engine evicted all the same shows in its answers. If fewer tokens were cached than the
index has blocks, that may also be a prompt that the engine reads in another way than the index. So
two prompts of different beginnings have to say so (`EngineCache.witnesses`); then all counts as
evicted that is as old as what both lack. Where several tenants use an engine, they have to be two
tenants' prompts: of one tenant's, what that tenant alone has used counts as evicted. The blocks
that are left show the size of the cache, which is learned where the engine reports none. Only the
computing instance counts, and only its earlier blocks. KV from a peer counts as cached at D, and a
sibling's unfinished blocks may be computed twice without an eviction.
"""

from __future__ import annotations

from typing import Final

from proxy.core.kvcache.engine_cache import EngineCache, Use
from proxy.core.kvcache.inflight import Inflight
from proxy.core.kvcache.prefix_index import PrefixIndex
from proxy.core.types import RequestFacts

JOIN_TOKENS: Final = 16_384
"""From this length on a sibling's computation is worth waiting for. A shorter prefix is cheaper
computed twice than all its sessions in one place (seen in the league)."""
SLACK_BLOCKS: Final = 2
SLACK_RATIO: Final = 0.1
"""A shortfall within these is none: the index counts bytes, the engine tokens in blocks of its own,
and text is not equally dense in tokens everywhere."""
REPORTED_SLACK_RATIO: Final = 0.0025
"""A reported size moves in blocks by more than this part."""
GROWTH: Final = 1.05
"""Growth of a learned size that unexpected hits show to be too small."""
BELIEVED: Final = 2
"""Prompts that have to lack blocks before the index is trimmed. Of those with the same beginning
one counts, until prompts with this beginning were found that often as expected."""
NONE_AGREED: Final = -1
"""The age that too few witnesses agree on: nothing is as old."""
WITNESSES_MAX: Final = 8
RIGHT_MAX: Final = 64
STEP: Final = 0.5
"""Part of the way a learned size moves down at a shortfall: a flushed cache is not small."""


def cached_ratio(cached_tokens: object, prompt_tokens: object) -> float | None:
    """The part of a prompt that an engine found in its cache, by its usage; or None."""
    if isinstance(cached_tokens, int) and isinstance(prompt_tokens, int) and prompt_tokens > 0:
        return max(0.0, min(1.0, cached_tokens / prompt_tokens))
    return None


def usage_ratio(usage: object) -> float | None:
    """`cached_ratio` of an OpenAI usage object."""
    counts = usage if isinstance(usage, dict) else {}
    details = counts.get("prompt_tokens_details")
    found = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached_ratio(found, counts.get("prompt_tokens"))


def is_far_above(facts: RequestFacts, held: int, hit: int) -> bool:
    """Whether the approximate index expects more than `held` tokens, beyond its own error."""
    return hit - held > SLACK_BLOCKS * facts.block_tokens


class Reuse:
    """The uses of prefixes by requests, over one PrefixIndex."""

    def __init__(self, prefixes: PrefixIndex) -> None:
        self._prefixes = prefixes
        self._inflight = Inflight()

    def limit(
        self,
        cache: EngineCache,
        reported_tokens: int | None,
        assumed_tokens: int | None,
        facts: RequestFacts,
    ) -> None:
        """The size of an engine's KV cache: as it reports, or else as the others' is.

        What a block has in tokens is learned: as long as it hardly changes the limit stays, for
        what a smaller one evicts does not come back. A size that is reported is not itself an
        estimate, so it follows more closely: 1 % of a cache is a turn of a session.
        """
        tokens = reported_tokens or assumed_tokens
        if not tokens or facts.block_tokens <= 0:
            return
        blocks = int(tokens / facts.block_tokens)
        slack_ratio = SLACK_RATIO
        if reported_tokens:
            last, slack_ratio = cache.reported_blocks, REPORTED_SLACK_RATIO
        elif cache.learned_blocks is not None:
            return
        else:
            last, blocks = cache.limit_blocks, max(blocks, cache.proven_blocks)
        if last is None or abs(blocks - last) > slack_ratio * last:
            if reported_tokens:
                cache.reported_blocks, cache.learned_blocks = blocks, None
                cache.learned_tokens = None
            self._prefixes.limit(cache, blocks)

    def hits(self, facts: RequestFacts) -> dict[str, int]:
        """Leading blocks of the prompt that each instance has, or will once it has computed.

        What is in flight counts where it spares a long computation.
        """
        hashes = facts.block_hashes
        hit = self._prefixes.hits(hashes)
        if len(hashes) * facts.block_tokens < JOIN_TOKENS or not self._inflight:
            return hit
        # Only prompts that continue the hit are compared; most in flight do not.
        for there in {0, *hit.values()}:
            for cache in self._inflight.begun_at(hashes, there):
                if hit.get(cache.name, 0) == there:
                    reach = self._inflight.reach(cache, hashes, there)
                    if (reach - there) * facts.block_tokens >= JOIN_TOKENS:
                        hit[cache.name] = reach
        return hit

    def expected(
        self, cache: EngineCache, facts: RequestFacts, held: int, hit: int, *, goes_on: bool
    ) -> int:
        """Tokens of a prompt that an engine will have when it begins with it.

        By its events it has `held` now, and if it `goes_on` perhaps a part of the next message;
        `hit` is what the approximate index expects. Only that one sees into messages, and what
        siblings on their way will leave. A smaller size is not used: it lacks answers and others'
        prompts, and evicts earlier than the engine. Using it from half on cost 100,000 hit tokens
        in 502 requests of `make bench-routing`.
        """
        if goes_on:
            return hit
        if hit - held < JOIN_TOKENS or not cache.computing:
            return held
        known = facts.hit_tokens(self._prefixes.held(cache, facts.block_hashes))
        return hit if hit - known >= JOIN_TOKENS else held

    def begin_use(self, cache: EngineCache, facts: RequestFacts) -> Use:
        """An engine begins to compute a prompt."""
        hashes = facts.block_hashes
        blocks = self._prefixes.held(cache, hashes)
        hold = self._prefixes.hold(cache, hashes, blocks)
        use = Use(cache, blocks, hold.age if hold else 0, hold)
        if hold is not None and cache.reported_blocks is None:
            _age, use.older_blocks = cache.runs.last_run(hashes, blocks)
            if not self._prefixes.lacks_room(cache):
                use.kept_blocks = cache.runs.kept_longer(hold.age, cache.holds)
                use.ahead_blocks = cache.reserved_blocks
        if blocks < len(hashes):
            if hold is not None:
                self._prefixes.goes_on(hold)
            reach = self._inflight.reach(cache, hashes, blocks)
            self._inflight.enter(cache, use, hashes, reach)
            self._reserve(cache)
        return use

    def received(self, cache: EngineCache, facts: RequestFacts) -> Use:
        """An engine got a prompt's KV from a peer."""
        use = Use(cache, None)
        self.computed(use, facts)
        return use

    def computed(self, use: Use, facts: RequestFacts) -> None:
        """The prompt's blocks are computed, and in use."""
        self._leave(use)
        cache, hashes, tenant = use.cache, facts.block_hashes, facts.tenant
        use.hold = self._prefixes.insert_held(cache, hashes, cache.computing_blocks, tenant)

    def released(self, use: Use, facts: RequestFacts, answer_tokens: int = 0) -> None:
        """The answer is whole: all blocks are free again, as the most recently used.

        The next turn brings the hashes of the answer's blocks; until then they only take room.
        """
        cache, hold, hashes = use.cache, use.hold, facts.block_hashes
        self._leave(use)
        if hold is None or not cache.runs.is_newest(hashes, hold.age):
            age = self._prefixes.insert(cache, hashes, 0, facts.tenant)
        else:
            age = hold.age
        if facts.block_tokens > 0:
            filled = int((facts.prompt_tokens + answer_tokens) / facts.block_tokens)
            self._prefixes.answered(cache, age, filled - len(hashes))
        self._reserve(cache)

    def end_use(self, use: Use) -> None:
        """End a use, whole or given up; without effect when repeated."""
        if self._leave(use):
            self._reserve(use.cache)

    def _leave(self, use: Use) -> bool:
        """End the use's hold and what it has in flight; false if it had neither."""
        hold, use.hold = use.hold, None
        if hold is not None:
            self._prefixes.release(hold)
        return self._inflight.leave(use.cache, use) or hold is not None

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is being computed and nothing held in use."""
        return not self._inflight and not self._prefixes.holds

    def _reserve(self, cache: EngineCache) -> None:
        self._prefixes.reserve(cache, cache.computing_blocks)

    def reported(self, use: Use, facts: RequestFacts, cached_ratio: float) -> bool:
        """The engine had found `cached_ratio` of the prompt in its cache, 0..1.

        Not to be called for answers in several parts or with the prompt in them, which read the
        cache in other ways. True if the size of the cache was learned from it.
        """
        if use.blocks is None or facts.block_tokens <= 0:
            return False
        cache = use.cache
        found = facts.blocks_of(cached_ratio * facts.prompt_tokens)
        slack = max(SLACK_BLOCKS, SLACK_RATIO * use.blocks)
        if found < use.blocks - slack:
            return self._believes(use, facts) and self._trimmed(use, facts, found, slack)
        self._was_right(use, facts, slack)
        if found > use.blocks + slack:
            limit = cache.limit_blocks
            return limit is not None and self._learn(cache, limit * GROWTH, facts)
        run = use.blocks - use.older_blocks
        if use.kept_blocks is not None and run > slack:
            # A shorter run may be gone with what is found all the same; and what may be rounding
            # may as well be the evicted tail.
            held = use.kept_blocks + min(run, int(found) - use.older_blocks)
            self._prove(cache, max(cache.proven_blocks, held), facts)
        return False

    def _believes(self, use: Use, facts: RequestFacts) -> bool:
        """Whether prompts of several beginnings say that what was there is gone, whoever's it is.

        Trims the index to what at least two of them agree on, of one tenant's blocks or of all.
        """
        cache, root = use.cache, facts.block_hashes[0]
        who: int | str = root
        if cache.right.get(root, 0) >= BELIEVED and use.blocks:
            # Prompts that begin so are read as the index does: each of them counts.
            who = facts.session_id or facts.block_hashes[use.blocks - 1]
        witnesses, tenant = cache.witnesses, facts.tenant
        cache.serves(tenant)
        witnesses.pop((tenant, who), None)
        witnesses[tenant, who] = use.age
        if len(witnesses) > WITNESSES_MAX:
            del witnesses[next(iter(witnesses))]
        if cache.is_shared:
            # A tenant can have its prompts read in another way than the index reads them.
            own = _agreed([age for whose, age in witnesses.items() if whose[0] == tenant])
            self._prefixes.trim_of(cache, tenant, own)
            _forget(witnesses, own, tenant)
            newest: dict[str, int] = {}
            for whose, age in witnesses.items():
                newest[whose[0]] = max(age, newest.get(whose[0], age))
            agreed = _agreed(list(newest.values()))
        else:
            agreed = _agreed(list(witnesses.values()))
        if agreed == NONE_AGREED:
            return False
        self._prefixes.trim(cache, agreed)
        _forget(witnesses, agreed)
        return True

    def _was_right(self, use: Use, facts: RequestFacts, slack: float) -> None:
        """Note a prompt found as expected: it refutes that all of its age is gone."""
        if not use.blocks or use.blocks <= slack:
            return
        cache, root = use.cache, facts.block_hashes[0]
        for who in [who for who, age in cache.witnesses.items() if age >= use.age]:
            del cache.witnesses[who]
        cache.right[root] = cache.right.pop(root, 0) + 1
        if len(cache.right) > RIGHT_MAX:
            del cache.right[next(iter(cache.right))]

    def _trimmed(self, use: Use, facts: RequestFacts, found: float, slack: float) -> bool:
        """Learn the size of a cache from what it has left; true if one was learned."""
        cache = use.cache
        shown = _size_shown(use, found, slack)
        if found > use.older_blocks + slack and shown < cache.proven_blocks:
            # A part was left, so nothing was flushed: the proof and this are both estimates.
            blocks = cache.proven_blocks + int(STEP * (shown - cache.proven_blocks))
            self._prove(cache, blocks, facts)
        return self._learn(cache, shown, facts)

    def _prove(self, cache: EngineCache, blocks: int, facts: RequestFacts) -> None:
        cache.proven_blocks = blocks
        cache.proven_tokens = int(blocks * facts.block_tokens)

    def _learn(self, cache: EngineCache, blocks: float, facts: RequestFacts) -> bool:
        if cache.reported_blocks is not None:
            return False
        size = max(blocks, len(facts.block_hashes), cache.proven_blocks)
        cache.learned_blocks = size
        cache.learned_tokens = int(size * facts.block_tokens)
        self._prefixes.limit(cache, int(size))
        return True


def _agreed(ages: list[int]) -> int:
    """The age of what enough witnesses lack; all as old is gone."""
    return sorted(ages)[-BELIEVED] if len(ages) >= BELIEVED else NONE_AGREED


def _forget(
    witnesses: dict[tuple[str, int | str], int], agreed: int, tenant: str | None = None
) -> None:
    """Drop the witnesses of what is trimmed; of one tenant's, or of all."""
    for who, age in list(witnesses.items()):
        if age <= agreed and (tenant is None or who[0] == tenant):
            del witnesses[who]


def _size_shown(use: Use, found: float, slack: float) -> float:
    """The size in blocks of a cache that had only `found` blocks of a prompt.

    An engine evicts the tail of the run that was used the longest ago, of those not in use. If part
    of that run was still there, the cache was full with it and all that is kept longer. If none of
    it was, what is kept longer is the most that it can hold, and is believed by steps.
    """
    cache, learned = use.cache, use.cache.learned_blocks
    kept = cache.blocks
    if use.kept_blocks is not None:
        kept = use.kept_blocks + use.ahead_blocks
    if cache.limit_blocks is not None:
        kept = min(kept, cache.limit_blocks)
    left = found - use.older_blocks
    if use.kept_blocks is not None and left > slack:
        shown = kept + left
        return shown if learned is None else learned + STEP * (shown - learned)
    return float(kept) if learned is None else min(learned, learned + STEP * (kept - learned))
