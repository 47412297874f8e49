"""Hedges: when a prefill leg is late, D computes too, and the first to be ready wins.

A prefill leg is late when it has taken longer than 95 % of such legs did, relative to their
prediction, and longer than D would need. While both compute, both are charged, and the number of
hedges is bounded: what slows a whole fleet must not double its work. The first to be ready wins, P
with its answer, D with its first token. The loser is always still running, so aborting it frees its
KV at once. Only a prefill leg that has answered keeps KV pinned, and that leg is the winner.

Only streamed answers are hedged (`RequestFlow.begin`). The first token of an answer in one piece is
not visible. D could win only with its whole output, and P's answer would stop a D that has half of
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from proxy.core.accounts.lease import Phase
from proxy.core.accounts.ledger import Ledger
from proxy.core.admission.gate import Gate
from proxy.core.fleet.members import Fleet
from proxy.core.routing.lifecycle import BlockUses, LatencyTracker
from proxy.core.routing.route import Route
from proxy.core.types import RequestFacts

HEDGED_RATIO = 0.1
"""Most hedges at a time, as a part of the offloads without a first token; one always may."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The owners that a hedge charges."""

    ledger: Ledger
    tracker: LatencyTracker
    block_uses: BlockUses
    fleet: Fleet
    gate: Gate


class Hedges:
    """Starts and ends hedges; `Route.hedge` is a request's present hedge."""

    def __init__(self, parts: Parts, *, is_on: bool) -> None:
        self._parts = parts
        self._is_on = is_on
        self._live = 0

    def switch(self, *, is_on: bool) -> None:
        """Switch hedges on or off, from the next late prefill on."""
        self._is_on = is_on

    @property
    def live(self) -> int:
        """Number of requests that P and D both compute."""
        return self._live

    def due_s(self, route: Route) -> float:
        """When P is late, on the router's clock; inf without a P or with hedges switched off.

        Not before the time that D itself would need is over: a D behind a queue helps nobody.
        """
        if route.prefill is None or not self._is_on:
            return math.inf
        latency, name = self._parts.tracker.latency, route.decode.name
        bound_s = latency.prefill_bound_s(route.prefill.name, route.predicted_prefill_s)
        local_s = latency.wait_s(name, route.reserved_s)
        local_s += latency.prefill_s(name, route.new_tokens, route.hit_tokens, 0, 0)
        return route.reserved_s + max(bound_s, local_s)

    def start(self, route: Route, facts: RequestFacts, now_s: float) -> bool:
        """P is late: charge D for computing too; false where it must not."""
        if not self._may(route):
            return False
        parts, name, hit = self._parts, route.decode.name, route.hit_tokens
        kept = [c for c in route.lease.charges if c.phase is not Phase.INBOUND]
        route.lease.replace(kept)
        load = parts.ledger.load(name)
        kv_wait_s = parts.gate.kv_wait_s(name, load, route.prompt_tokens, hit, now_s)
        route.hedge = parts.tracker.hedge(route, load, now_s, kv_wait_s)
        route.hedge.use = parts.block_uses.open_use(name, facts)
        self._live += 1
        route.lease.replace((*kept, *parts.ledger.computing(name, route.new_tokens, hit)))
        return True

    def _may(self, route: Route) -> bool:
        is_waiting = route.prefill is not None and route.handed_s is None and route.lease.is_open
        if not self._is_on or not is_waiting or route.hedge is not None:
            return False
        fleet = self._parts.fleet
        # Each replica has its share: of own hedges in own offloads.
        inbound = [member.state.account.requests[Phase.INBOUND] for member in fleet.members()]
        offloads = self._live + sum(inbound)
        return fleet.is_up(route.decode.name) and self._live < max(1, HEDGED_RATIO * offloads)

    def drop(self, route: Route, now_s: float) -> None:
        """P has answered, or D has failed: D computes no more, and waits for P's KV again."""
        if route.hedge is None:
            return
        self.end_hedge(route, now_s)
        name = route.decode.name
        kept = [c for c in route.lease.charges if c.account.name != name]
        inbound = self._parts.ledger.charge(name, Phase.INBOUND, route.prompt_tokens)
        route.lease.replace((*kept, *inbound))

    def adopt(self, route: Route) -> bool:
        """P's leg is over: D's own attempt becomes the request's; false without a hedge."""
        hedge, parts = route.hedge, self._parts
        if hedge is None:
            return False
        self._live -= 1
        route.hedge = None
        parts.tracker.resume(route, hedge)
        parts.block_uses.end_use(route)
        route.use = hedge.use
        name, new = route.decode.name, route.new_tokens
        route.lease.replace(parts.ledger.computing(name, new, route.hit_tokens))
        return True

    def end_hedge(self, route: Route, now_s: float) -> None:
        """End the hedge of a route, if it has one; the caller takes back its charges."""
        hedge, route.hedge = route.hedge, None
        if hedge is not None:
            self._live -= 1
            self._parts.tracker.end_hedge(route, hedge, now_s)
            self._parts.block_uses.close_use(hedge.use)
