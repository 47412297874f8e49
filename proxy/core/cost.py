"""The cost policy: every place a request could be computed and decoded, priced in seconds.

    J(P, D) = felt(ttft) + strain * (weight_harm * stalled streams * stall
                                     + weight_decode * decode time on D)
              + weight_next_turn * busy ratio of D * rest of a prefill met there
              + weight_memory * seconds to compute again what the new KV displaces
              + weight_room * (KV in use on D with this prompt / all of it)^2
    ttft    = wait(P) + prefill(P, prompt - hit_P) [ + transfer(P, D, prompt - hit_D) + step(D) ]

Time up to half of the TTFT target is felt only in part: nobody misses the target by it, and it buys
the output a calmer instance. `strain` follows the TPOT target (core.strain). The busy ratio, over
the last minute, is what the session's next turns will meet on D: queues are too short a memory.
What they meet lasts as long as prefills of this fleet do, long or short. KV in use is what waiting
sessions lose their own to: once a cache is full of running prompts, every turn computes all of its
prompt, runs longer for it, and keeps the cache full.

P = D is colocation, at home or elsewhere: a session follows its tokens, and affinity is worth
exactly what the lost prefix would cost. P != D is an offload; where P is the old home it hands its
prefix to the new one (a pull), for the price of a transfer instead of a prefill. An offload must
beat the best colocation by a margin, and P's queue is bounded: both keep the tail short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from proxy.core.classify import Size
from proxy.core.connectors import CONNECTORS
from proxy.core.decide import Choice, Scene, can_prefill, size_on
from proxy.core.options import COLOCATIONS_KEPT, OFFLOADS_KEPT, Priced
from proxy.core.types import Reason

EARLY_RATIO = 0.5
MARGIN_S = 0.020
MARGIN_RATIO = 0.15
MAX_WAIT_S = 4.0
"""P takes no offload behind a longer queue: the founding design lost a quarter of its HEAVY
requests in such queues."""


@dataclass(frozen=True, slots=True)
class Weights:
    """How seconds of others count against seconds of this request's first token.

    Found in the league (docs/figures.md) by search over two traces, both regimes and three loads;
    the optimum is flat. `early`: of a second within the first half of the TTFT target; `harm`: per
    stream and second of stall; `decode`: per second of an output of `output_tokens`; `next_turn`:
    per second of the wait that D's busy ratio promises; `memory`: per second of displaced
    computation; `room`: seconds for a cache that is in use as a whole.
    """

    early: float = 0.4
    harm: float = 0.12
    decode: float = 0.2
    next_turn: float = 2.5
    memory: float = 1.0
    room: float = 1.0
    output_tokens: float = 300.0


WEIGHTS = Weights()


def by_cost(scene: Scene, weights: Weights | None = None) -> Choice:
    """The cheapest option."""
    w = weights or WEIGHTS
    colocated = _colocations(scene, w)
    ranked = sorted(colocated, key=_order)
    best = _stay(scene, ranked)
    size = size_on(scene, best.decode)
    offloads = _offloads(scene, w, colocated)
    reason = _why_not(scene, best, size, offloads)
    chosen = best if reason is not None else offloads[0]
    d = chosen.decode
    return Choice(
        d,
        chosen.prefill,
        size_on(scene, d),
        reason or _why(chosen),
        d.instance.name != scene.home,
        chosen.ttft_s,
        ranked[:COLOCATIONS_KEPT] + offloads[:OFFLOADS_KEPT],
    )


def _stay(scene: Scene, ranked: Sequence[Priced]) -> Priced:
    """The cheapest, or home where that costs hardly more: short prompts leave no hits to hold."""
    best = ranked[0]
    for one in ranked:
        if one.cost_s > best.cost_s + MARGIN_S:
            break
        if one.decode.instance.name == scene.home:
            return one
    return best


def _order(one: Priced) -> tuple[float, int, int]:
    return one.cost_s, one.decode.sessions, one.decode.last_placed


_COST = attrgetter("cost_s")
_DECODE = attrgetter("decode_s")


def _colocations(scene: Scene, w: Weights) -> list[Priced]:
    """Everything on one instance: until it has the prompt's KV, and what that costs all others.

    New KV displaces other sessions' where the cache is full. The output costs steps on D, which
    grow with the KV that they read. One loop: it is most of what a decision takes.
    """
    times_of, now_s, prompt_tokens = scene.latency.of, scene.now_s, scene.facts.prompt_tokens
    harm, decode = w.harm * scene.strain, w.decode * scene.strain * w.output_tokens
    next_turn = w.next_turn * scene.latency.rest_s()
    memory, room, early = w.memory, w.room, w.early
    kv_tokens_of = scene.kv_tokens
    early_s = EARLY_RATIO * scene.config.ttft_slo_s
    priced = []
    for c in scene.free:
        load, new, times = c.load, c.new_tokens, times_of(c.instance.name)
        streams, decode_tokens = load.decode_requests, load.decode_tokens
        prefill_s = times.prefill_s(new, c.hit_tokens, streams, decode_tokens)
        wait_s = times.busy_until_s - now_s
        if wait_s < 0.0:
            wait_s = 0.0
        ready_s = max(wait_s, c.kv_wait_s) + prefill_s
        harm_s = harm * streams * prefill_s
        step = times.step
        decode_s = decode * (
            step.p + step.q * (decode_tokens + load.inbound_tokens + prompt_tokens)
        )
        full = c.kv_full
        memory_s = memory * full * times.prefill_s(new, 0, 0, 0) if full else 0.0
        kv_tokens = kv_tokens_of(c.instance.name)
        if kv_tokens:
            memory_s += room * ((load.ongoing_tokens + prompt_tokens) / kv_tokens) ** 2
        next_s = next_turn * times.busy_ratio(now_s)
        # As in _felt_s.
        felt_s = early * ready_s if ready_s <= early_s else ready_s - (1.0 - early) * early_s
        cost_s = felt_s + harm_s + decode_s + next_s + memory_s
        priced.append(Priced(cost_s, ready_s, harm_s, decode_s, next_s, memory_s, wait_s, c))
    return priced


def _felt_s(scene: Scene, w: Weights, ttft_s: float) -> float:
    """What a wait of this length costs: little until half of the TTFT target is used up."""
    early_s = EARLY_RATIO * scene.config.ttft_slo_s
    if ttft_s <= early_s:
        return w.early * ttft_s
    return ttft_s - (1.0 - w.early) * early_s


def _why_not(scene: Scene, best: Priced, size: Size, offloads: Sequence[Priced]) -> Reason | None:
    """Why no offload beats the best colocation; None when one does."""
    if not CONNECTORS[scene.config.kv_connector].can_offload:
        return _unless_small(size, Reason.NO_CONNECTOR)
    if not scene.facts.offloadable:
        return _unless_small(size, Reason.NOT_OFFLOADABLE)
    if not offloads:
        return _unless_small(size, Reason.NO_PEER)
    gain_s = best.cost_s - offloads[0].cost_s
    if gain_s <= max(MARGIN_S, MARGIN_RATIO * best.cost_s):
        d_idle = not best.decode.load.decode_requests
        return _unless_small(size, Reason.D_IDLE if d_idle else Reason.MARGIN)
    return None


def _why(offload: Priced) -> Reason:
    p = offload.prefill
    pulls = p is not None and p.hit_tokens > p.new_tokens
    return Reason.KV_PULL if pulls else Reason.P_IDLE_D_BUSY


def _unless_small(size: Size, reason: Reason) -> Reason:
    return reason if size is Size.HEAVY else Reason.BELOW_THRESHOLD


def _offloads(scene: Scene, w: Weights, colocated: Sequence[Priced]) -> list[Priced]:
    """Pairs worth a look: the three quickest P, for the home and for the two best to decode on.

    What each costs alone is in its colocation already.
    """
    connector = CONNECTORS[scene.config.kv_connector]
    if not connector.can_offload or not scene.facts.offloadable:
        return []
    least = scene.config.heavy_threshold
    heavy = [one for one in colocated if one.decode.new_tokens >= least]
    if not heavy:
        return []
    home, ds = scene.home, sorted(heavy, key=_DECODE)[:2]
    ds += [one for one in heavy if one.decode.instance.name == home and one not in ds]
    quickest = sorted(colocated, key=_computing)
    able = (
        p for p in quickest if p.wait_s <= MAX_WAIT_S and can_prefill(scene, p.decode, connector)
    )
    ps = list(islice(able, 3))
    pairs = (_offloaded(scene, w, p, d) for d in ds for p in ps if p is not d)
    in_time = scene.config.prefill_timeout_s
    return sorted((pair for pair in pairs if pair.ttft_s < in_time), key=_COST)


def _computing(p: Priced) -> float:
    """What P costs, its KV included, before D is known."""
    return p.ttft_s + p.harm_s + p.memory_s


def _offloaded(scene: Scene, w: Weights, p: Priced, d: Priced) -> Priced:
    """Computed as if on P, decoded as if on D, and moved."""
    p_name, d_name = p.decode.instance.name, d.decode.instance.name
    moved_s = scene.latency.transfer_s(p_name, d_name, d.decode.new_tokens)
    # D reads what came over in its turn, behind what it has to compute, and where there is room.
    moved_s += max(0.0, max(d.decode.kv_wait_s, d.wait_s) - p.ttft_s)
    ttft_s = p.ttft_s + moved_s
    whole_s = _felt_s(scene, w, ttft_s) + p.harm_s + p.memory_s + d.decode_s + d.next_s + d.memory_s
    return Priced(
        whole_s,
        ttft_s,
        p.harm_s,
        d.decode_s,
        d.next_s,
        p.memory_s + d.memory_s,
        p.wait_s,
        d.decode,
        p.decode,
    )
