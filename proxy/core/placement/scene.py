"""A placement decision: its input (PlacementView), its output (Choice), and size classes.

A `Decide` is a pure function from a PlacementView to a Choice; the router holds one. Predictions
of a choice (time to first token, transfer) are computed here too, from the model of time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from proxy.core.config import RouterConfig
from proxy.core.connectors import CONNECTORS
from proxy.core.connectors.base import Connector
from proxy.core.latency.model import Latency
from proxy.core.placement.alternatives import COLOCATIONS_KEPT, Alternatives, PricedOption, unpriced
from proxy.core.placement.candidates import Candidates
from proxy.core.types import Candidate, Reason, RequestFacts, RouteClass


class Size(StrEnum):
    """The class before it is known where a HEAVY request will be computed."""

    WARM = "WARM"
    MEDIUM = "MEDIUM"
    HEAVY = "HEAVY"


def classify(new_tokens: int, warm_threshold: int, heavy_threshold: int) -> Size:
    """WARM below `warm_threshold` new tokens, HEAVY from `heavy_threshold` on."""
    if new_tokens >= heavy_threshold:
        return Size.HEAVY
    return Size.WARM if new_tokens < warm_threshold else Size.MEDIUM


PINNED_RATIO = 0.3
"""Of a KV cache, for prompts that others have not fetched yet; one prompt always may."""


def _size_unknown(name: str) -> int | None:
    del name
    return None


def _none_stranded(name: str, now_s: float) -> tuple[int, int]:
    del name, now_s
    return 0, 0


@dataclass(slots=True, init=False)
class PlacementView:
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
    free: Candidates | Sequence[Candidate]
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
        free: Candidates | Sequence[Candidate],
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
    options: Sequence[PricedOption]

    def __init__(
        self,
        decode: Candidate,
        prefill: Candidate | None,
        size: Size,
        reason: Reason,
        placed: bool,
        predicted_ttft_s: float | None = None,
        options: Sequence[PricedOption] = (),
    ) -> None:
        self.decode, self.prefill, self.size, self.reason = decode, prefill, size, reason
        self.placed, self.predicted_ttft_s, self.options = placed, predicted_ttft_s, options


Decide = Callable[[PlacementView], Choice]


def size_on(scene: PlacementView, d: Candidate) -> Size:
    """The request's class where D would compute it."""
    return classify(d.new_tokens, scene.config.warm_threshold, scene.config.heavy_threshold)


def peers(scene: PlacementView, d: Candidate | None = None) -> list[Candidate]:
    """Who could prefill (for D): reachable by the connector, with transfers to spare."""
    connector = CONNECTORS[scene.config.kv_connector]
    return [c for c in scene.free if c is not d and can_prefill(scene, c, connector)]


def can_prefill(scene: PlacementView, c: Candidate | PricedOption, connector: Connector) -> bool:
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


def route_class(size: Size, *, offloaded: bool) -> RouteClass:
    """The class as it is logged: for HEAVY, where it is computed."""
    if size is Size.HEAVY:
        return RouteClass.HEAVY_P2P if offloaded else RouteClass.HEAVY_COLO
    return RouteClass.WARM if size is Size.WARM else RouteClass.MEDIUM


def predicted_ttft_s(scene: PlacementView, choice: Choice) -> float:
    """Of what was chosen: the policy's own, else queue, computation and transfer."""
    if choice.predicted_ttft_s is not None:
        return choice.predicted_ttft_s
    d, p = choice.decode, choice.prefill
    if p is None:
        return ready_s(scene, d)
    return ready_s(scene, p) + transfer_s(scene, p, d)


def ready_s(scene: PlacementView, c: Candidate) -> float:
    """Until `c` would have computed the prompt, its queue included."""
    load, times = c.load, scene.latency.of(c.instance.name)
    wait_s = max(times.wait_s(scene.now_s), c.kv_wait_s)
    streams = load.decode_requests
    return wait_s + times.prefill_s(c.new_tokens, c.hit_tokens, streams, load.decode_tokens)


def transfer_s(scene: PlacementView, p: Candidate, d: Candidate) -> float:
    """Moving what D lacks from P."""
    return scene.latency.transfer_s(p.instance.name, d.instance.name, d.new_tokens)


def options_of(scene: PlacementView, choice: Choice) -> Alternatives:
    """What is kept of a decision: what its policy priced, else the time each place would take."""
    d, p = choice.decode.instance, choice.prefill.instance if choice.prefill else None
    if choice.options:
        return Alternatives(choice.options, d, p)
    kept = list(scene.free[:COLOCATIONS_KEPT])
    for one in (choice.decode, choice.prefill):
        if one is not None and not any(one is c for c in kept):
            kept.append(one)
    return Alternatives([unpriced(c, ready_s(scene, c)) for c in kept], d, p)
