"""One request's decision: from what is known (Scene) to where it goes and why (Choice).

A `Decide` is a pure function; the router holds one. `by_rules` is the one that the options
`--placement` and `--offload-policy` describe: home or placement gives D, the class follows from D's
new tokens, and a HEAVY request may get a P.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from proxy.core.classify import Size, classify
from proxy.core.connectors import CONNECTORS, Connector
from proxy.core.free import Free
from proxy.core.gate import Thresholds
from proxy.core.latency import Latency
from proxy.core.offload import Decision, Question, colocate, should_offload
from proxy.core.options import COLOCATIONS_KEPT, Options, Priced, unpriced
from proxy.core.policy import SCORERS, STICKY
from proxy.core.types import Candidate, Reason, RequestFacts, RouteClass

PINNED_RATIO = 0.3
"""Of a KV cache, for prompts that others have not fetched yet; one prompt always may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The core's part of the options; names and units as on the command line."""

    prefill_throughput: float
    warm_threshold: int = 1500
    heavy_threshold: int = 8192
    placement: str = "affinity"
    offload_policy: str = "cost"
    offload_non_cached_tokens: int = 512
    shadow_policy: str | None = None
    kv_connector: str = "mooncake"
    kv_transfer_time_s: float = 0.5
    tpot_slo_s: float = 0.05
    prefill_timeout_s: float = 120.0
    kv_pin_timeout_s: float = 480.0
    hedge: bool = True
    session_ttl_s: float = 3600.0
    max_sessions: int = 100_000
    prefix_cache_bytes: int = 256 << 20
    max_num_batched_tokens: int = 8192
    slow_start_s: float = 30.0
    thresholds: Thresholds = field(default_factory=Thresholds)


def _size_unknown(name: str) -> int | None:
    del name
    return None


def _none_stranded(name: str, now_s: float) -> tuple[int, int]:
    del name, now_s
    return 0, 0


@dataclass(slots=True, init=False)
class Scene:
    """Everything a decision may look at. `free`: instances that may be chosen, at least one.

    `home` is the name of the session's instance, which need not be among the free ones;
    `mean_ongoing_tokens()` is over all instances that are up, busy ones included; most policies do
    not ask. `strain`: the price of running streams' time (core.strain);
    `kv_tokens`: what an instance's cache holds, None while unknown; `stranded`: hand-overs whose KV
    an instance may still hold, and their tokens (core.stranded).
    """

    config: RouterConfig
    facts: RequestFacts
    home: str | None
    free: Free | Sequence[Candidate]
    mean_ongoing_tokens: Callable[[], float]
    now_s: float
    latency: Latency
    strain: float
    kv_tokens: Callable[[str], int | None]
    stranded: Callable[[str, float], tuple[int, int]]

    def __init__(
        self,
        config: RouterConfig,
        facts: RequestFacts,
        home: str | None,
        free: Free | Sequence[Candidate],
        mean_ongoing_tokens: Callable[[], float],
        now_s: float,
        latency: Latency,
        strain: float = 1.0,
        kv_tokens: Callable[[str], int | None] = _size_unknown,
        stranded: Callable[[str, float], tuple[int, int]] = _none_stranded,
    ) -> None:
        self.config, self.facts, self.home, self.free = config, facts, home, free
        self.mean_ongoing_tokens = mean_ongoing_tokens
        self.now_s, self.latency, self.strain = now_s, latency, strain
        self.kv_tokens, self.stranded = kv_tokens, stranded


@dataclass(slots=True, init=False)
class Choice:
    """D, the class of the request on it, and P or None; each with its reason.

    `placed`: whether D was chosen by placement, not by the session's home. `options`: what was
    priced, the cheapest first, in bounds; none where the policy goes by rules.
    """

    decode: Candidate
    prefill: Candidate | None
    size: Size
    reason: Reason
    placed: bool
    predicted_ttft_s: float | None
    options: Sequence[Priced]

    def __init__(
        self,
        decode: Candidate,
        prefill: Candidate | None,
        size: Size,
        reason: Reason,
        placed: bool,
        predicted_ttft_s: float | None = None,
        options: Sequence[Priced] = (),
    ) -> None:
        self.decode, self.prefill, self.size, self.reason = decode, prefill, size, reason
        self.placed, self.predicted_ttft_s, self.options = placed, predicted_ttft_s, options


Decide = Callable[[Scene], Choice]


def by_rules(scene: Scene) -> Choice:
    """What `--placement` and `--offload-policy` say."""
    d, placed = place(scene)
    size, p, decision = _offload(scene, d)
    return Choice(d, p if decision.offload else None, size, decision.reason, placed)


def place(scene: Scene) -> tuple[Candidate, bool]:
    """The session's home while it is free, else the best score."""
    config = scene.config
    if config.placement in STICKY:
        for candidate in scene.free:
            if candidate.instance.name == scene.home:
                return candidate, False
    scores = list(map(SCORERS[config.placement], scene.free))
    lowest = min(scores)
    best = [c for c, score in zip(scene.free, scores, strict=True) if score == lowest]
    return (best[0] if len(best) == 1 else min(best, key=_longest_unused)), True


def _longest_unused(c: Candidate) -> tuple[int, int, int]:
    return c.load.ongoing_tokens, c.sessions, c.last_placed


def size_on(scene: Scene, d: Candidate) -> Size:
    """The request's class where D would compute it."""
    return classify(d.new_tokens, scene.config.warm_threshold, scene.config.heavy_threshold)


def peers(scene: Scene, d: Candidate | None = None) -> list[Candidate]:
    """Who could prefill (for D): reachable by the connector, with transfers to spare."""
    connector = CONNECTORS[scene.config.kv_connector]
    return [c for c in scene.free if c is not d and can_prefill(scene, c, connector)]


def can_prefill(scene: Scene, c: Candidate | Priced, connector: Connector) -> bool:
    """Whether an instance may compute for another: reachable, with a transfer and room to spare.

    What it holds for others to fetch is out of its own streams' reach, so that is bounded.
    """
    if connector.needs_engine_id and c.instance.bootstrap_url is None:
        return False
    if not connector.pins:
        return True
    lost, lost_tokens = scene.stranded(c.instance.name, scene.now_s)
    pinned = c.load.pinned_requests + lost
    if pinned >= connector.max_parallel:
        return False
    kv_tokens = scene.kv_tokens(c.instance.name) if pinned else None
    if kv_tokens is None:
        return True
    pinned_tokens = c.load.pinned_tokens + lost_tokens
    return pinned_tokens + scene.facts.prompt_tokens <= PINNED_RATIO * kv_tokens


def _offload(scene: Scene, d: Candidate) -> tuple[Size, Candidate | None, Decision]:
    config, size = scene.config, size_on(scene, d)
    if size is not Size.HEAVY:
        return size, None, colocate(Reason.BELOW_THRESHOLD)
    if not CONNECTORS[config.kv_connector].can_offload:
        return size, None, colocate(Reason.NO_CONNECTOR)
    if not scene.facts.offloadable:
        return size, None, colocate(Reason.NOT_OFFLOADABLE)
    p = min(peers(scene, d), key=lambda c: (c.load.ongoing_tokens, c.new_tokens), default=None)
    question = Question(
        decode=d,
        prefill=p,
        mean_ongoing_tokens=scene.mean_ongoing_tokens(),
        prompt_tokens=scene.facts.prompt_tokens,
        heavy_threshold=config.heavy_threshold,
        prefill_throughput=config.prefill_throughput,
        kv_transfer_time_s=config.kv_transfer_time_s,
        non_cached_tokens=config.offload_non_cached_tokens,
    )
    return size, p, should_offload(config.offload_policy, question)


def route_class(size: Size, *, offloaded: bool) -> RouteClass:
    """The class as it is logged: for HEAVY, where it is computed."""
    if size is Size.HEAVY:
        return RouteClass.HEAVY_P2P if offloaded else RouteClass.HEAVY_COLO
    return RouteClass.WARM if size is Size.WARM else RouteClass.MEDIUM


def predicted_ttft_s(scene: Scene, choice: Choice) -> float:
    """Of what was chosen: the policy's own, else queue, computation and transfer."""
    if choice.predicted_ttft_s is not None:
        return choice.predicted_ttft_s
    d, p = choice.decode, choice.prefill
    if p is None:
        return ready_s(scene, d)
    return ready_s(scene, p) + transfer_s(scene, p, d)


def ready_s(scene: Scene, c: Candidate) -> float:
    """Until `c` would have computed the prompt, its queue included."""
    load, times = c.load, scene.latency.of(c.instance.name)
    wait_s = max(times.wait_s(scene.now_s), c.kv_wait_s)
    streams = load.decode_requests
    return wait_s + times.prefill_s(c.new_tokens, c.hit_tokens, streams, load.decode_tokens)


def transfer_s(scene: Scene, p: Candidate, d: Candidate) -> float:
    """Moving what D lacks from P."""
    return scene.latency.transfer_s(p.instance.name, d.instance.name, d.new_tokens)


def options_of(scene: Scene, choice: Choice) -> Options:
    """What is kept of a decision: what its policy priced, else the time each place would take."""
    d, p = choice.decode.instance, choice.prefill.instance if choice.prefill else None
    if choice.options:
        return Options(choice.options, d, p)
    kept = list(scene.free[:COLOCATIONS_KEPT])
    for one in (choice.decode, choice.prefill):
        if one is not None and not any(one is c for c in kept):
            kept.append(one)
    return Options([unpriced(c, ready_s(scene, c)) for c in kept], d, p)
