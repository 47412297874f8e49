"""Recognition of a request's session, by its name and by its prompt.

A name alone says too little. Titles, summaries and other agents' requests come under a session's
name with other prompts. They take no turn, move no home, and get a place of their own once they
come back. An id may be a request's own, so it names a session once it has come back. A conversation
without a name is recognised by its prompt, which continues an earlier prompt. For clients whose
prompts begin differently each time, the last messages are compared. The first such turn makes it a
session.

What may become a session is remembered by what would show it (`Begun`): bounded by count and time,
with a share for each tenant.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from proxy.core.kvcache.engine_cache import EngineCache
from proxy.core.kvcache.sessions import EXPIRED, MARK, Form, Past, Sessions, Stay
from proxy.core.types import RequestFacts

SHORTER: Final = 0.9
"""A prompt that begins differently from the session's last one and is shorter than this part of it
is not a turn. Conversations grow, and compaction keeps their beginning."""
LONGER: Final = 1.5
"""One that is longer than this times the last one is none of its turns either."""
OTHERS_BELIEVED: Final = 3
"""Number of prompts in a row, each longer than the last, that continue a session whose prompts
never begin alike."""
MOST_BESIDE: Final = 8
"""Places beside a session's own, by its name; the oldest goes first."""
MOST_ALIKE: Final = 8
"""Conversations that have the same prompt so far."""
Evidence = str | int
"""Evidence of a session: a name that comes back, or the hash of a prompt that continues."""


class Found:
    """The session that a request is a turn of, before the request is placed.

    `key`: its name in the table; None where the request is a turn of none, as far as is known.
    `stay`: what is known of it; without a key that of the same request before. `evidence`: by which
    the request may turn out to be a session's first. `shown`: by what it was recognised, its prompt
    where `is_by_prompt`. `is_anew`: what the table has by this name is another's, of one request.
    """

    __slots__ = ("evidence", "is_anew", "is_by_prompt", "key", "shown", "stay")

    def __init__(
        self,
        key: str | None,
        stay: Stay | None = None,
        evidence: str | None = None,
        shown: Evidence | None = None,
        *,
        is_anew: bool = False,
        is_by_prompt: bool = False,
    ) -> None:
        self.key, self.stay, self.evidence, self.shown = key, stay, evidence, shown
        self.is_anew, self.is_by_prompt = is_anew, is_by_prompt

    @property
    def past(self) -> Past | None:
        """The session's last turn as its engine counted it."""
        stay = self.stay
        return None if stay is None or stay.cache.is_lost or self.is_anew else stay.past

    @property
    def home(self) -> str | None:
        """The instance that has the session's KV; None if unknown."""
        stay = self.stay
        if self.key is None or stay is None or stay.cache.is_lost:
            return None
        return stay.cache.name


NOBODY: Final = Found(None)


class Theirs:
    """One tenant's requests that may become sessions. `count`: of them, under whatever evidence."""

    __slots__ = ("by_evidence", "count", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.by_evidence: OrderedDict[Evidence, list[Stay]] = OrderedDict()
        self.count = 0


class Begun:
    """Requests that may become sessions, by the hashes that would show it.

    A tenant that fills it loses its own oldest ones, once it has more than its share. Shares are of
    the requests, as the bound is: many may have one hash.
    """

    def __init__(self, most: int, ttl_s: float) -> None:
        self._most, self._ttl_s = most, ttl_s
        self._of: dict[str, Theirs] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def first(self, tenant: str, evidence: Evidence, now_s: float) -> Stay | None:
        """The oldest match, preferably one without a running request.

        Of those whose KV may be there: not forgotten, not expired, not lost.
        """
        theirs = self._of.get(tenant)
        stays = theirs.by_evidence.get(evidence) if theirs is not None else None
        if stays is None:
            return None
        running: Stay | None = None
        for stay in stays:
            if stay.is_dropped or stay.cache.is_lost or now_s - stay.used_s > self._ttl_s:
                continue
            if not stay.running:
                return stay
            running = running or stay
        return running

    def add(self, tenant: str, evidence: Evidence, stay: Stay, now_s: float) -> None:
        """Remember a placed request that this would show to be a session's."""
        theirs = self._of.get(tenant)
        if theirs is None:
            theirs = self._of[tenant] = Theirs(tenant)
        entries = theirs.by_evidence
        stays = entries.get(evidence)
        if stays is None:
            entries[evidence] = [stay]
        else:
            entries.move_to_end(evidence)
            stays.append(stay)
        self._counted(theirs, 1)
        if stays is not None and len(stays) > MOST_ALIKE:
            del stays[0]
            self._counted(theirs, -1)
        for _ in range(EXPIRED):
            if not entries or now_s - next(iter(entries.values()))[-1].used_s <= self._ttl_s:
                break
            self._evict(theirs)
        while self._count > self._most:
            if theirs.count * len(self._of) < self._most:
                theirs = max(self._of.values(), key=_count)
            self._evict(theirs)

    def remove(self, tenant: str, evidence: Evidence, stay: Stay) -> None:
        """Remove a recognised request; the others under this evidence stay."""
        theirs = self._of.get(tenant)
        stays = theirs.by_evidence.get(evidence) if theirs is not None else None
        if theirs is None or stays is None or stay not in stays:
            return
        stays.remove(stay)
        self._counted(theirs, -1)
        if not stays:
            del theirs.by_evidence[evidence]

    def _evict(self, theirs: Theirs) -> None:
        _evidence, stays = theirs.by_evidence.popitem(last=False)
        self._counted(theirs, -len(stays))

    def _counted(self, theirs: Theirs, more: int) -> None:
        theirs.count += more
        self._count += more
        if not theirs.count:
            del self._of[theirs.tenant]


def _count(theirs: Theirs) -> int:
    return theirs.count


class Conversations:
    """Recognises the sessions of requests, over one table of them."""

    def __init__(self, sessions: Sessions, most: int, ttl_s: float) -> None:
        self._sessions = sessions
        self.begun = Begun(most, ttl_s)
        self._made = 0

    def find(self, facts: RequestFacts, now_s: float) -> Found:
        """The session that a request is a turn of; changes nothing."""
        if not facts.takes_turn:
            return NOBODY
        name, tenant = facts.session_id, facts.tenant
        if name is not None:
            return self._by_name(name, facts, now_s)
        if (own_id := facts.own_id) is not None:
            if self._sessions.entry(own_id, now_s) is not None:
                return self._by_name(own_id, facts, now_s)
            if (first := self.begun.first(tenant, own_id, now_s)) is not None:
                return _again(first, own_id)
        return self._by_prompt(facts, now_s)

    def _by_name(self, name: str, facts: RequestFacts, now_s: float) -> Found:
        stay = self._sessions.entry(name, now_s)
        if stay is not None and stay.cache.is_lost:
            return Found(name)
        form = stay.form if stay is not None else None
        block, end = _beginning(facts)
        if stay is not None and (form is None or _is_alike(form, block, end)):
            return Found(name, stay)
        beside = _beside(name, block, end)
        if (other := self._sessions.stay(beside)) is not None:
            return Found(beside, other)
        if stay is None or form is None:
            return Found(name)
        if (other := self.begun.first(facts.tenant, beside, now_s)) is not None:
            return _again(other, beside)
        return _otherwise(name, beside, stay, form, facts)

    def _by_prompt(self, facts: RequestFacts, now_s: float) -> Found:
        """The conversation that the prompt continues: from the end of an earlier prompt."""
        for evidence in (facts.ends, facts.tails):
            for back in range(1, len(evidence) + 1):
                shown = evidence[-back]
                stay = self.begun.first(facts.tenant, shown, now_s) if shown else None
                if stay is None or (stay.running and back > 1):
                    continue
                # The very prompt: the same request again, or another conversation like it.
                if back == 1 and not stay.is_idle_unserved:
                    continue
                key = stay.key or (None if back == 1 else f"{MARK}{self._made + 1}")
                return Found(key, stay, None, shown, is_by_prompt=True)
        return NOBODY

    def assign(
        self,
        found: Found,
        facts: RequestFacts,
        cache: EngineCache,
        now_s: float,
        shared_tokens: int = 0,
    ) -> Stay | None:
        """Note a request's placement as a turn of its session.

        None where it is none and can never turn out to be one.
        """
        if not facts.takes_turn:
            return None
        if found.key is None:
            return self._begin(found, facts, cache, now_s, shared_tokens)
        stay, key, tenant = found.stay, found.key, facts.tenant
        if found.shown is not None and stay is not None:
            for shown in stay.evidence if found.is_by_prompt else (found.shown,):
                self.begun.remove(tenant, shown, stay)
        if found.is_anew:
            self._set_aside(key, tenant, now_s)
            stay = None
        begun = stay if stay is not None and not stay.key else None
        turn = -1 if stay is None else stay.turn
        tokens = facts.prompt_tokens
        taken = self._sessions.assign(key, cache, now_s, tokens, shared_tokens, begun, tenant)
        assert taken is not None
        if found.is_by_prompt:
            self._made += begun is not None
            self._note_prompt(taken, facts, now_s)
        else:
            self._note_named(taken, facts, now_s, is_turn=taken.turn != turn)
        return taken

    def _set_aside(self, name: str, tenant: str, now_s: float) -> None:
        """Start the session of a name that was one request beside it."""
        other = self._sessions.take_off(name)
        if other is not None and (form := other.form) is not None:
            self.begun.add(tenant, _beside(name, form.block, form.end), other, now_s)

    def _begin(
        self,
        found: Found,
        facts: RequestFacts,
        cache: EngineCache,
        now_s: float,
        shared_tokens: int,
    ) -> Stay | None:
        """Remember a request that may turn out to be the first of a session."""
        if (stay := found.stay) is None:
            own_id, tenant, ends = facts.own_id, facts.tenant, facts.ends
            # A name's own requests are known by it, so their prompts stand for nobody else.
            end = ends[-1] if ends and facts.session_id is None else None
            if found.evidence is None and own_id is None and end is None:
                return None
            stay = Stay(cache, 0, now_s)
            for evidence in (found.evidence, own_id):
                if evidence is not None:
                    self.begun.add(tenant, evidence, stay, now_s)
            if end is not None:
                self._note_prompt(stay, facts, now_s)
            if found.evidence is not None:
                self._note_other(facts)
        stay.cache, stay.used_s, stay.shared_tokens = cache, now_s, shared_tokens
        stay.running += 1
        stay.tokens, stay.is_unserved = facts.prompt_tokens, True
        return stay

    def _note_prompt(self, stay: Stay, facts: RequestFacts, now_s: float) -> None:
        """Remember a prompt by the hashes of its possible next turn."""
        shows = (*facts.ends[-1:], *facts.tails[-1:])
        stay.evidence = tuple([shown for shown in shows if shown])
        for shown in stay.evidence:
            self.begun.add(facts.tenant, shown, stay, now_s)

    def _note_named(self, taken: Stay, facts: RequestFacts, now_s: float, *, is_turn: bool) -> None:
        """Note the latest prompt of a named session, or of a request beside it."""
        if facts.session_id is None:
            facts.session_id = facts.own_id
        self._note_form(taken, facts)
        if taken.key == facts.session_id:
            return
        main = self._sessions.stay(facts.session_id)
        if main is None:
            return
        if is_turn:  # what comes back beside a session has turns of the same count
            main.turn += 1
            taken.turn = main.turn
        form = main.form
        if form is not None and taken.key not in form.beside:
            form.beside = (*form.beside, taken.key)
            if len(form.beside) > MOST_BESIDE:
                self._sessions.forget(form.beside[0], now_s)
                form.beside = form.beside[1:]

    def _note_form(self, stay: Stay, facts: RequestFacts) -> None:
        block, end = _beginning(facts)
        form = stay.form
        if form is None:
            stay.form = Form(block, end, _size(facts))
            return
        if block is None and end is None:
            return
        form.is_kept = form.is_kept or _is_alike(form, block, end)
        form.block, form.end, form.size = block, end, _size(facts)
        form.others, form.other_size = 0, 0.0

    def _note_other(self, facts: RequestFacts) -> None:
        """Note a request under a session's name that begins differently: it is not a turn."""
        stay = self._sessions.stay(facts.session_id or facts.own_id)
        if stay is None or (form := stay.form) is None:
            return
        size = _size(facts)
        grows = form.other_size < size <= LONGER * form.other_size
        form.others = form.others + 1 if grows else 1
        form.other_size = size

    def end_session(self, name: str) -> bool:
        """Forget a session and all beside it; returns whether it had a home."""
        stay = self._sessions.stay(name)
        beside = stay.form.beside if stay is not None and stay.form is not None else ()
        for key in beside:
            self._sessions.end_session(key)
        return self._sessions.end_session(name)


def _again(first: Stay, name: str) -> Found:
    """The session of a name that came back; a repetition if the first request got no answer."""
    return Found(None, first) if first.is_idle_unserved else Found(name, first, shown=name)


def _beside(name: str, block: int | None, end: int | None) -> str:
    """The table's name for a request under a session's name that begins like this."""
    # Without a format: compiled, each is a call of `str.format`, and this is done for each request.
    return f"{name}{MARK}{block or end or 0}"


def _size(facts: RequestFacts) -> float:
    """A prompt's size in blocks, which does not depend on what was learned of tokens."""
    return facts.estimate / facts.block_tokens if facts.block_tokens > 0 else 0.0


def _beginning(facts: RequestFacts) -> tuple[int | None, int | None]:
    """Hashes of a prompt's first block, and up to the end of its first message."""
    hashes, ends = facts.block_hashes, facts.ends
    return (hashes[0] if hashes else None), (ends[0] if ends else None)


def _is_alike(form: Form, block: int | None, end: int | None) -> bool:
    """Whether a prompt begins like the session's last one; true if that one has no hashes."""
    if block is not None and block == form.block:
        return True
    if end is not None and form.end is not None:
        return end == form.end
    return form.block is None and form.end is None


def _otherwise(name: str, beside: str, stay: Stay, form: Form, facts: RequestFacts) -> Found:
    """The owner of a new request that begins differently from its name's session."""
    size = _size(facts)
    if SHORTER * form.size <= size <= LONGER * form.size:
        return Found(name, stay)
    if form.is_kept:
        return Found(None, None, beside)
    if size > form.size:
        # A title was asked for before the first turn. A prompt without a whole block may be a title
        # or not, and is no reason to go elsewhere.
        return Found(name, stay if form.block is None else None, is_anew=True)
    goes_on = form.other_size < size <= LONGER * form.other_size
    if form.others >= OTHERS_BELIEVED - 1 and goes_on and not stay.running:
        return Found(name, stay)
    return Found(None, None, beside)
