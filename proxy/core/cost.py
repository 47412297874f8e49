"""The cost policy: every place a request could be computed and decoded, priced in seconds.

    J(P, D) = ttft + weight_harm * stalled streams * stall + weight_decode * decode time on D
              + weight_memory * seconds to compute again what the new KV displaces
    ttft    = wait(P) + prefill(P, prompt - hit_P) [ + transfer(P, D, prompt - hit_D) + step(D) ]

P = D is colocation, at home or elsewhere: a session follows its tokens, and affinity is worth
exactly what the lost prefix would cost. P != D is an offload; where P is the old home it hands its
prefix to the new one (a pull), for the price of a transfer instead of a prefill. An offload must
beat the best colocation by a margin, and P's queue is bounded: both keep the tail short.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.classify import Size
from proxy.core.connectors import CONNECTORS
from proxy.core.decide import Choice, Scene, peers, size_on
from proxy.core.types import Candidate, Reason

MARGIN_S = 0.020
MARGIN_RATIO = 0.05
MAX_WAIT_S = 2.0
"""P takes no offload behind a longer queue: the founding design lost a quarter of its HEAVY
requests in such queues."""


@dataclass(frozen=True, slots=True)
class Weights:
    """How seconds of others count against seconds of this request's first token."""

    harm: float = 0.1
    decode: float = 0.1
    memory: float = 1.0
    output_tokens: float = 300.0


@dataclass(frozen=True, slots=True)
class Priced:
    """One option: D, P or None, the predicted TTFT and the whole cost, seconds."""

    decode: Candidate
    prefill: Candidate | None
    ttft_s: float
    cost_s: float


def by_cost(scene: Scene, weights: Weights | None = None) -> Choice:
    """The cheapest option."""
    w = weights or Weights()
    colocated = sorted((_colocated(scene, w, c) for c in scene.free), key=_cost)
    best = colocated[0]
    size = size_on(scene, best.decode)
    offload, reason = _best_offload(scene, w, best, size)
    placed = best.decode.instance.name != scene.home
    if offload is None:
        return Choice(best.decode, None, size, reason, placed, best.ttft_s)
    d = offload.decode
    moved = d.instance.name != scene.home
    return Choice(d, offload.prefill, size_on(scene, d), reason, moved, offload.ttft_s)


def _cost(option: Priced) -> float:
    return option.cost_s


def _compute(scene: Scene, w: Weights, c: Candidate) -> tuple[float, float]:
    """Seconds until `c` has the prompt's KV, and the cost of that to everybody else there."""
    name, load = c.instance.name, c.load
    prefill_s = scene.latency.prefill_s(
        name, c.new_tokens, c.hit_tokens, load.decode_requests, load.decode_tokens
    )
    ready_s = max(scene.latency.wait_s(name, scene.now_s), c.kv_wait_s) + prefill_s
    return ready_s, w.harm * load.decode_requests * prefill_s


def _decode_cost(scene: Scene, w: Weights, d: Candidate) -> float:
    """What the output costs on D, whose steps grow with the KV that they read."""
    kv_tokens = d.load.decode_tokens + d.load.inbound_tokens + scene.facts.prompt_tokens
    return w.decode * w.output_tokens * scene.latency.step_s(d.instance.name, kv_tokens)


def _memory_cost(scene: Scene, w: Weights, c: Candidate) -> float:
    """New KV displaces other sessions' where the cache is full."""
    name = c.instance.name
    return w.memory * c.kv_full * scene.latency.prefill_s(name, c.new_tokens, 0, 0, 0)


def _colocated(scene: Scene, w: Weights, c: Candidate) -> Priced:
    ready_s, harm_s = _compute(scene, w, c)
    cost_s = ready_s + harm_s + _decode_cost(scene, w, c) + _memory_cost(scene, w, c)
    return Priced(c, None, ready_s, cost_s)


def _best_offload(
    scene: Scene, w: Weights, best: Priced, size: Size
) -> tuple[Priced | None, Reason]:
    """An offload that beats the best colocation, or why there is none."""
    if not CONNECTORS[scene.config.kv_connector].can_offload:
        return None, _unless_small(size, Reason.NO_CONNECTOR)
    if not scene.facts.offloadable:
        return None, _unless_small(size, Reason.NOT_OFFLOADABLE)
    options = _offloads(scene, w)
    if not options:
        return None, _unless_small(size, Reason.NO_PEER)
    cheapest = min(options, key=_cost)
    gain_s = best.cost_s - cheapest.cost_s
    if gain_s <= max(MARGIN_S, MARGIN_RATIO * best.cost_s):
        d_idle = not best.decode.load.decode_requests
        return None, _unless_small(size, Reason.D_IDLE if d_idle else Reason.MARGIN)
    p = cheapest.prefill
    pulls = p is not None and p.hit_tokens > p.new_tokens
    return cheapest, Reason.KV_PULL if pulls else Reason.P_IDLE_D_BUSY


def _unless_small(size: Size, reason: Reason) -> Reason:
    return reason if size is Size.HEAVY else Reason.BELOW_THRESHOLD


def _offloads(scene: Scene, w: Weights) -> list[Priced]:
    """Pairs worth a look: the two quickest P for the home and for the two best to decode on."""
    heavy = [c for c in scene.free if c.new_tokens >= scene.config.heavy_threshold]
    by_decode = sorted(heavy, key=lambda c: _decode_cost(scene, w, c))[:2]
    ds = by_decode + [c for c in heavy if c.instance.name == scene.home and c not in by_decode]
    if not ds:
        return []
    computing = []
    for c in peers(scene):
        wait_s = scene.latency.wait_s(c.instance.name, scene.now_s)
        if wait_s <= MAX_WAIT_S:
            ready_s, harm_s = _compute(scene, w, c)
            computing.append((ready_s + harm_s + _memory_cost(scene, w, c), ready_s, c))
    computing.sort(key=lambda entry: entry[0])
    return [
        _offloaded(scene, w, (cost_s, ready_s, p), d)
        for d in ds
        for cost_s, ready_s, p in computing[:3]
        if p is not d
    ]


def _offloaded(
    scene: Scene, w: Weights, computed: tuple[float, float, Candidate], d: Candidate
) -> Priced:
    cost_s, ready_s, p = computed
    moved_s = scene.latency.transfer_s(p.instance.name, d.instance.name, d.new_tokens)
    moved_s += max(0.0, d.kv_wait_s - ready_s)
    ttft_s = ready_s + moved_s
    whole_s = cost_s + moved_s + _decode_cost(scene, w, d) + _memory_cost(scene, w, d)
    return Priced(d, p, ttft_s, whole_s)
