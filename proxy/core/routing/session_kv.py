"""The KV of a request's session among all others, for a decision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from proxy.core.accounts.instances import InstanceStates
from proxy.core.kvcache.conversations import Found
from proxy.core.kvcache.engine_cache import EngineCache
from proxy.core.kvcache.prefix_index import PrefixIndex
from proxy.core.kvcache.sessions import Sessions
from proxy.core.placement.decision import AskedKv, SessionKv
from proxy.core.types import RequestFacts

DOUBT_RATIO: Final = 1 / 7
"""The assumed error of live KV, as a part of a cache."""
CERTAIN: Final = 7.0
"""At so many errors from 0, `_excess` is exact to a thousandth of one."""


class LiveSessionKv(SessionKv):
    """`SessionKv` of one request, over the sessions and caches of all instances."""

    def __init__(
        self,
        facts: RequestFacts,
        sessions: Sessions,
        prefixes: PrefixIndex,
        states: InstanceStates,
        now_s: float,
        found: Found,
    ) -> None:
        self._facts, self._now_s, self._found = facts, now_s, found
        self._sessions, self._prefixes, self._states = sessions, prefixes, states
        self._fullest: int | None = None
        self._too_much: dict[str, tuple[float, float]] = {}

    def fullest_tokens(self, names: Sequence[str]) -> int:
        """See `SessionKv`."""
        sessions, now_s, most = self._sessions, self._now_s, 0.0
        for name in names:
            live = sessions.live(self._states.of(name).cache)
            most = max(most, live.tokens(sessions.curve, now_s))
        self._fullest = int(most)
        return self._fullest

    def tokens_too_much(self, name: str, hit_tokens: int, kv_tokens: int) -> tuple[float, float]:
        """See `SessionKv`."""
        cache = self._states.of(name).cache
        displaced = self._displaced(cache, hit_tokens)
        found = self._too_much[name] = displaced, self._excess(cache, hit_tokens, kv_tokens)
        return found

    def asked(self) -> AskedKv:
        """See `SessionKv`."""
        return AskedKv(self._fullest, self._too_much)

    def _displaced(self, cache: EngineCache, hit_tokens: int) -> float:
        facts = self._facts
        if facts.block_tokens <= 0:
            return 0.0
        hit = int(hit_tokens / facts.block_tokens)
        blocks, curve = 0.0, self._sessions.curve
        for count, used_s in self._prefixes.displaced(cache, facts.block_hashes, hit):
            blocks += count * curve.chance(self._now_s - used_s)
        return blocks * facts.block_tokens

    def _excess(self, cache: EngineCache, hit_tokens: int, kv_tokens: int) -> float:
        facts, stay, curve = self._facts, self._found.stay, self._sessions.curve
        if self._found.key is None:
            return 0.0
        live = self._sessions.live(cache).tokens(curve, self._now_s)
        if stay is None:
            own = float(facts.prompt_tokens - hit_tokens)
        else:
            own = float(max(0, facts.prompt_tokens - stay.shared_tokens))
            if stay.cache is cache and stay.key:
                kept = 1.0 if stay.running else curve.chance(self._now_s - stay.idle_since_s)
                live -= stay.own_tokens * kept
        doubt = DOUBT_RATIO * kv_tokens
        return _excess(live + own - kv_tokens, doubt) - _excess(live - kv_tokens, doubt)


def _excess(tokens: float, doubt: float) -> float:
    """E[max(0, tokens)] where tokens are known to about `doubt`, as a softplus."""
    ratio = tokens / doubt
    if ratio < -CERTAIN:
        return 0.0
    return tokens if ratio > CERTAIN else doubt * math.log1p(math.exp(ratio))
