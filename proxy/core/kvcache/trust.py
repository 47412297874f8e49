"""The choice between two predictions of cached tokens: by the prompt's key, or its session.

The key predicts what the index of prefixes has (`Reuse.hits`). It is wrong where the engine renders
other text than the key holds, as for a client whose form nobody has seen yet. The session predicts
what its last turn left: prompt and answer as the engine counted them, as far as the turn before
was found again. It knows nothing of evictions, and nothing of other instances. Each prediction is
held against what the engine reports, by session and by kind of client (`RequestFacts.client`). The
key is believed until the session has been right more often.

Where both agree within a block the session's is taken: it counts in the engine's tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from proxy.core.kvcache.engine_cache import EngineCache
from proxy.core.kvcache.sessions import Past
from proxy.core.types import RequestFacts

MARGIN: Final = 0.1
"""The session's prediction is used where the key's error is larger by this part of the prompt."""
SESSION_GAIN: Final = 0.5
KIND_GAIN: Final = 0.1
"""Weights of a report in the mean errors of its session, and of its kind of client."""
KIND_REPORTS: Final = 4
"""Reports of a kind of client before its errors count for sessions without any."""
NEVER_FOUND: Final = 0.1
"""Below this part of what keys of a kind predict, they predict nothing."""
ROUNDING_BLOCKS: Final = 2
"""A prompt that lacks fewer of the engine's blocks was found whole."""
LEAST_SCALE: Final = 0.5
MOST_SCALE: Final = 2.0
ENGINES_MAX: Final = 256
KINDS_MAX: Final = 64
TENANTS_MAX: Final = 1024
"""Kinds of clients that are known of a tenant, and tenants; the least recently used one goes."""
Counts = tuple[int, int | None, int]
"""An answer's counts: tokens of the prompt, those of them that were cached, and of the answer."""


@dataclass(slots=True, eq=False, init=False)
class Kind:
    """Reports on a kind of client."""

    key_error: float
    """Mean error of the key's prediction, as a part of the prompt."""
    session_error: float
    """Mean error of the session's own prediction, as a part of the prompt."""
    found_part: float
    """Part found of the key's prediction."""
    prompt_part: float
    """As in `Past`."""
    answer_part: float
    """As in `Past`."""
    reports: int
    found_at: dict[str, float]
    """Recent `found_part` of engines that found less than predicted, by name."""

    def __init__(self) -> None:
        self.found_at = {}
        self.key_error = self.session_error = 0.0
        self.found_part = self.prompt_part = 1.0
        self.answer_part = 0.5
        self.reports = 0

    def found(self, name: str, part: float) -> None:
        """Learn which part of what the key predicted an engine has found."""
        self.found_part += KIND_GAIN * (part - self.found_part)
        was = self.found_at.pop(name, 1.0)
        if (now := was + SESSION_GAIN * (part - was)) < 1.0 - NEVER_FOUND:
            self.found_at[name] = now
            if len(self.found_at) > ENGINES_MAX:
                del self.found_at[next(iter(self.found_at))]

    def finds_nothing_at(self, name: str) -> bool:
        """Whether what keys predict for it is never found at one engine, lately."""
        return self.found_at.get(name, 1.0) < NEVER_FOUND

    @property
    def finds_nothing(self) -> bool:
        """Whether what keys predict for it is never found."""
        return self.reports >= KIND_REPORTS and self.found_part < NEVER_FOUND


class Trust:
    """Reports on each kind of client, by tenant."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[str, OrderedDict[str, Kind]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._kinds.values()))

    def refine(self, facts: RequestFacts, past: Past | None) -> None:
        """Correct a prompt's estimated length by what its session's last one was counted as."""
        if past is None or not past.estimate or not past.block_tokens:
            return
        # What a block is taken for may have changed since.
        before = past.estimate * facts.block_tokens / past.block_tokens
        scale = min(MOST_SCALE, max(LEAST_SCALE, past.prompt_tokens / before))
        more = facts.estimate - before
        if more >= 0:
            facts.prompt_tokens = past.prompt_tokens + max(1, round(more * scale))
        else:
            facts.prompt_tokens = max(1, round(facts.estimate * scale))
        facts.scale = scale

    def believed(
        self,
        facts: RequestFacts,
        past: Past | None,
        caches: list[EngineCache],
        hits: list[int],
        is_exact: list[bool],
    ) -> tuple[list[int], bool]:
        """The tokens that are expected in each cache, of `hits` that the key predicts.

        And whether it is doubtful what the session's home has: both predictions differ, and too few
        answers have told which one is right. `is_exact`: whether a cache's engine has published
        what it holds.
        """
        kind = self._known(facts)
        if kind is not None and kind.found_at:
            # An engine that keeps nothing, whatever is placed there.
            lost = [kind.finds_nothing_at(cache.name) for cache in caches]
            both = zip(hits, lost, is_exact, strict=True)
            hits = [0 if is_lost and not exact else hit for hit, is_lost, exact in both]
        if past is None or past.cache not in caches:
            return ([0] * len(hits) if kind is not None and kind.finds_nothing else hits), False
        at = caches.index(past.cache)
        key, own = hits[at], past.predicted(facts.prompt_tokens)
        if self._agree(facts, past, key, own):
            if is_exact[at]:
                return hits, False
            believed, is_doubted = hits.copy(), False
        elif _prefers_session(past, kind):
            # What the key predicts is found nowhere else either.
            part = 0.0 if kind is not None and kind.finds_nothing else past.key_part
            believed, is_doubted = [int(hit * part) for hit in hits], True
        else:
            return hits, not past.reports or kind is None or kind.reports < KIND_REPORTS
        believed[at] = own
        return believed, is_doubted

    def _agree(self, facts: RequestFacts, past: Past, key: int, own: int) -> bool:
        """Whether both predictions are the same but for what the key cannot see.

        That is a part of a block, and the answer, which the next turn brings as text.
        """
        block = facts.block_tokens * facts.scale
        most = key + 2 * block + past.answer_part * past.answer_tokens
        return key > 0 and key - 2 * block <= own <= most

    def told(
        self,
        facts: RequestFacts,
        past: Past | None,
        cache: EngineCache,
        key_tokens: int,
        counts: Counts,
        *,
        is_session: bool,
    ) -> Past | None:
        """Take in what an answer's engine counted; `key_tokens`: what the key predicted there.

        Gives the session's past for its next turn.
        """
        prompt, cached, answer = counts
        if cached is not None:
            cache.note_found(cached)
        kind = self._kind(facts)
        if cached is not None and key_tokens > 2 * facts.block_tokens:
            found = min(1.0, cached / key_tokens)
            if past is not None:
                past.key_part = found
            kind.found(cache.name, found)
            if past is None:
                kind.reports += 1
        if not is_session:
            return None
        if past is None:
            past = Past(cache, kind.prompt_part, kind.answer_part)
        elif cached is not None:
            self._tested(past, kind, cache, key_tokens, counts)
        past.cache = cache
        past.prompt_tokens, past.answer_tokens = prompt, answer
        past.estimate, past.block_tokens = facts.estimate, facts.block_tokens
        return past

    def _tested(
        self, past: Past, kind: Kind, cache: EngineCache, key_tokens: int, counts: Counts
    ) -> None:
        """Hold both predictions against an answer, or the key's alone if the session has moved."""
        prompt, cached, _ = counts
        assert cached is not None
        key_error = abs(key_tokens - cached) / prompt
        if past.cache is not cache:
            # Where neither saw anything, nothing is tested.
            if max(key_tokens, cached) > 2 * past.block_tokens:
                _key_was(past, key_error)
            return
        own_error = abs(past.predicted(prompt) - cached) / prompt
        kind.key_error += KIND_GAIN * (key_error - kind.key_error)
        kind.session_error += KIND_GAIN * (own_error - kind.session_error)
        kind.reports += 1
        past.session_error += SESSION_GAIN * (own_error - past.session_error)
        _key_was(past, key_error)
        self._found(past, kind, prompt, cached)

    @staticmethod
    def _found(past: Past, kind: Kind, prompt: int, cached: int) -> None:
        """Learn which parts of the last turn this one has found."""
        block, before = past.cache.engine_block_tokens, min(past.prompt_tokens, prompt)
        if cached > before - ROUNDING_BLOCKS * block:
            past.prompt_part = 1.0
            # Of an answer that ends in its prompt's last block nothing can be told.
            least = before // block * block
            most = (before + past.answer_tokens) // block * block
            if most > least:
                part = max(0.0, min(1.0, (cached - least) / (most - least)))
                past.answer_part = part
                kind.answer_part += SESSION_GAIN * (part - kind.answer_part)
        else:
            past.prompt_part, past.answer_part = cached / before, 0.0
        kind.prompt_part += KIND_GAIN * (past.prompt_part - kind.prompt_part)

    def _known(self, facts: RequestFacts) -> Kind | None:
        kinds = self._kinds.get(facts.tenant)
        return kinds.get(facts.client) if kinds is not None else None

    def _kind(self, facts: RequestFacts) -> Kind:
        kinds = self._kinds.get(facts.tenant)
        if kinds is None:
            kinds = self._kinds[facts.tenant] = OrderedDict()
            if len(self._kinds) > TENANTS_MAX:
                self._kinds.popitem(last=False)
        else:
            self._kinds.move_to_end(facts.tenant)
        kind = kinds.get(facts.client)
        if kind is None:
            kind = kinds[facts.client] = Kind()
            if len(kinds) > KINDS_MAX:
                kinds.popitem(last=False)
        else:
            kinds.move_to_end(facts.client)
        return kind


def _key_was(past: Past, error: float) -> None:
    """Note the error of what the key predicted for a session's turn, as a part of its prompt."""
    past.key_error += SESSION_GAIN * (error - past.key_error)
    past.reports += 1


def _prefers_session(past: Past, kind: Kind | None) -> bool:
    """Whether the session has been right more often than the key."""
    if past.reports:
        return past.key_error - past.session_error > MARGIN
    if kind is None or kind.reports < KIND_REPORTS:
        return False
    return kind.key_error - kind.session_error > MARGIN
