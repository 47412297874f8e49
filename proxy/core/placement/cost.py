"""The cost policy: every place a request could be computed and decoded, priced in seconds.

    J(P, D) = ttft + strain * (weight_harm * stalled streams * stall * pressed(P)
                               + weight_decode * decode time on D)
              + weight_arrivals * arrivals/s at P * stall * (stall / 2 + wait(P))
              + weight_next_turn * busy ratio of D * rest of a prefill met there
              + weight_memory * seconds to compute again what the new KV displaces
              + weight_room * (KV in use on D with this prompt / all of it)^2
    ttft    = wait(P) + prefill(P, prompt - hit_P) [ + transfer(P, D, prompt - hit_D) + step(D) ]
    pressed = sqrt(r) below 1, max(1 / r, 0.7) from there
    r       = step(P) / (1 - busy ratio of P) / TPOT target

A stall is what a prefill adds to the steps of the streams beside it. It counts most where they just
keep their target: those whose tokens come quicker have time to spare, those that miss it anyway
have less to lose. `strain` follows the same target over the fleet (core.strain). Whoever arrives at
P while it computes waits for what is left of it, half of it on average, and for the queue before
it: long prompts go where few arrive. The busy ratio, over the last minute, is what the session's
next turns will meet on D: queues are too short a memory. What they meet lasts as long as prefills
of this fleet do, long or short. KV in use is what waiting sessions lose their own to: once a cache
is full of running prompts, every turn computes all of its prompt, runs longer for it, and keeps the
cache full. For the same reason what new KV displaces counts more than once: to make up for it
displaces again.

P = D is colocation, at home or elsewhere: a session follows its tokens, and affinity is worth
exactly what the lost prefix would cost. P != D is an offload; where P is the old home it hands its
prefix to the new one (a pull), for the price of a transfer instead of a prefill. An offload must
beat the best colocation by a margin, and P's queue is bounded: both keep the tail short.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop
from itertools import islice

from proxy.core.connectors import CONNECTORS
from proxy.core.latency.model import FIRST_STEP
from proxy.core.placement.alternatives import COLOCATIONS_KEPT, OFFLOADS_KEPT, PricedOption
from proxy.core.placement.candidates import Candidates
from proxy.core.placement.scene import Choice, PlacementView, Size, can_prefill, classify
from proxy.core.types import Reason

MARGIN_S = 0.020
MARGIN_RATIO = 0.15
MAX_WAIT_S = 4.0
"""P takes no offload behind a longer queue: a first design, without a bound, lost a quarter of its
HEAVY requests in such queues."""
MISSED = 0.7
"""What a stall counts at least for streams that miss their target anyway."""
BUSY_MOST = 0.95
"""Steps of an instance that only prefills would be endless."""


@dataclass(frozen=True, slots=True)
class Weights:
    """How seconds of others count against seconds of this request's first token.

    Found in the league (docs/figures.md) by search over three traces, both regimes and three loads;
    the optimum is flat. `harm`: per stream and second of stall; `decode`: per second of an output
    of `output_tokens`; `arrivals`: per second that one who arrives later waits; `next_turn`: per
    second of the wait that D's busy ratio promises; `memory`: per second of displaced computation;
    `room`: seconds for a cache that is in use as a whole.
    """

    harm: float = 0.12
    decode: float = 0.03
    arrivals: float = 1.0
    next_turn: float = 0.5
    memory: float = 4.0
    room: float = 0.5
    output_tokens: float = 300.0


WEIGHTS = Weights()


def by_cost(scene: PlacementView, weights: Weights | None = None) -> Choice:
    """The cheapest option."""
    w = weights or WEIGHTS
    free = Candidates.of(scene.free, scene.facts.prompt_tokens)
    colocated = _colocations(scene, free, w)
    ranked = _ranked(free, colocated)
    best = ranked[0]
    if scene.home is not None and best.instance.name != scene.home:
        best = _stay(free, scene.home, best, colocated)
        if not any(option is best for option in ranked):
            ranked[-1] = best
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


def _stay(
    free: Candidates, home: str, best: PricedOption, colocated: list[PricedOption]
) -> PricedOption:
    """The cheapest, or home where that costs hardly more: short prompts leave no hits to hold."""
    if home not in free.names:
        return best
    at_home = colocated[free.names.index(home)]
    return best if at_home.cost_s > best.cost_s + MARGIN_S else at_home


def _cost(option: PricedOption) -> float:
    return option.cost_s


def _ranked(free: Candidates, colocated: list[PricedOption]) -> list[PricedOption]:
    """The cheapest ones; of equals the one with fewer sessions, then the longest unused."""
    kept = COLOCATIONS_KEPT
    costs_s = sorted([option.cost_s for option in colocated])
    most_s = costs_s[min(kept, len(costs_s) - 1)]
    ranked = sorted([option for option in colocated if option.cost_s <= most_s], key=_cost)
    last_s = -math.inf
    for cost_s in costs_s[: kept + 1]:
        if cost_s == last_s:
            ranked.sort(key=lambda option: (option.cost_s, *free.rank(option.at)))
            break
        last_s = cost_s
    return ranked[:kept]


def _colocations(scene: PlacementView, free: Candidates, w: Weights) -> list[PricedOption]:
    """Everything on one instance: until it has the prompt's KV, and what that costs all others.

    New KV displaces other sessions' where the cache is full. The output costs steps on D, which
    grow with the KV that they read. One loop, and the formulas of `Times` written out in it: it is
    most of what a decision takes.
    """
    now_s, prompt_tokens, budget = scene.now_s, free.prompt_tokens, scene.latency.budget
    harm, decode = w.harm * scene.strain, w.decode * scene.strain * w.output_tokens
    next_turn = w.next_turn * scene.latency.rest_s()
    memory, room, arrivals = w.memory, w.room, w.arrivals
    target_s = scene.config.tpot_slo_s
    all_times, sizes = scene.latency.times(free.names), list(map(scene.kv_tokens, free.names))
    priced: list[PricedOption] = []
    for at, times in enumerate(all_times):
        load, hit, full, kv_wait_s = (
            free.loads[at],
            free.hit_tokens[at],
            free.kv_full[at],
            free.kv_wait_s[at],
        )
        new = prompt_tokens - hit
        streams, decode_tokens = load.decode_requests, load.decode_tokens
        line, step = times.prefill, times.step
        p, q, step_p, step_q = line.p, line.q, step.p, step.q
        stall_s = prefill_s = p * new + q * (new * (hit + new / 2))
        step_s = step_p + step_q * decode_tokens
        if streams:
            steps = math.ceil(new / budget) + (0.0 if times.pending else FIRST_STEP)
            prefill_s += steps * step_s
        wait_s = times.busy_until_s - now_s
        if wait_s < 0.0:
            wait_s = 0.0
        ready_s = (max(wait_s, kv_wait_s)) + prefill_s
        busy, per_s = times.lately(now_s)
        harm_s = 0.0
        if streams:
            pressed = step_s / (1.0 - min(BUSY_MOST, busy)) / target_s
            pressed = math.sqrt(pressed) if pressed < 1.0 else max(MISSED, 1.0 / pressed)
            harm_s = harm * streams * stall_s * pressed
        behind_s = arrivals * per_s * stall_s * (stall_s / 2 + wait_s)
        kv_after = decode_tokens + load.inbound_tokens + prompt_tokens
        decode_s = decode * (step_p + step_q * kv_after)
        memory_s = memory * full * (p * new + q * (new * (new / 2))) if full else 0.0
        kv_tokens = sizes[at]
        if kv_tokens:
            in_use = (load.ongoing_tokens + prompt_tokens) / kv_tokens
            memory_s += room * (in_use * in_use)
        next_s = next_turn * busy
        cost_s = ready_s + harm_s + behind_s + decode_s + next_s + memory_s
        priced.append(
            PricedOption(
                cost_s,
                at,
                ready_s,
                harm_s,
                behind_s,
                decode_s,
                next_s,
                memory_s,
                wait_s,
                free.instances[at],
                load,
                hit,
                new,
                kv_wait_s,
            )
        )
    return priced


def _why_not(
    scene: PlacementView, best: PricedOption, size: Size, offloads: list[PricedOption]
) -> Reason | None:
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


def _margin_s(best: PricedOption) -> float:
    return max(MARGIN_S, MARGIN_RATIO * best.cost_s)


def _may_offload(best: PricedOption, size: Size, colocated: list[PricedOption]) -> bool:
    """Whether pairs are worth pricing: all HEAVY ones, others where one could win at all.

    No pair costs less than the cheapest P for its part and the cheapest D for its own. Most turns
    of a long session are short and have no chance.
    """
    if size is Size.HEAVY:
        return True
    least_p_s = least_d_s = math.inf
    for c in colocated:
        least_p_s = min(least_p_s, c.cost_s - c.decode_s - c.next_s)
        least_d_s = min(least_d_s, _decoding_s(c))
    return best.cost_s - (least_p_s + least_d_s) > _margin_s(best)


def _why(offload: PricedOption) -> Reason:
    p = offload.prefill
    pulls = p is not None and p.hit_tokens > p.new_tokens
    return Reason.KV_PULL if pulls else Reason.P_IDLE_D_BUSY


def _unless_small(size: Size, reason: Reason) -> Reason:
    return reason if size is Size.HEAVY else Reason.BELOW_THRESHOLD


def _offloads(
    scene: PlacementView, free: Candidates, colocated: list[PricedOption]
) -> list[PricedOption]:
    """Pairs worth a look: the three quickest P, for the home and for the two best to decode on.

    What each costs alone is in its colocation already.
    """
    least = scene.config.heavy_threshold
    if scene.facts.prompt_tokens < least or not scene.facts.offloadable:
        return []
    if not CONNECTORS[scene.config.kv_connector].can_offload:
        return []
    heavy = [c for c in colocated if c.new_tokens >= least]
    if not heavy:
        return []
    ds = sorted(heavy, key=_decoding_s)[:2]
    if scene.home in free.names:
        home = colocated[free.names.index(scene.home)]
        if home.new_tokens >= least and home not in ds:
            ds.append(home)
    ps = list(islice(_able(scene, colocated), 3))
    pairs = [_offloaded(scene, p, d) for d in ds for p in ps if p.at != d.at]
    in_time_s = scene.config.prefill_timeout_s
    return sorted([pair for pair in pairs if pair.ttft_s < in_time_s], key=_cost)[:OFFLOADS_KEPT]


def _decoding_s(d: PricedOption) -> float:
    """What a request costs where it only decodes."""
    return d.decode_s + d.next_s + d.memory_s


def _able(scene: PlacementView, colocated: list[PricedOption]) -> Iterator[PricedOption]:
    """Those that may compute for another, the quickest first.

    Quick goes by what P costs, its KV included, before D is known.
    """
    connector = CONNECTORS[scene.config.kv_connector]
    quickest = [
        (c.ttft_s + c.harm_s + c.behind_s + c.memory_s, c.at)
        for c in colocated
        if c.wait_s <= MAX_WAIT_S
    ]
    heapify(quickest)
    while quickest:
        p = colocated[heappop(quickest)[1]]
        if can_prefill(scene, p, connector):
            yield p


def _offloaded(scene: PlacementView, p: PricedOption, d: PricedOption) -> PricedOption:
    """Computed as if on P, decoded as if on D, and moved."""
    moved_s = scene.latency.transfer_s(p.instance.name, d.instance.name, d.new_tokens)
    # D reads what came over in its turn, behind what it has to compute, and where there is room.
    moved_s += max(0.0, max(d.kv_wait_s, d.wait_s) - p.ttft_s)
    ttft_s = p.ttft_s + moved_s
    on_p_s = p.harm_s + p.behind_s + p.memory_s
    return PricedOption(
        ttft_s + on_p_s + _decoding_s(d),
        d.at,
        ttft_s,
        p.harm_s,
        p.behind_s,
        d.decode_s,
        d.next_s,
        d.memory_s + p.memory_s,
        p.wait_s,
        d.instance,
        d.load,
        d.hit_tokens,
        d.new_tokens,
        d.kv_wait_s,
        p,
    )
