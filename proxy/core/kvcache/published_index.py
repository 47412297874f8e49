"""The index by KV events: each engine's blocks of a prompt, and the ends of text prompts.

Where it is known what an engine has of a prompt, that counts; elsewhere the approximate index
(`prefix_index`) does. A prompt of token ids is looked up in the published blocks. A text prompt is
looked up by the ends of its messages. Each finished request gives its prompt's end in the chain of
its engine's blocks (`Ended`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from proxy.core.kvcache.claims import Belief, Claim, Part
from proxy.core.kvcache.links import Link, Lost, Said
from proxy.core.kvcache.published import MOST_STEPS, PublishedBlocks
from proxy.core.kvcache.sessions import ByTenant
from proxy.core.types import RequestFacts

BYTES_PER_BLOCK: Final = 400
"""Memory of one published block, as test_published.py measures it."""
BLOCKS_PER_END: Final = 4
"""At most one known end of a message per so many blocks, on so many ranks:"""
RANKS_PER_END: Final = 4
MOST_MODELS: Final = 64
MOST_UNLINKED: Final = 256
MOST_TRIES: Final = 4
"""Most ended requests whose chain is still looked for, and the tries for each."""
MOST_LINKED: Final = 16
"""Ended requests whose chain is looked for after one batch of events."""
MOST_WALKED: Final = 8192
"""Blocks that are walked back for them: a ms. With the next batch the others have their turn."""
MOST_ALIKE: Final = 8
"""Most chains of one length that are told apart."""
SURE: Final = 0.9
"""Where a smaller share of answers comes back unchanged, the engine is asked to tokenise them."""
RETURNS: Final = 0.2
UNSEEN: Final = 0.85
"""Weight of one observation of whether an answer came back as it was said, and the share that is
assumed of a model before the first."""
NO_HITS: dict[str, int] = {}
NO_END = (0, 0)


class Ended:
    """A request of text that an instance has answered, with the counts of its usage.

    `since_s`: time of its placement. `estimate`: the prompt's estimated length. `session`: the
    session's name as sent to the engine, or empty. `cached_tokens`: None if not reported.
    """

    __slots__ = (
        "cached_tokens",
        "estimate",
        "facts",
        "name",
        "output_tokens",
        "prompt_tokens",
        "session",
        "since_s",
        "tries",
    )

    def __init__(
        self,
        name: str,
        facts: RequestFacts,
        since_s: float,
        session: str,
        estimate: int,
        prompt_tokens: int,
        output_tokens: int,
        cached_tokens: int | None,
    ) -> None:
        self.name, self.facts, self.since_s, self.session = name, facts, since_s, session
        self.estimate, self.prompt_tokens = estimate, prompt_tokens
        self.output_tokens, self.cached_tokens = output_tokens, cached_tokens
        self.tries = 1


class PublishedIndex:
    """The published blocks of all instances, by instance and data-parallel rank."""

    def __init__(self, max_bytes: int) -> None:
        self._max_blocks = max(1, max_bytes // BYTES_PER_BLOCK)
        self._max_ends = max(1, self._max_blocks // BLOCKS_PER_END)
        self._ranks: dict[str, dict[int, PublishedBlocks]] = {}
        self._ends: OrderedDict[int, dict[PublishedBlocks, Link]] = OrderedDict()
        self._ends_of: ByTenant[int] = ByTenant()
        self._links = 0
        self._said, self._lost = Said(), Lost()
        self._returns: dict[str, float] = {}
        self._unlinked: list[Ended] = []
        self._beliefs: dict[tuple[str, bool], Belief] = {}

    def open(self, name: str, rank: int) -> PublishedBlocks:
        """An empty set for a rank of an instance, in place of an earlier one."""
        blocks = PublishedBlocks(name, self._said, self._lost)
        self._ranks.setdefault(name, {})[rank] = blocks
        return blocks

    def close(self, name: str, rank: int, blocks: PublishedBlocks) -> None:
        """Stop following the events of this rank, unless another set has replaced it."""
        ranks = self._ranks.get(name, {})
        blocks.renew(is_whole=False)
        blocks.is_live = blocks.is_connected = False
        if ranks.get(rank) is blocks:
            del ranks[rank]
            self._unlinked = [ended for ended in self._unlinked if ended.name != name]
        if not ranks:
            self._ranks.pop(name, None)
            for is_of_ids in (False, True):
                self._beliefs.pop((name, is_of_ids), None)

    def claim(self, facts: RequestFacts, name: str) -> Claim | None:
        """The cached part of a prompt by an instance's events; None if they do not tell."""
        if not self._ranks or not (facts.units or facts.ends):
            return None
        end_of = self._end_by_ids if facts.units else self._end_by_ends
        parts: list[Part] = []
        for rank, blocks in self.ranks(name).items():
            tokens, end = end_of(facts, blocks) if blocks.is_live else NO_END
            block = blocks.block(end) if tokens else None
            if block is None:
                return None
            parts.append(Part(rank, tokens, blocks.block_tokens, end, block))
        root = facts.units[-1] if facts.units else facts.ends[:2][-1]
        return Claim(name, parts, root, is_of_ids=bool(facts.units)) if parts else None

    def _end_by_ids(self, facts: RequestFacts, blocks: PublishedBlocks) -> tuple[int, int]:
        """Tokens of a prompt that a rank has, and the name of the last block of them."""
        held = blocks.held_of_ids(facts)
        return (held, blocks.end_of_ids(facts, held)) if held else NO_END

    def _end_by_ends(self, facts: RequestFacts, blocks: PublishedBlocks) -> tuple[int, int]:
        """By the last known end, without the answer behind it, which may come back otherwise."""
        size = blocks.block_tokens
        for end in reversed(facts.ends):
            link = self._ends.get(end, {}).get(blocks)
            if link is not None:
                if not size or blocks.has_orphans:
                    return NO_END
                return min(link.depth, link.prompt_tokens // size) * size, link.tail
        return NO_END

    def answered(self, claim: Claim, cached_tokens: int) -> None:
        """Hold a claim against what the answer found cached."""
        is_met, ranks = claim.is_met(cached_tokens), self.ranks(claim.name)
        if is_met is None or not ranks:
            return
        key = claim.name, claim.is_of_ids
        belief = self._beliefs.get(key)
        if belief is None:
            if is_met:
                return
            belief = self._beliefs[key] = Belief()
        if is_met or self._are_there(claim):
            belief.observe(claim.root, is_right=is_met)
        else:
            belief.gone()
        if belief.is_whole:
            del self._beliefs[key]

    def _are_there(self, claim: Claim) -> bool:
        """Whether no rank has removed the blocks of a claim since it was made."""
        ranks = self.ranks(claim.name)
        for part in claim.parts:
            blocks = ranks.get(part.rank)
            if blocks is None or blocks.block(part.name) is not part.block:
                return False
        return True

    def is_believed(self, name: str, *, of_ids: bool = False) -> bool:
        """Whether an instance's events are believed, `of_ids`: at least of prompts of token ids.

        What they say of a text also hangs on how its messages are read.
        """
        if not self._beliefs:
            return True
        for kind in (True,) if of_ids else (True, False):
            belief = self._beliefs.get((name, kind))
            if belief is not None and belief.is_lost:
                return False
        return True

    def kv_tokens(self, name: str) -> int | None:
        """The size of an instance's cache, as its evictions show; None before the first."""
        ranks = self.ranks(name).values()
        are_known = all(blocks.is_live and blocks.full_blocks for blocks in ranks)
        if not ranks or not are_known or not self.is_believed(name):
            return None
        return sum([blocks.full_blocks * blocks.block_tokens for blocks in ranks])

    def process_gone(self, name: str) -> None:
        """Another process is at an instance's address, or none: what is known ends with its events.

        Where they come they are the new process's.
        """
        for blocks in self.ranks(name).values():
            if not blocks.is_connected:
                blocks.is_live = False

    def ranks(self, name: str) -> dict[int, PublishedBlocks]:
        """The sets of an instance by rank; empty where its events are not followed."""
        return self._ranks.get(name, {})

    def all(self) -> dict[str, dict[int, PublishedBlocks]]:
        """Every set, by instance and rank."""
        return self._ranks

    def __len__(self) -> int:
        """Blocks of all sets together."""
        return sum(len(blocks) for ranks in self._ranks.values() for blocks in ranks.values())

    def sweep(self) -> bool:
        """Free a part of the sets that were lost; whether some are left."""
        return self._lost.sweep()

    def came(self, name: str) -> int:
        """A batch of events of an instance was taken in: it may have the end of a chain.

        Returns how many blocks were walked back to find out.
        """
        waiting, self._unlinked, tried = self._unlinked, [], 0
        before = walked = self._walked(name)
        for ended in waiting:
            if ended.name == name and tried < MOST_LINKED and walked - before < MOST_WALKED:
                tried += 1
                ended.tries += 1
                is_over = self._link(ended) or ended.tries >= MOST_TRIES
                walked = self._walked(name)
                if is_over:
                    continue
            self._unlinked.append(ended)
        return walked - before

    def _walked(self, name: str) -> int:
        return sum([blocks.walked for blocks in self.ranks(name).values()])

    def bound(self) -> str | None:
        """Give up sets while there are too many blocks; returns the name of their instance.

        They are the largest ones of the instance that has most over all its ranks. To be called
        after each batch of events.
        """
        over = len(self) - self._max_blocks
        if over <= 0:
            return None
        sums = [(sum(map(len, ranks.values())), name) for name, ranks in self._ranks.items()]
        name = max(sums)[1]
        for blocks in sorted(self._ranks[name].values(), key=len, reverse=True):
            over -= len(blocks)
            blocks.give_up()
            if over <= 0:
                break
        return name

    def hits(self, facts: RequestFacts) -> dict[str, int]:
        """Tokens of the prompt that instances have cached, of those where that is known.

        Of several ranks the best counts, as for any other estimate.
        """
        if not self._ranks:
            return NO_HITS
        return self._by_ids(facts) if facts.units else self._by_ends(facts)

    def _by_ids(self, facts: RequestFacts) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, ranks in self._ranks.items():
            if not self.is_believed(name, of_ids=True):
                continue
            for blocks in ranks.values():
                held = blocks.held_of_ids(facts) if blocks.is_live else None
                if held is not None and held >= found.get(name, 0):
                    found[name] = held
        return found

    def _by_ends(self, facts: RequestFacts) -> dict[str, int]:
        """By the deepest end of a message that is known on a rank."""
        found: dict[str, int] = {}
        seen: set[PublishedBlocks] = set()
        last = len(facts.ends) - 1
        for at in range(last, -1, -1):
            for blocks, link in self._ends.get(facts.ends[at], {}).items():
                if blocks in seen or not blocks.is_live:
                    continue
                seen.add(blocks)
                if not self.is_believed(blocks.name):
                    continue
                if not len(blocks) and self._is_empty(blocks.name):
                    found[blocks.name] = 0
                if link.prompt_tokens and not blocks.has_orphans:
                    # Without a size of blocks there is none.
                    size = blocks.block_tokens
                    held = self._held(blocks, link, facts, is_all=at == last) if size else 0
                    if held or blocks.is_whole:
                        found[blocks.name] = max(held, found.get(blocks.name, 0))
        return found

    def _is_empty(self, name: str) -> bool:
        """Whether it is known that an instance has nothing at all."""
        return all(b.is_live and b.is_whole and not len(b) for b in self.ranks(name).values())

    def goes_on(self, facts: RequestFacts, name: str) -> bool:
        """Whether an instance has more behind the last end of a message that is known there.

        Then it may have the beginning of this prompt's next message too.
        """
        ranks = self.ranks(name).values()
        for end in reversed(facts.ends):
            if (row := self._ends.get(end)) is not None:
                links = [(b, row[b]) for b in ranks if b.is_live and b.block_tokens and b in row]
                known = [(b, link) for b, link in links if link.prompt_tokens]
                if known:
                    return any(_goes_on(blocks, link) for blocks, link in known)
        return False

    def _held(
        self, blocks: PublishedBlocks, link: Link, facts: RequestFacts, *, is_all: bool
    ) -> int:
        """Tokens of a prompt that a link's chain still has.

        Behind the link's prompt its answer follows, where answers come back as they were said.
        """
        size = blocks.block_tokens
        if is_all:
            most = (link.prompt_tokens - 1) // size
        elif link.returned is not None:
            most = (link.prompt_tokens + link.returned) // size
        elif self._returns.get(facts.model, UNSEEN) > 0.5:
            most = link.most
        else:
            most = link.prompt_tokens // size
        return max(0, min(min(link.depth, most) * size, facts.prompt_tokens - 1))

    def doubted(self, end: int, model: str) -> tuple[str, Link] | None:
        """An instance's link whose answer should be compared with what came back behind `end`.

        None where the answer decides nothing, or comes back as it was said.
        """
        if self._returns.get(model, UNSEEN) >= SURE:
            return None
        for blocks, link in self._ends.get(end, {}).items():
            if link.ids and link.returned is None and blocks.is_live and blocks.block_tokens:
                prompt = link.prompt_tokens // blocks.block_tokens
                if prompt < min(link.depth, link.most):
                    return blocks.name, link
        return None

    def refine(self, facts: RequestFacts) -> None:
        """Correct a prompt's estimated length by an earlier prompt that it begins with."""
        if not self._ranks or not facts.ends:
            return
        last = len(facts.ends) - 1
        for at in range(last, -1, -1):
            for link in self._ends.get(facts.ends[at], {}).values():
                if link.estimate:
                    more = 0 if at == last else max(1, facts.estimate - link.estimate)
                    facts.prompt_tokens = link.prompt_tokens + more
                    return

    def ended(self, ended: Ended) -> None:
        """Note a text prompt that an instance computed and answered."""
        ranks = self._ranks.get(ended.name, {})
        if not ranks or not ended.facts.ends:
            return
        if any(blocks.is_live for blocks in ranks.values()):
            if self._link(ended):
                return
            # The events of its last step may come after its last token.
            self._unlinked.append(ended)
            if len(self._unlinked) > MOST_UNLINKED:
                del self._unlinked[0]
        self.left_unknown(ended.name, ended.facts, ended.prompt_tokens)

    def _link(self, ended: Ended) -> bool:
        """Link the ends of a prompt's messages to its chain of blocks, where that is found."""
        for blocks in self._ranks.get(ended.name, {}).values():
            size = blocks.block_tokens
            if not size or not blocks.is_live:
                continue
            if ended.tries == 1:
                self._learn_returns(blocks, ended)
            prompt = ended.prompt_tokens // size
            whole = (ended.prompt_tokens + ended.output_tokens - 1) // size
            if not whole:
                return True  # there is no block by which to know it
            tail = self._tail_of(blocks, ended, prompt, whole)
            if tail is not None:
                link = Link(
                    *(tail, blocks.depth_of(tail), ended.prompt_tokens, max(prompt, whole)),
                    ended.estimate,
                )
                if self._returns.get(ended.facts.model, UNSEEN) < SURE:
                    answered = link.depth * size - link.prompt_tokens
                    said = blocks.chains.ids_before(tail, answered)
                    link.wants_ids = bool(said) or answered <= 0
                    self._said.keep(link, ended.name, said)
                self._put(ended.facts.ends[-1], blocks, link, ended.facts.tenant)
                self._pass(blocks, ended, tail)
                return True
        return False

    def _tail_of(
        self, blocks: PublishedBlocks, ended: Ended, prompt: int, whole: int
    ) -> int | None:
        """The end of the chain that a request left; None where none fits, or several do.

        `prompt`: whole blocks of its prompt; `whole`: of prompt and answer.
        """
        least, most = (prompt, whole + 1) if ended.tries == 1 else (whole, whole)
        tails = blocks.ends_of(ended.since_s, ended.session, least, whole, most)
        tail = tails[0] if len(tails) == 1 else self._continuing(blocks, ended.facts, tails)
        return self._earlier_end(blocks, ended.facts, prompt) if tail is None else tail

    def left_unknown(self, name: str, facts: RequestFacts, prompt_tokens: int) -> None:
        """Note a prompt that an instance computed or received, with unknown place in its chains.

        No earlier end stands for this one then: what the engine has of it is up to the approximate
        index.
        """
        if not facts.ends:
            return
        end = facts.ends[-1]
        for blocks in self._ranks.get(name, {}).values():
            if size := blocks.block_tokens:
                old = self._ends.get(end, {}).get(blocks)
                if old is None or old.lacks(size):
                    link = Link(0, 0, 0, prompt_tokens // size)
                    self._put(end, blocks, link, facts.tenant)

    def _continuing(
        self, blocks: PublishedBlocks, facts: RequestFacts, tails: list[int]
    ) -> int | None:
        """The one of these chains that begins with an earlier prompt, as this one does."""
        if not 0 < len(tails) <= MOST_ALIKE:
            return None
        for end in reversed(facts.ends[:-1]):
            link = self._ends.get(end, {}).get(blocks)
            if link is not None and link.prompt_tokens:
                depth = min(link.depth, link.prompt_tokens // blocks.block_tokens)
                if not depth or blocks.depth_of(tails[0]) - depth > MOST_STEPS:
                    return None
                common = blocks.above(link.tail, depth)
                found = [tail for tail in tails if blocks.above(tail, depth) == common]
                return found[0] if common is not None and len(found) == 1 else None
        return None

    def _earlier_end(self, blocks: PublishedBlocks, facts: RequestFacts, prompt: int) -> int | None:
        """The end of an earlier prompt's chain that has all whole blocks of this one."""
        for end in reversed(facts.ends):
            link = self._ends.get(end, {}).get(blocks)
            if link is not None and link.prompt_tokens:
                return link.tail if link.depth >= max(1, prompt) else None
        return None

    def _learn_returns(self, blocks: PublishedBlocks, ended: Ended) -> None:
        """Learn whether the answer before this prompt was in it as it was said, token by token."""
        if ended.cached_tokens is None:
            return
        cached = ended.cached_tokens // blocks.block_tokens
        for end in reversed(ended.facts.ends[:-1]):
            link = self._ends.get(end, {}).get(blocks)
            if link is not None and link.is_unknown:
                return  # of that turn's answer nothing is known, and one before says nothing of it
            if link is not None and link.prompt_tokens:
                base = link.prompt_tokens // blocks.block_tokens
                if base < link.most <= link.depth and cached >= base:
                    model, seen = ended.facts.model, float(cached >= link.most)
                    known = self._returns.get(model, UNSEEN)
                    if model in self._returns or len(self._returns) < MOST_MODELS:
                        self._returns[model] = known + RETURNS * (seen - known)
                return

    def _pass(self, blocks: PublishedBlocks, ended: Ended, tail: int) -> None:
        """Note the ends of messages that a prompt passed.

        Where another one did so too, and both went on differently, the engine's count of cached
        tokens says where: the next one that differs there will find as much. What was evicted of a
        known one is there again.
        """
        size = blocks.block_tokens
        for end in reversed(ended.facts.ends[:-1]):
            link = self._ends.get(end, {}).get(blocks)
            if link is None:
                self._put(end, blocks, Link(0, 0, 0, 0), ended.facts.tenant)
                continue
            if link.lacks(size):
                depth = link.prompt_tokens // size
                if (common := blocks.above(tail, depth)) is not None:
                    again = Link(common, depth, link.prompt_tokens, depth, link.estimate)
                    self._put(end, blocks, again, ended.facts.tenant)
            elif not link.prompt_tokens and ended.cached_tokens:
                depth = ended.cached_tokens // size
                if link.is_unknown:
                    depth = min(depth, link.most)
                if (common := blocks.above(tail, depth)) is not None:
                    link = Link(common, depth, depth * size, depth)
                    self._put(end, blocks, link, ended.facts.tenant)
            return

    def _put(self, end: int, blocks: PublishedBlocks, link: Link, tenant: str) -> None:
        row = self._ends.setdefault(end, {})
        if (old := row.get(blocks)) is not None:
            blocks.chains.forget(old)
        else:
            self._links += 1
        row[blocks] = link
        if len(row) > sum(len(ranks) for ranks in self._ranks.values()):
            self._drop_closed(row)
        if link.prompt_tokens:
            blocks.chains.keep(link, link.tail, link.depth)
        self._ends.move_to_end(end)
        self._ends_of.use(end, tenant)
        most_links = RANKS_PER_END * self._max_ends
        while len(self._ends) > self._max_ends or self._links > most_links:
            oldest = self._ends_of.next_to_go(self._ends)
            self._ends_of.remove(oldest)
            gone = self._ends.pop(oldest)
            self._links -= len(gone)
            for where, old in gone.items():
                where.chains.forget(old)

    def _drop_closed(self, row: dict[PublishedBlocks, Link]) -> None:
        """Forget the links of sets that nobody follows any more: a popular end stays for long."""
        for blocks in list(row):
            if blocks not in self._ranks.get(blocks.name, {}).values():
                blocks.chains.forget(row.pop(blocks))
                self._links -= 1


def _goes_on(blocks: PublishedBlocks, link: Link) -> bool:
    """Whether more follows a link's prompt, all of which is there, than its answer."""
    depth = link.prompt_tokens // blocks.block_tokens
    return link.depth >= depth > 0 and blocks.goes_on(link.tail, depth)
