"""The cost policy: every place a request could be computed and decoded, priced in seconds.

    J(P, D) = ttft + strain * (weight_harm * stalled streams * stall
                               + weight_decode * decode time on D)
              + weight_next_turn * busy ratio of D * rest of a prefill met there
              + weight_memory * seconds to compute again what the new KV displaces
              + weight_room * (KV in use on D with this prompt / all of it)^2
    ttft    = wait(P) + prefill(P, prompt - hit_P) [ + transfer(P, D, prompt - hit_D) + step(D) ]

A stall is what a prefill adds to the steps of the streams beside it. `strain` follows the TPOT
target (core.strain). The busy ratio, over the last minute, is what the session's next turns will
meet on D: queues are too short a memory. What they meet lasts as long as prefills of this fleet do,
long or short. KV in use is what waiting sessions lose their own to: once a cache is full of running
prompts, every turn computes all of its prompt, runs longer for it, and keeps the cache full.

P = D is colocation, at home or elsewhere: a session follows its tokens, and affinity is worth
exactly what the lost prefix would cost. P != D is an offload; where P is the old home it hands its
prefix to the new one (a pull), for the price of a transfer instead of a prefill. An offload must
beat the best colocation by a margin, and P's queue is bounded: both keep the tail short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop
from itertools import islice
from operator import eq, itemgetter

from proxy.core.classify import Size, classify
from proxy.core.connectors import CONNECTORS
from proxy.core.decide import Choice, Scene, can_prefill
from proxy.core.free import Free
from proxy.core.latency import RECENT_S
from proxy.core.options import COLOCATIONS_KEPT, OFFLOADS_KEPT, Priced
from proxy.core.types import Instance, Load, Reason

MARGIN_S = 0.020
MARGIN_RATIO = 0.15
MAX_WAIT_S = 4.0
"""P takes no offload behind a longer queue: the founding design lost a quarter of its HEAVY
requests in such queues."""


@dataclass(frozen=True, slots=True)
class Weights:
    """How seconds of others count against seconds of this request's first token.

    Found in the league (docs/figures.md) by search over three traces, both regimes and two loads;
    the optimum is flat. `harm`: per stream and second of stall; `decode`: per second of an output
    of `output_tokens`; `next_turn`: per second of the wait that D's busy ratio promises; `memory`:
    per second of displaced computation; `room`: seconds for a cache that is in use as a whole.
    """

    harm: float = 0.08
    decode: float = 0.03
    next_turn: float = 0.5
    memory: float = 1.0
    room: float = 0.5
    output_tokens: float = 300.0


WEIGHTS = Weights()


def by_cost(scene: Scene, weights: Weights | None = None) -> Choice:
    """The cheapest option."""
    w = weights or WEIGHTS
    free = Free.of(scene.free, scene.facts.prompt_tokens)
    colocated = _colocations(scene, free, w)
    ranked = _ranked(free, colocated)
    best = ranked[0]
    if scene.home is not None and best.instance.name != scene.home:
        best = _stay(free, scene.home, best, colocated)
    warm, heavy = scene.config.warm_threshold, scene.config.heavy_threshold
    size = classify(best.new_tokens, warm, heavy)
    offloads = _offloads(scene, free, colocated) if _may_offload(best, size, colocated) else []
    reason = _why_not(scene, best, size, offloads)
    chosen = best
    if reason is None:
        chosen = offloads[0]
        size, reason = classify(chosen.new_tokens, warm, heavy), _why(chosen)
    return Choice(
        free.at(chosen.at),
        free.at(chosen.prefill.at) if chosen.prefill is not None else None,
        size,
        reason,
        chosen.instance.name != scene.home,
        chosen.ttft_s,
        ranked + offloads,
    )


def _stay(free: Free, home: str, best: Priced, colocated: Sequence[Row]) -> Priced:
    """The cheapest, or home where that costs hardly more: short prompts leave no hits to hold."""
    if home not in free.names:
        return best
    at_home = _priced(colocated[free.names.index(home)])
    return best if at_home.cost_s > best.cost_s + MARGIN_S else at_home


_Prices = tuple[float, int, float, float, float, float, float, float]
Row = tuple[*_Prices, Instance, Load, int, int, float, Priced | None]
"""The fields of a Priced, in their order: making that of every instance would take longer."""
_COST = itemgetter(0)


_priced: Callable[[Row], Priced] = partial(tuple.__new__, Priced)
"""A Priced of a row as it is; its constructor would take it apart first."""


def _ranked(free: Free, colocated: Sequence[Row]) -> list[Priced]:
    """The cheapest ones; of equals the one with fewer sessions, then the longest unused."""
    ranked = sorted(colocated)[: COLOCATIONS_KEPT + 1]
    costs_s = list(map(_COST, ranked))
    if any(map(eq, costs_s, costs_s[1:])):
        ranked = sorted(colocated, key=lambda row: (row[0], *free.rank(row[1])))
    return list(map(_priced, ranked[:COLOCATIONS_KEPT]))


def _colocations(scene: Scene, free: Free, w: Weights) -> list[Row]:
    """Everything on one instance: until it has the prompt's KV, and what that costs all others.

    New KV displaces other sessions' where the cache is full. The output costs steps on D, which
    grow with the KV that they read. One loop, and the formulas of `Times` written out in it: it is
    most of what a decision takes.
    """
    now_s, prompt_tokens, exp = scene.now_s, scene.facts.prompt_tokens, math.exp
    harm, decode = w.harm * scene.strain, w.decode * scene.strain * w.output_tokens
    memory, room = w.memory, w.room
    next_turn = w.next_turn * scene.latency.rest_s()
    columns = (
        range(len(free)),
        free.instances,
        free.loads,
        scene.latency.times(free.names),
        map(scene.kv_tokens, free.names),
        free.kv_full,
        free.kv_wait_s,
        map(_works(scene, free).__getitem__, free.hit_tokens),
    )
    priced: list[Row] = []
    for at, instance, load, times, kv_tokens, full, kv_wait_s, work in zip(*columns, strict=True):
        hit, new, grown, alone, chunks = work
        streams, decode_tokens = load.decode_requests, load.decode_tokens
        line, step = times.prefill, times.step
        p, q, step_p, step_q = line.p, line.q, step.p, step.q
        stall_s = prefill_s = p * new + q * grown
        if streams:
            prefill_s += chunks * (step_p + step_q * decode_tokens)
        wait_s = times.busy_until_s - now_s
        if wait_s < 0.0:
            wait_s = 0.0
        ready_s = (max(wait_s, kv_wait_s) if kv_wait_s else wait_s) + prefill_s
        harm_s = harm * streams * stall_s
        decode_s = decode * (
            step_p + step_q * (decode_tokens + load.inbound_tokens + prompt_tokens)
        )
        memory_s = memory * full * (p * new + q * alone) if full else 0.0
        if kv_tokens:
            in_use = (load.ongoing_tokens + prompt_tokens) / kv_tokens
            memory_s += room * (in_use * in_use)
        busy_s = times.recent_s
        if busy_s:
            busy_s = busy_s * exp((times.recent_at_s - now_s) / RECENT_S) / RECENT_S
        next_s = next_turn * busy_s
        cost_s = ready_s + harm_s + decode_s + next_s + memory_s
        priced.append(
            (
                cost_s,
                at,
                ready_s,
                harm_s,
                decode_s,
                next_s,
                memory_s,
                wait_s,
                instance,
                load,
                hit,
                new,
                kv_wait_s,
                None,
            )
        )
    return priced


def _works(scene: Scene, free: Free) -> dict[int, tuple[int, int, float, float, float]]:
    """Of each number of hit tokens: it, the new tokens, and what `Times.prefill_s` makes of them.

    That is the second term of the line behind the hit and without it, and the number of steps.
    Many instances have the same hit: none, or a system prompt.
    """
    works = {}
    for hit in set(free.hit_tokens):
        new = free.prompt_tokens - hit
        chunks = math.ceil(new / scene.latency.budget) + 0.5
        works[hit] = hit, new, new * (hit + new / 2), new * (new / 2), chunks
    return works


def _why_not(scene: Scene, best: Priced, size: Size, offloads: Sequence[Priced]) -> Reason | None:
    """Why no offload beats the best colocation; None when one does."""
    if not CONNECTORS[scene.config.kv_connector].can_offload:
        return _unless_small(size, Reason.NO_CONNECTOR)
    if not scene.facts.offloadable:
        return _unless_small(size, Reason.NOT_OFFLOADABLE)
    if not offloads:
        return _unless_small(size, Reason.NO_PEER)
    if best.cost_s - offloads[0].cost_s <= _margin_s(best):
        d_idle = not best.load.decode_requests
        return _unless_small(size, Reason.D_IDLE if d_idle else Reason.MARGIN)
    return None


def _margin_s(best: Priced) -> float:
    return max(MARGIN_S, MARGIN_RATIO * best.cost_s)


def _may_offload(best: Priced, size: Size, colocated: Sequence[Row]) -> bool:
    """Whether pairs are worth pricing: all HEAVY ones, others where one could win at all.

    No pair costs less than the cheapest P for its part and the cheapest D for its own. Most turns
    of a long session are short and have no chance.
    """
    if size is Size.HEAVY:
        return True
    least_s = min(map(_computing_s, colocated)) + min(map(_decoding_s, colocated))
    return best.cost_s - least_s > _margin_s(best)


def _computing_s(p: Row) -> float:
    """What a request costs where it is only computed, its KV included."""
    return p[0] - p[4] - p[5]


def _decoding_s(d: Row) -> float:
    """What a request costs where it only decodes."""
    return d[4] + d[5] + d[6]


def _why(offload: Priced) -> Reason:
    p = offload.prefill
    pulls = p is not None and p.hit_tokens > p.new_tokens
    return Reason.KV_PULL if pulls else Reason.P_IDLE_D_BUSY


def _unless_small(size: Size, reason: Reason) -> Reason:
    return reason if size is Size.HEAVY else Reason.BELOW_THRESHOLD


def _offloads(scene: Scene, free: Free, colocated: Sequence[Row]) -> list[Priced]:
    """Pairs worth a look: the three quickest P, for the home and for the two best to decode on.

    What each costs alone is in its colocation already.
    """
    least = scene.config.heavy_threshold
    if scene.facts.prompt_tokens < least or not scene.facts.offloadable:
        return []
    if not CONNECTORS[scene.config.kv_connector].can_offload:
        return []
    heavy = [row for row in colocated if row[11] >= least]
    if not heavy:
        return []
    ds = sorted(heavy, key=_decoding_s)[:2]
    if scene.home in free.names:
        home = colocated[free.names.index(scene.home)]
        if home[11] >= least and home not in ds:
            ds.append(home)
    ps = list(islice(_able(scene, colocated), 3))
    pairs = [_offloaded(scene, p, d) for d in ds for p in ps if p.at != d[1]]
    in_time = scene.config.prefill_timeout_s
    in_time_s = sorted((pair for pair in pairs if pair[2] < in_time), key=_COST)
    return list(map(_priced, in_time_s[:OFFLOADS_KEPT]))


def _able(scene: Scene, colocated: Sequence[Row]) -> Iterator[Priced]:
    """Those that may compute for another, the quickest first.

    Quick goes by what P costs, its KV included, before D is known.
    """
    connector = CONNECTORS[scene.config.kv_connector]
    quickest = [(_computing_s(row), row[1]) for row in colocated if row[7] <= MAX_WAIT_S]
    heapify(quickest)
    while quickest:
        p = _priced(colocated[heappop(quickest)[1]])
        if can_prefill(scene, p, connector):
            yield p


def _offloaded(scene: Scene, p: Priced, d: Row) -> Row:
    """Computed as if on P, decoded as if on D, and moved."""
    _, _, p_ready_s, harm_s, _, _, p_memory_s, p_wait_s, instance, *_ = p
    _, at, _, _, decode_s, next_s, memory_s, wait_s, place, load, hit, new, kv_wait_s, _ = d
    moved_s = scene.latency.transfer_s(instance.name, place.name, new)
    # D reads what came over in its turn, behind what it has to compute, and where there is room.
    moved_s += max(0.0, max(kv_wait_s, wait_s) - p_ready_s)
    ttft_s = p_ready_s + moved_s
    memory_s += p_memory_s
    cost_s = ttft_s + harm_s + decode_s + next_s + memory_s
    prices = cost_s, at, ttft_s, harm_s, decode_s, next_s, memory_s, p_wait_s
    return (*prices, place, load, hit, new, kv_wait_s, p)
