"""The cost policy: each choice of P and D for a request, priced in seconds.

    J(P, D) = ttft + pressure * (weight_harm * stalled streams * stall * pressed(P)
                                 + weight_decode * decode time on D)
              + weight_arrivals * arrivals/s at P * stall * (stall / 2 + wait(P))
              + next(D) + memory(D) [ + memory(P) ] + heat(P)
    ttft    = max(wait(P), way) + prefill(P, prompt - hit_P)
              [ + transfer(P, D, prompt - hit_D) + step(D) ]
    next    = weight_next_turn * busy ratio * rest of a prefill met there
              + weight_turns * seconds to compute what is too much for the cache with this session
              + FAILED_S where something has failed since the instance last worked
              + DOUBT_S * its doubt by hollow answers, or by what has failed this client there
    memory  = weight_displaced * seconds to compute again what is displaced and needed again
              + weight_spread * share of the cache in use or reusable * prefill of the new tokens
              + weight_room * prefill of TYPICAL tokens * (KV in use with this prompt / all of it)^2
    heat    = (factor of thermal control - 1) * prefill(P, prompt - hit_P); 0 where P is cool
    pressed = sqrt(r) below 1, max(1 / r, 0.7) from there
    r       = step(P) / (1 - busy ratio of P) / TPOT target

`stall` is the time that a prefill adds to the steps of the streams beside it. It counts most where
the streams just keep the TPOT target: faster streams have time to spare, and slower ones miss the
target anyway. `pressure` follows the same target over the fleet (core.latency.slo_pressure). A
request that arrives at P meanwhile waits for the queue and the rest of this prefill, half of it on
average. So long prompts go where few requests arrive. The busy ratio of the last minute predicts
how often the session's next turns will find D computing; the present queue length would not. How
long such a turn then waits is learned from the prefills of the whole fleet.

KV is displaced now, and from now on. Now: the oldest blocks of a full cache, each of which is
needed again with the chance that its session comes back. From now on: the sessions on an instance
need more KV than it has, by E[live + own - size]+ - E[live - size]+ tokens. That counts for every
turn that this session is still expected to take. Live KV is known to about a seventh of the cache.
What does not fit is computed again at the fleet's rate, on whichever instance that will be. Running
prompts take room as well: once a cache is full of them, every turn computes all of its prompt, runs
longer for it, and keeps the cache full.

P = D is colocation, at the session's home or elsewhere. A session follows its cached tokens:
affinity is worth the cost to compute the lost prefix again. P != D is an offload. Where P is the
old home (a pull), the prefix moves to D at the price of a transfer instead of a prefill. An offload
must beat the best colocation by a margin, and P's queue is bounded; both keep the tail short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heapify, heappop
from typing import Final

from proxy.core.placement.alternatives import COLOCATIONS_KEPT, OFFLOADS_KEPT, PricedOption, Terms
from proxy.core.placement.candidates import Candidate, Candidates
from proxy.core.placement.decision import (
    Choice,
    PlacementView,
    Size,
    can_prefill,
    classify,
    no_peer,
    transfer_s,
)
from proxy.core.types import Reason

MARGIN_S: Final = 0.020
MARGIN_RATIO: Final = 0.15
ALIKE_S: Final = 0.002
"""A smaller difference of costs is one of what was learned, not of the instances."""
MAX_WAIT_S: Final = 4.0
"""P takes no offload behind a longer queue: a first design without this bound lost a quarter of its
HEAVY requests in such queues."""
UNKNOWN_RATIO: Final = 1.5
"""While no size is known, a cache is assumed to hold this times the live KV of the fullest one. So
sessions are spread before the first of them is evicted."""
FAILED_S: Final = 0.05
"""Added where something has failed since an instance last worked: one that fails at once does
nothing, so it would look like the quickest place."""
DOUBT_S: Final = 60.0
"""Price of an instance of whose last answers all were hollow (core.fleet.hollow), or failed the
client that asks (core.fleet.askers). It fails at once, so it is always idle: this is more than any
queue elsewhere."""
TYPICAL: Final = 8192
"""Tokens of a prefill in whose time the use of a cache is priced."""
MISSED: Final = 0.7
"""Least weight of a stall for streams that miss their TPOT target anyway."""
BUSY_MOST: Final = 0.95
"""The busy ratio is capped here: at 1 the predicted step would be infinitely long."""
PREFILLERS: Final = 3
"""Number of P considered: those with the lowest cost of computing."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of other requests' seconds against seconds of this request's TTFT.

    Found by a search in the league over three traces, both regimes and three loads; the optimum is
    flat. Those of KV were checked on the profile `foreign` only.
    """

    harm: float = 0.12
    """Per stream and second of stall."""
    decode: float = 0.03
    """Per second of an output of mean length."""
    arrivals: float = 1.0
    """Per second that a later request waits."""
    next_turn: float = 0.5
    """Per second of the wait that D's busy ratio predicts."""
    displaced: float = 1.0
    """Per second of computation that is needed again."""
    spread: float = 1.0
    """Per second of prefill in a full cache."""
    turns: float = 6.0
    """Number of later turns for which a session's place counts."""
    room: float = 1.2
    """Prefills of TYPICAL tokens, for a cache fully in use."""


WEIGHTS = Weights()


def by_cost(view: PlacementView, weights: Weights | None = None) -> Choice:
    """Choose the cheapest option."""
    weights = weights or WEIGHTS
    prices = Prices(view, view.free, weights)
    ranked = prices.ranked()
    at = prices.stay(ranked[0])
    if at not in ranked:
        ranked[-1] = at
    options = [prices.option(one) for one in ranked]
    best = options[ranked.index(at)]
    warm, heavy = view.config.warm_threshold, view.config.heavy_threshold
    size = classify(best.decode.new_tokens, warm, heavy)
    offloads = _offloads(view, prices, weights) if prices.may_offload(best, size) else []
    reason = _why_not(view, prices, best, size, offloads)
    taken = best
    if reason is None:
        taken = offloads[0]
        size, reason = classify(taken.decode.new_tokens, warm, heavy), _why(taken)
    d, p = taken.decode, taken.prefill
    return Choice(
        d,
        p.decode if p is not None else None,
        size,
        reason,
        placed=d.instance.name != view.home,
        predicted_ttft_s=taken.terms.ttft_s,
        predicted_transfer_s=transfer_s(view, p.decode, d) if p is not None else None,
        options=options + offloads,
    )


class Prices:
    """The request's costs on each candidate, in columns; `option` makes an object of one.

    `costs_s`: computed and decoded there. If an offload is possible at all, also the costs of only
    decoding (`_decoding_s`) and only computing (`_computing_s`) there, and the queue.
    """

    def __init__(self, view: PlacementView, free: Candidates, weights: Weights) -> None:
        config, w = view.config, weights
        self._view, self._free = view, free
        self._paces = free.paces
        self._now_s, self._prompt_tokens = view.now_s, free.prompt_tokens
        self._target_s = config.tpot_slo_s
        self._harm, self._arrivals = w.harm * view.slo_pressure, w.arrivals
        self._decode = w.decode * view.slo_pressure * view.fleet.output_tokens
        self._next_turn = w.next_turn * view.fleet.rest_s
        self._displaced, self._spread, self._room = w.displaced, w.spread, w.room
        self._turns = w.turns
        self._way_s = view.fleet.way_s
        self._kv = view.session_kv
        # Where it will be computed again is not known, so by the fleet's rate. By its own, a slow
        # instance would keep its sessions, and quicker ones would compute theirs anew.
        self._again_s = view.fleet.alone_s / free.prompt_tokens
        self._unknown_tokens: int | None = None
        self._may_split = (
            view.transfers.can_offload
            and view.facts.offloadable
            and view.free.prompt_tokens >= config.heavy_threshold
        )
        self._terms: list[Terms] = []
        self.costs_s: list[float] = []
        self._decoding_s: list[float] = []
        self._computing_s: list[float] = []
        self._waits_s: list[float] = []
        self._least_split_s = math.inf
        self._price()

    def _price(self) -> None:
        """Fill the columns: this takes most of a decision's time.

        What the KV of others costs takes longest, and it is never below 0. So unless pairs are to
        be priced, it is looked at only where the rest does not cost more than the cheapest place.
        """
        costs_s, all_decoding_s = self.costs_s, self._decoding_s
        computing_s, waits_s, may_split = self._computing_s, self._waits_s, self._may_split
        least_p_s = least_d_s = math.inf
        for at in range(len(self._paces)):
            terms = self._terms_at(at)
            self._terms.append(terms)
            if may_split:
                self._look_at_kv(at)
            begun_s, decode_s = terms.ttft_s + terms.harm_s + terms.behind_s, terms.decode_s
            next_s, memory_s = terms.next_s, terms.memory_s
            cost_s = begun_s + decode_s + next_s + memory_s + terms.heat_s
            costs_s.append(cost_s)
            if may_split:
                decoding_s = decode_s + next_s + memory_s
                all_decoding_s.append(decoding_s)
                computing_s.append(begun_s + memory_s + terms.heat_s)
                waits_s.append(terms.wait_s)
                least_p_s = min(least_p_s, cost_s - decode_s - next_s)
                least_d_s = min(least_d_s, decoding_s)
        self._least_split_s = least_p_s + least_d_s
        if not may_split and self._kv is not None:
            home = self._free.place_of(self._view.home)
            best = costs_s.index(min(costs_s))
            looked_at = (best,) if home is None or home == best else (best, home)
            for at in looked_at:
                costs_s[at] += self._look_at_kv(at)
            least_s = min(costs_s[best], costs_s[home]) if home is not None else costs_s[best]
            for at, cost_s in enumerate(costs_s):
                if cost_s <= least_s + ALIKE_S and at not in looked_at:
                    costs_s[at] += self._look_at_kv(at)
                    least_s = min(least_s, costs_s[at])

    def _look_at_kv(self, at: int) -> float:
        """Price the KV that the prompt displaces there, and that does not fit from now on."""
        free, kv, tokens = self._free, self._kv, self._prompt_tokens
        if kv is None:
            return 0.0
        kv_tokens = free.kv_tokens[at]
        if not kv_tokens:
            if self._unknown_tokens is None:
                fullest = max(tokens, kv.fullest_tokens(free.names))
                self._unknown_tokens = int(UNKNOWN_RATIO * fullest)
            kv_tokens = self._unknown_tokens
        name, hit, terms = free.names[at], free.hit_tokens[at], self._terms[at]
        displaced, excess = kv.tokens_too_much(name, hit, kv_tokens)
        displaced_s = self._displaced * self._again_s * displaced
        excess_s = self._turns * self._again_s * excess
        terms.memory_s += displaced_s
        terms.next_s += excess_s
        return displaced_s + excess_s

    def _terms_at(self, at: int) -> Terms:
        """The cost terms of computing and decoding on one instance.

        The output costs decode steps on D, which take longer the more KV they read.
        """
        free, pace, prompt_tokens = self._free, self._paces[at], self._prompt_tokens
        load, hit, full = free.loads[at], free.hit_tokens[at], free.kv_full[at]
        new, streams = prompt_tokens - hit, load.decode_requests
        stall_s = prefill_s = pace.alone_s(new, hit)
        wait_s = pace.wait_s(self._now_s)
        busy, per_s = pace.lately(self._now_s)
        harm_s = 0.0
        if streams:
            step_s = pace.step_s(load.decode_tokens)
            prefill_s += pace.steps_beside(new) * step_s
            pressed = step_s / (1.0 - min(BUSY_MOST, busy)) / self._target_s
            pressed = math.sqrt(pressed) if pressed < 1.0 else max(MISSED, 1.0 / pressed)
            harm_s = self._harm * streams * stall_s * pressed
        # `max` of three is a call of Python's, which costs as much as all the rest of this.
        begin_s = max(wait_s, free.kv_wait_s[at])
        ttft_s = max(begin_s, self._way_s) + prefill_s
        behind_s = self._arrivals * per_s * stall_s * (stall_s / 2 + wait_s)
        kv_after = load.decode_tokens + load.inbound_tokens + prompt_tokens
        decode_s = self._decode * pace.step_s(kv_after)
        next_s, memory_s = self._next_turn * busy, 0.0
        if free.has_failed[at]:
            next_s += FAILED_S
        if free.doubts is not None:
            next_s += DOUBT_S * free.doubts[at]
        if kv_tokens := free.kv_tokens[at]:
            in_use = (load.ongoing_tokens + prompt_tokens) / kv_tokens
            memory_s = self._room * pace.alone_s(TYPICAL, 0) * (in_use * in_use)
            memory_s += self._spread * full * pace.alone_s(new, 0)
        heat_s = 0.0
        if free.prefill_factors is not None:
            heat_s = (free.prefill_factors[at] - 1.0) * stall_s
        return Terms(ttft_s, harm_s, behind_s, decode_s, next_s, memory_s, heat_s, wait_s)

    def option(self, at: int) -> PricedOption:
        """The option of computing and decoding on one candidate."""
        return PricedOption(self._free.at(at), None, self.costs_s[at], self._terms[at])

    def ranked(self) -> list[int]:
        """Indexes of the cheapest candidates.

        Of those within ALIKE_S of the best: fewer sessions first, then the longest unused.
        """
        costs_s, kept = self.costs_s, COLOCATIONS_KEPT
        ranked = _lowest(costs_s, kept)
        alike_s = costs_s[ranked[0]] + ALIKE_S
        if len(ranked) > 1 and costs_s[ranked[1]] <= alike_s:
            sessions, last_placed = self._free.sessions, self._free.last_placed
            alike = [at for at, cost_s in enumerate(costs_s) if cost_s <= alike_s]
            alike.sort(key=lambda at: (sessions[at], last_placed[at], costs_s[at]))
            ranked = [*alike, *[at for at in ranked if costs_s[at] > alike_s]]
        return ranked[:kept]

    def stay(self, best: int) -> int:
        """The best candidate, or the session's home if that costs at most MARGIN_S more.

        A short prompt leaves no cached block that would favour its home. Where what the home has is
        doubted, it is kept as long as it carries no more: the doubt is no reason to leave. One that
        fails is left.
        """
        free = self._free
        home = free.place_of(self._view.home)
        if home is None:
            return best
        if self.costs_s[home] <= self.costs_s[best] + MARGIN_S:
            return home
        if free.has_failed[home] or (free.doubts is not None and free.doubts[home] > 0.0):
            return best  # that is a reason, whatever its cache holds
        if not free.is_home_doubted or free.hit_tokens[home] < free.hit_tokens[best]:
            return best
        has_more = free.loads[home].ongoing_tokens > free.loads[best].ongoing_tokens
        return best if has_more else home

    def may_offload(self, best: PricedOption, size: Size) -> bool:
        """Whether to price pairs of P and D: for HEAVY requests, and others that could win by one.

        No pair costs less than the lowest computing cost plus the lowest decoding cost. Most turns
        of a long session are short and cannot win.
        """
        if not self._may_split or size is Size.HEAVY:
            return self._may_split
        return best.cost_s - self._least_split_s > _margin_s(best)

    def decoders(self) -> list[PricedOption]:
        """The two best D of an offload and the home, where the request is HEAVY."""
        free, least = self._free, self._view.config.heavy_threshold
        most_hit = self._prompt_tokens - least
        heavy = [at for at, hit in enumerate(free.hit_tokens) if hit <= most_hit]
        ds = sorted(heavy, key=self._decoding_s.__getitem__)[:2]
        home = free.place_of(self._view.home)
        if home is not None and free.hit_tokens[home] <= most_hit and home not in ds:
            ds.append(home)
        return [self.option(at) for at in ds]

    def prefillers(self) -> list[PricedOption]:
        """The candidates that may prefill for another, cheapest first."""
        return [self.option(at) for at in self._prefillers()]

    def is_blocked_by_queues(self, d: Candidate) -> bool:
        """Whether D has peers that could prefill for it, and each has too long a queue."""
        has_peer = False
        for at, wait_s in enumerate(self._waits_s):
            peer = self._free.at(at)
            if peer is not d and can_prefill(self._view, peer):
                if wait_s <= MAX_WAIT_S:
                    return False
                has_peer = True
        return has_peer

    def _prefillers(self) -> list[int]:
        """Indexes of the candidates that may prefill for another, cheapest first.

        By the cost of computing and of its KV on P, since D is not chosen yet.
        """
        computing_s, doubts = self._computing_s, self._free.doubts
        quickest = [
            (computing_s[at], at)
            for at, wait_s in enumerate(self._waits_s)
            if wait_s <= MAX_WAIT_S and (doubts is None or not doubts[at])
        ]
        heapify(quickest)
        found: list[int] = []
        while quickest and len(found) < PREFILLERS:
            at = heappop(quickest)[1]
            if can_prefill(self._view, self._free.at(at)):
                found.append(at)
        return found


def _lowest(costs_s: list[float], most: int) -> list[int]:
    """Indexes of the lowest costs, the lowest first, of equal ones the first.

    Compiled, to insert each into a short list takes half of the time of a sort.
    """
    found: list[int] = []
    for at, cost_s in enumerate(costs_s):
        place = len(found)
        if place == most:
            if cost_s >= costs_s[found[-1]]:
                continue
            found.pop()
            place -= 1
        while place > 0 and costs_s[found[place - 1]] > cost_s:
            place -= 1
        found.insert(place, at)
    return found


def _offloads(view: PlacementView, prices: Prices, weights: Weights) -> list[PricedOption]:
    """Pairs of the cheapest P with the home and the two best D, the cheapest pair first.

    A pair's terms are those of colocation on P and on D. Instances that a busy threshold leaves one
    role only are priced like the free ones.
    """
    ds = prices.decoders()
    if view.decode_only is not None:
        ds += Prices(view, view.decode_only, weights).decoders()
    if not ds:
        return []
    ps = prices.prefillers()
    if view.prefill_only is not None:
        ps += Prices(view, view.prefill_only, weights).prefillers()
    pairs = [_pair(view, p, d) for d in ds for p in ps if p.decode is not d.decode]
    in_time_s = view.config.prefill_timeout_s
    in_time = [pair for pair in pairs if pair.terms.ttft_s < in_time_s]
    return sorted(in_time, key=_cost)[:OFFLOADS_KEPT]


def _pair(view: PlacementView, p: PricedOption, d: PricedOption) -> PricedOption:
    """The pair's option: computed on P, transferred, decoded on D."""
    moved_s = transfer_s(view, p.decode, d.decode)
    on_p, on_d = p.terms, d.terms
    # D fetches the KV after its own queued prefills, and once there is room for it.
    moved_s += max(0.0, max(d.decode.kv_wait_s, on_d.wait_s) - on_p.ttft_s)
    ttft_s, memory_s = on_p.ttft_s + moved_s, on_d.memory_s + on_p.memory_s
    on_p_s = on_p.harm_s + on_p.behind_s + on_p.memory_s + on_p.heat_s
    on_d_s = on_d.decode_s + on_d.next_s + on_d.memory_s
    terms = Terms(
        ttft_s,
        on_p.harm_s,
        on_p.behind_s,
        on_d.decode_s,
        on_d.next_s,
        memory_s,
        on_p.heat_s,
        on_p.wait_s,
    )
    return PricedOption(d.decode, p, ttft_s + on_p_s + on_d_s, terms)


def _cost(option: PricedOption) -> float:
    return option.cost_s


def _why_not(
    view: PlacementView,
    prices: Prices,
    best: PricedOption,
    size: Size,
    offloads: list[PricedOption],
) -> Reason | None:
    """Why no offload beats the best colocation; None when one does."""
    if offloads and best.cost_s - offloads[0].cost_s > _margin_s(best):
        return None
    if size is not Size.HEAVY:
        return Reason.BELOW_THRESHOLD
    if not view.transfers.can_offload:
        return Reason.NO_CONNECTOR
    if not view.facts.offloadable:
        return Reason.NOT_OFFLOADABLE
    return _why_colocated(view, prices, best.decode, offloads)


def _why_colocated(
    view: PlacementView, prices: Prices, d: Candidate, offloads: list[PricedOption]
) -> Reason:
    """Why a HEAVY request is not offloaded although it could be."""
    if offloads and not d.load.decode_requests:
        return Reason.D_IDLE
    if prices.is_blocked_by_queues(d):
        return Reason.P_OVERLOADED
    return Reason.MARGIN if offloads else no_peer(view, d)


def _why(offload: PricedOption) -> Reason:
    p = offload.prefill
    pulls = p is not None and p.decode.hit_tokens > p.decode.new_tokens
    return Reason.KV_PULL if pulls else Reason.P_IDLE_D_BUSY


def _margin_s(best: PricedOption) -> float:
    return max(MARGIN_S, MARGIN_RATIO * best.cost_s)
