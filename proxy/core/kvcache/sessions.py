"""The homes of sessions, and the holders of stored responses.

Both tables are bounded by time and count. When a table is full, the tenant with most entries loses
its least recently used one (`ByTenant`). A session that no engine ever served goes first.

A session's home is the cache that has its KV. Nothing is swept for a lost instance. The session has
no home any more, and its entry expires as others do, or is used again. An engine keeps the
responses that it stores in its own memory, so they are lost with its process.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from proxy.core.kvcache.engine_cache import EngineCache
from proxy.core.kvcache.live_kv import LiveKv, ReturnCurve

MARK: Final = chr(0xD800)
"""In names that the proxy makes itself: half of a surrogate pair, which no client's name has."""


K = TypeVar("K")
V = TypeVar("V")
EXPIRED: Final = 64
"""Entries that one request has a table forget at most: after an hour without any, all have expired,
and to forget 100,000 at once takes most of a second."""


class ByTenant(Generic[K]):
    """The keys of a table per tenant, and the key to drop when it is full.

    It is the oldest of the tenant that holds most, so what one tenant adds costs nobody else. Each
    step takes the same time, whatever the number of tenants. Nothing is kept for keys without a
    tenant, which all are where clients need no key: their order is the table's own.
    """

    __slots__ = ("_keys", "_most", "_owners", "_with")

    def __init__(self) -> None:
        self._owners: dict[K, str] = {}
        self._keys: dict[str, OrderedDict[K, None]] = {}
        self._with: dict[int, dict[str, None]] = {}
        """Tenants by how many keys they have; the last one came by its number last."""
        self._most = 0

    def use(self, key: K, tenant: str, *, is_oldest: bool = False) -> None:
        """A tenant uses a key, which is its own from now on; its last, or its oldest."""
        owner = self._owners.get(key, "")
        if owner != tenant:
            self.remove(key)
        if not tenant:
            return
        keys = self._keys.get(tenant)
        if keys is None:
            keys = self._keys[tenant] = OrderedDict()
        if owner != tenant:
            keys[key] = None
            self._owners[key] = tenant
            self._recount(tenant, len(keys) - 1, len(keys))
        keys.move_to_end(key, last=not is_oldest)

    def remove(self, key: K) -> None:
        """Remove a key."""
        owner = self._owners.pop(key, "")
        if not owner:
            return
        keys = self._keys[owner]
        del keys[key]
        self._recount(owner, len(keys) + 1, len(keys))
        if not keys:
            del self._keys[owner]

    def _recount(self, tenant: str, before: int, now: int) -> None:
        if before:
            others = self._with[before]
            del others[tenant]
            if not others:
                del self._with[before]
        if now:
            self._with.setdefault(now, {})[tenant] = None
        if now > self._most or (before == self._most and before not in self._with):
            self._most = now

    def next_to_go(self, table: OrderedDict[K, V]) -> K:
        """The oldest key of whoever holds most of a table, which is not empty.

        Of several that hold as many it is the one that came to hold so many last.
        """
        if len(table) - len(self._owners) >= self._most:
            for key in table:
                if key not in self._owners:
                    return key
        tenant = next(reversed(self._with[self._most]))
        return next(iter(self._keys[tenant]))


Looks = tuple[int | None, int | None, float, bool]
"""A form's block, end, size, and whether it is kept."""


class Form:
    """The form of a session's prompts, by its last turn.

    `block`, `end`: hashes of the first block and of the prompt up to the end of its first message;
    None where it has none. `size`: of its prompt, in blocks. `is_kept`: a turn began like the one
    before. `others`: requests under its name since then, each longer than the last, that begin
    otherwise; `other_size`: of the last. `beside`: names in the table of what else has its name.
    """

    __slots__ = ("beside", "block", "end", "is_kept", "other_size", "others", "size")

    def __init__(self, block: int | None, end: int | None, size: float) -> None:
        self.block, self.end, self.size = block, end, size
        self.is_kept = False
        self.others, self.other_size = 0, 0.0
        self.beside: tuple[str, ...] = ()

    @classmethod
    def of(cls, looks: Looks) -> Form:
        """A form by what it looks like."""
        block, end, size, is_kept = looks
        self = cls(block, end, size)
        self.is_kept = is_kept
        return self

    def looks(self) -> Looks:
        """The form's values for another process."""
        return self.block, self.end, self.size, self.is_kept


@dataclass(slots=True, eq=False, init=False)
class Past:
    """A session's last turn on one cache, as its engine counted it."""

    cache: EngineCache
    prompt_tokens: int
    answer_tokens: int
    estimate: int
    """Estimated tokens of the prompt."""
    block_tokens: float
    """Estimated tokens of a block."""
    prompt_part: float
    """Part of the prompt that the next turn found."""
    answer_part: float
    """Part of the answer that the next turn found."""
    key_part: float
    """Part found of the key's prediction."""
    key_error: float
    """Mean error of the key's prediction of hits (`core.kvcache.trust`)."""
    session_error: float
    """Mean error of the session's own prediction."""
    reports: int
    """Number of reports behind the errors."""

    def __init__(self, cache: EngineCache, prompt_part: float, answer_part: float) -> None:
        self.cache = cache
        self.prompt_part, self.answer_part = prompt_part, answer_part
        self.key_part = 1.0
        self.key_error = self.session_error = 0.0
        self.reports = self.prompt_tokens = self.answer_tokens = self.estimate = 0
        self.block_tokens = 0.0

    def predicted(self, prompt_tokens: int) -> int:
        """Tokens that the next turn's prompt finds of this one's, in whole blocks of its engine."""
        block = self.cache.engine_block_tokens
        found = self.prompt_part * self.prompt_tokens + self.answer_part * self.answer_tokens
        return max(0, min(int(found), prompt_tokens - 1)) // block * block


@dataclass(slots=True, eq=False, init=False)
class Stay:
    """One session's life on an instance: its cache, and the KV that it keeps there."""

    cache: EngineCache
    turn: int
    """Number of its last turn, from 0."""
    used_s: float
    running: int
    """Requests in flight."""
    idle_since_s: float
    """Start of its idle time, without requests in flight."""
    tokens: int
    """Its context."""
    kept_tokens: int
    """Its context at the last turn computed there."""
    shared_tokens: int
    """Prefix that others had there before it came; it is kept for them anyway."""
    is_unserved: bool
    """Nothing was computed since its last turn began. Unless that still runs, the next request is
    that turn again."""
    was_served: bool
    is_dropped: bool
    """The table has forgotten it."""
    key: str
    """Its name in the table. Empty while it is unknown whether it is one request or a session."""
    evidence: tuple[int, ...]
    """Hashes of its possible next turn, if it has no name."""
    form: Form | None
    """Form of its prompts."""
    past: Past | None
    """Its last turn as its engine counted it, None before the first."""

    def __init__(self, cache: EngineCache, turn: int, used_s: float, key: str = "") -> None:
        self.cache, self.turn, self.used_s = cache, turn, used_s
        self.running = self.tokens = self.kept_tokens = self.shared_tokens = 0
        self.idle_since_s = used_s
        self.is_unserved = True
        self.was_served = self.is_dropped = False
        self.key = key
        self.evidence = ()
        self.form = None
        self.past = None

    @property
    def is_idle_unserved(self) -> bool:
        """Whether the next request is its last turn again."""
        return self.is_unserved and not self.running

    @property
    def own_tokens(self) -> int:
        """Tokens that are kept for this session alone."""
        return max(0, self.tokens - self.shared_tokens)


def nobody(key: str) -> str:
    """The tenant of a key where there are no tenants."""
    del key
    return ""


Row = tuple[str, str, int, float, int, Looks | None]
"""A session's id, instance, turn, last use, the tokens that are kept for it alone, its form."""
Adopted = tuple[str, EngineCache, int, float, int, Looks | None]
"""The same with the instance's cache in this process."""


class Sessions:
    """Sticky session table. `ttl_s` counts from a session's last use.

    How many live on an instance is in its cache (`EngineCache.sessions`); the table's length counts
    the homeless ones too.
    """

    def __init__(self, ttl_s: float, max_sessions: int) -> None:
        self._ttl_s = ttl_s
        self._max = max_sessions
        self._homes: OrderedDict[str, Stay] = OrderedDict()
        self._by_tenant: ByTenant[str] = ByTenant()
        self._unserved: OrderedDict[str, None] = OrderedDict()
        """Stays without any computed turn and without a running request."""
        self._none_expires_until_s = -math.inf
        self._live: dict[EngineCache, LiveKv] = {}
        self.curve = ReturnCurve()

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, session_id: str | None, now_s: float) -> str | None:
        """The instance that holds the session's KV, or None when unknown, expired or lost."""
        self._expire(now_s, session_id)
        home = self._homes.get(session_id) if session_id is not None else None
        return None if home is None or home.cache.is_lost else home.cache.name

    def entry(self, session_id: str, now_s: float) -> Stay | None:
        """A session's entry, also if its cache is lost."""
        self._expire(now_s, session_id)
        return self._homes.get(session_id)

    def live(self, cache: EngineCache) -> LiveKv:
        """The KV of the sessions that live in a cache; of a lost one nothing is kept."""
        found = self._live.get(cache)
        if found is None:
            found = LiveKv()
            if not cache.is_lost:
                self._live[cache] = found
        return found

    def lose(self, cache: EngineCache) -> None:
        """The cache is lost, and with it what lives there; the sessions' entries stay."""
        self._live.pop(cache, None)

    def renew_curve(self, now_s: float) -> None:
        """Compute the curve of return again, if due."""
        self.curve.renew(self._live.values(), now_s)

    def stay(self, session_id: str | None) -> Stay | None:
        """A session's entry; None if unknown, or its cache is lost."""
        stay = self._homes.get(session_id) if session_id is not None else None
        return None if stay is None or stay.cache.is_lost else stay

    def assign(
        self,
        session_id: str | None,
        cache: EngineCache,
        now_s: float,
        tokens: int = 0,
        shared_tokens: int = 0,
        begun: Stay | None = None,
        tenant: str = "",
    ) -> Stay | None:
        """Note that the session's next turn is served there; `ended` follows when it is over.

        `tokens`: of its prompt; `shared_tokens`: that others had there, counted at its first turn.
        `begun`: its first turn, of which it was not known that others would follow. `tenant`: whose
        session it is. None for a request without a session.
        """
        if session_id is None:
            return None
        self._expire(now_s, session_id)
        stay = self._homes.get(session_id)
        if stay is not None:
            self._homes.move_to_end(session_id)
            if not stay.running and not stay.is_unserved:
                self.curve.returned(now_s - stay.idle_since_s)
            self._take_out(stay)
            self._next_turn(stay, cache, now_s, shared_tokens)
        elif begun is not None:
            # Its first turn was in no table, and so was not counted.
            stay = self._homes[session_id] = begun
            stay.key = session_id
            stay.cache.sessions += 1
            self._next_turn(stay, cache, now_s, shared_tokens)
        else:
            stay = self._homes[session_id] = Stay(cache, 0, now_s, session_id)
            cache.sessions += 1
            stay.shared_tokens = shared_tokens
        stay.running += 1
        stay.tokens = tokens
        self.live(cache).running += stay.own_tokens
        self._by_tenant.use(session_id, tenant)
        if self._unserved:
            self._unserved.pop(session_id, None)
        if len(self._homes) > self._max:
            self._drop(self._next_to_go(), now_s)
        return stay

    def _next_to_go(self) -> str:
        """The session to forget where the table is full."""
        if self._unserved:
            return next(iter(self._unserved))
        return self._by_tenant.next_to_go(self._homes)

    def _next_turn(self, stay: Stay, cache: EngineCache, now_s: float, shared_tokens: int) -> None:
        if stay.cache.is_lost:
            stay.turn, stay.shared_tokens = 0, shared_tokens
        elif not stay.is_idle_unserved:
            stay.turn += 1
        stay.is_unserved = True
        if stay.cache is not cache:
            stay.kept_tokens = 0
        stay.cache.sessions -= 1
        stay.cache, stay.used_s = cache, now_s
        cache.sessions += 1

    def move(self, stay: Stay | None, cache: EngineCache) -> None:
        """Move a running turn to another instance, also if its old home was lost meanwhile."""
        if stay is None or stay.is_dropped:
            return
        if not stay.key:  # not counted as long as it is in no table
            stay.cache = cache
            return
        stay.cache.sessions -= 1
        self.live(stay.cache).running -= stay.own_tokens
        if stay.cache is not cache:
            stay.kept_tokens = 0
        stay.cache = cache
        cache.sessions += 1
        self.live(cache).running += stay.own_tokens

    def ended(self, stay: Stay, tokens: int | None, now_s: float) -> None:
        """A request of the session is over; `tokens`: its prompt and output, None if it failed.

        A session without any computed turn has no KV anywhere. From then on it is the first to go
        when the table is full.
        """
        if stay.is_dropped:
            return
        live = self.live(stay.cache) if stay.key else None
        if live is not None:
            live.running -= stay.own_tokens
        stay.running -= 1
        if tokens is not None:
            stay.kept_tokens = tokens
            stay.is_unserved, stay.was_served = False, True
        stay.tokens = stay.kept_tokens
        if stay.key and not (stay.was_served or stay.running):
            self._unserved[stay.key] = None
        if live is None:
            stay.idle_since_s = now_s
        elif stay.running:
            live.running += stay.own_tokens
        else:
            stay.idle_since_s = live.becomes_idle(stay.own_tokens, now_s)

    def _take_out(self, stay: Stay) -> None:
        """Take a session's tokens off its cache."""
        if stay.cache.is_lost:
            return
        live = self.live(stay.cache)
        if stay.running:
            live.running -= stay.own_tokens
        else:
            live.leaves_idle(stay.own_tokens, stay.idle_since_s)

    def end_session(self, session_id: str) -> bool:
        """Forget one session; tells whether it had a home."""
        home = self._homes.get(session_id)
        if home is None:
            return False
        self._drop(session_id, math.inf)
        return not home.cache.is_lost

    def forget(self, session_id: str, now_s: float) -> None:
        """Forget a session that was not ended explicitly."""
        if session_id in self._homes:
            self._drop(session_id, now_s)

    def take_off(self, session_id: str) -> Stay | None:
        """Take a session off the table that may have been one request only; it may come back."""
        stay = self._homes.get(session_id)
        if stay is not None:
            self._take_out(stay)
            self._take_off_table(stay)
            stay.key = ""
        return stay

    def rows(self) -> Iterator[Row]:
        """The sessions that have a home and a name at this moment; the longest idle first."""
        named = [(s, home) for s, home in self._homes.items() if MARK not in s]
        homes = [(s, home) for s, home in named if not home.cache.is_lost]
        return map(_row, homes)

    def adopt(
        self,
        rows: Iterable[tuple[str, EngineCache, int, float, int, Looks | None]],
        tenant_of: Callable[[str], str] = nobody,
    ) -> None:
        """Take over rows of another table, the longest idle first; older than anything here.

        `tenant_of`: whose session has this id.
        """
        taken: list[Stay] = []
        for session_id, cache, turn, used_s, tokens, looks in reversed(list(rows)):
            if session_id not in self._homes and len(self._homes) < self._max:
                stay = self._homes[session_id] = Stay(cache, turn, used_s, session_id)
                self._homes.move_to_end(session_id, last=False)
                self._by_tenant.use(session_id, tenant_of(session_id), is_oldest=True)
                cache.sessions += 1
                stay.tokens = stay.kept_tokens = tokens
                stay.is_unserved, stay.was_served = False, True
                stay.form = None if looks is None else Form.of(looks)
                taken.append(stay)
        self._none_expires_until_s = -math.inf
        for stay in reversed(taken):
            stay.idle_since_s = self.live(stay.cache).becomes_idle(stay.tokens, stay.used_s)

    def _expire(self, now_s: float, wanted: str | None) -> None:
        """Forget what has expired: some of it, and the one that is `wanted`."""
        if now_s < self._none_expires_until_s:
            return
        for _ in range(EXPIRED):
            if not self._homes:
                return
            session_id, home = next(iter(self._homes.items()))
            if now_s - home.used_s <= self._ttl_s:
                # Those behind it were used later, and what is used moves behind them.
                self._none_expires_until_s = home.used_s + self._ttl_s
                return
            self._drop(session_id, now_s)
        stay = self._homes.get(wanted) if wanted is not None else None
        if wanted is not None and stay is not None and now_s - stay.used_s > self._ttl_s:
            self._drop(wanted, now_s)

    def _drop(self, session_id: str, now_s: float) -> None:
        """Forget a session; `now_s` inf: it is known to have ended."""
        stay = self._homes[session_id]
        if not stay.running:
            self.curve.left(now_s - stay.idle_since_s)
        self._take_out(stay)
        self._take_off_table(stay)
        stay.is_dropped = True

    def _take_off_table(self, stay: Stay) -> None:
        del self._homes[stay.key]
        self._unserved.pop(stay.key, None)
        self._by_tenant.remove(stay.key)
        stay.cache.sessions -= 1


def _row(entry: tuple[str, Stay]) -> Row:
    session_id, home = entry
    looks = None if home.form is None else home.form.looks()
    return session_id, home.cache.name, home.turn, home.used_s, home.own_tokens, looks


class StoredResponses:
    """The instance that holds each stored response, by the response's key.

    `ttl_s` counts from a response's last use. A holder whose process is gone is still known, so
    that a client can be told; its cache says `is_lost`.
    """

    def __init__(self, ttl_s: float, most: int) -> None:
        self._ttl_s = ttl_s
        self._most = most
        self._holders: OrderedDict[str, tuple[EngineCache, float]] = OrderedDict()
        self._by_tenant: ByTenant[str] = ByTenant()

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, key: str, cache: EngineCache, now_s: float, tenant: str = "") -> None:
        """Note a tenant's stored response on an instance, or its use."""
        self._expire(now_s)
        self._holders.pop(key, None)
        self._holders[key] = cache, now_s
        self._by_tenant.use(key, tenant)
        if len(self._holders) > self._most:
            self.forget(self._by_tenant.next_to_go(self._holders))

    def holder(self, key: str, now_s: float, tenant: str = "") -> EngineCache | None:
        """The cache of the instance that holds the response, lost or not; None where unknown."""
        self._expire(now_s)
        found = self._holders.get(key)
        if found is None or now_s - found[1] > self._ttl_s:
            return None
        self.note(key, found[0], now_s, tenant)
        return found[0]

    def forget(self, key: str) -> None:
        """The response was deleted."""
        if self._holders.pop(key, None) is not None:
            self._by_tenant.remove(key)

    def rows(self) -> Iterator[tuple[str, str, float]]:
        """Key, instance and last use of the responses that are held; the longest unused first."""
        held = [
            (k, cache.name, used_s)
            for k, (cache, used_s) in self._holders.items()
            if not cache.is_lost
        ]
        return iter(held)

    def adopt(
        self,
        rows: Iterable[tuple[str, EngineCache, float]],
        tenant_of: Callable[[str], str] = nobody,
    ) -> None:
        """Take over rows of another table, the longest unused first; older than anything here.

        `tenant_of`: whose response has this key.
        """
        for key, cache, used_s in reversed(list(rows)):
            if key not in self._holders and len(self._holders) < self._most:
                self._holders[key] = cache, used_s
                self._holders.move_to_end(key, last=False)
                self._by_tenant.use(key, tenant_of(key), is_oldest=True)

    def _expire(self, now_s: float) -> None:
        """Forget some of what has expired."""
        for _ in range(EXPIRED):
            if not self._holders:
                return
            key, (_, used_s) = next(iter(self._holders.items()))
            if now_s - used_s <= self._ttl_s:
                return
            self.forget(key)
