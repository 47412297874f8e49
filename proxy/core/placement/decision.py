"""A placement decision: its input (PlacementView), its output (Choice), size classes.

A `Decide` is a pure function from a PlacementView to a Choice; `policies.POLICIES` names them. A
choice carries its predictions and the other options.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from proxy.core.latency.pace import FleetPace
from proxy.core.placement.alternatives import COLOCATIONS_KEPT, Alternatives, PricedOption, unpriced
from proxy.core.placement.candidates import Candidate, Candidates
from proxy.core.types import (
    Instance,
    Load,
    Place,
    Reason,
    RequestFacts,
    RouteClass,
    RouterConfig,
    TransferRules,
)


class Size(StrEnum):
    """The size class of a request, before it is known where a HEAVY one is computed."""

    WARM = "WARM"
    MEDIUM = "MEDIUM"
    HEAVY = "HEAVY"


def classify(new_tokens: int, warm_threshold: int, heavy_threshold: int) -> Size:
    """WARM below `warm_threshold` new tokens, HEAVY from `heavy_threshold` on."""
    if new_tokens >= heavy_threshold:
        return Size.HEAVY
    return Size.WARM if new_tokens < warm_threshold else Size.MEDIUM


PINNED_RATIO: Final = 0.3
"""Share of a P's KV cache for prompts not fetched yet; a first prompt may exceed it."""


class SessionKv(ABC):
    """The KV of the request's session among that of all others."""

    @abstractmethod
    def fullest_tokens(self, names: Sequence[str]) -> int:
        """The most tokens of live KV on any of these instances."""

    @abstractmethod
    def tokens_too_much(self, name: str, hit_tokens: int, kv_tokens: int) -> tuple[float, float]:
        """Tokens displaced now on an instance, and tokens that do not fit from now on.

        First: tokens that the prompt would evict (`hit_tokens` of it are there), times the chance
        that they are needed again. Second: expected live KV above `kv_tokens` if the session stays
        here.
        """

    @abstractmethod
    def asked(self) -> AskedKv:
        """What was asked of it, with the answers."""


class AskedKv(SessionKv):
    """What a decision has asked of `SessionKv`; of what it has not asked nothing is known.

    `fullest`: tokens, None if not asked. `too_much`: answers by instance.
    """

    def __init__(self, fullest: int | None, too_much: dict[str, tuple[float, float]]) -> None:
        self.fullest, self.too_much = fullest, too_much

    def fullest_tokens(self, names: Sequence[str]) -> int:
        """See `SessionKv`."""
        del names
        return self.fullest or 0

    def tokens_too_much(self, name: str, hit_tokens: int, kv_tokens: int) -> tuple[float, float]:
        """See `SessionKv`."""
        del hit_tokens, kv_tokens
        return self.too_much.get(name, (0.0, 0.0))

    def asked(self) -> AskedKv:
        """See `SessionKv`."""
        return self


def asked_of(*, is_held: bool, may_split: bool) -> RequestFacts:
    """What policies read of a request beside its tokens, without its prompt.

    `is_held`: one instance holds what it is about; `may_split`: a peer may compute its prompt.
    """
    return _ASKED[2 * is_held + may_split]


_ASKED: Final = [
    RequestFacts("", None, 0, (), 0.0, offloadable=may_split, holder="" if is_held else None)
    for is_held in (False, True)
    for may_split in (False, True)
]


@dataclass(slots=True, init=False)
class PlacementView:
    """Everything that a decision may read."""

    config: RouterConfig
    facts: RequestFacts
    home: str | None
    """Name of the session's instance, free or not."""
    free: Candidates
    """Eligible instances, at least one."""
    other_loads: Sequence[Load]
    """Loads of the instances that are up and not free."""
    now_s: float
    fleet: FleetPace
    """What is known of the fleet's times."""
    transfers: TransferRules
    """Limits of the KV connector."""
    slo_pressure: float
    """Price of running streams' time (core.latency.slo_pressure)."""
    prefill_only: Candidates | None
    """Instances that may only be P: they are above a busy threshold of decode."""
    decode_only: Candidates | None
    """Instances that may only be D of an offload: they are above a busy threshold of prefill."""
    busy_peers: Sequence[Instance]
    """Instances that cannot be P because of a busy threshold."""
    session_kv: SessionKv | None
    """None if unknown."""

    def __init__(
        self,
        config: RouterConfig,
        facts: RequestFacts,
        home: str | None,
        free: Candidates,
        other_loads: Sequence[Load],
        now_s: float,
        fleet: FleetPace,
        transfers: TransferRules,
        slo_pressure: float = 1.0,
        prefill_only: Candidates | None = None,
        decode_only: Candidates | None = None,
        busy_peers: Sequence[Instance] = (),
        session_kv: SessionKv | None = None,
    ) -> None:
        self.config, self.facts, self.home, self.free = config, facts, home, free
        self.other_loads = other_loads
        self.now_s, self.fleet = now_s, fleet
        self.transfers, self.slo_pressure = transfers, slo_pressure
        self.prefill_only, self.decode_only = prefill_only, decode_only
        self.busy_peers = busy_peers
        self.session_kv = session_kv

    @property
    def mean_ongoing_tokens(self) -> float:
        """Mean of the ongoing tokens of all instances that are up."""
        loads = [*self.free.loads, *self.other_loads]
        return sum([load.ongoing_tokens for load in loads]) / len(loads) if loads else 0.0

    def keep(self) -> None:
        """The decision is made: leave only what it would take to make it again."""
        facts = self.facts
        self.facts = asked_of(is_held=facts.holder is not None, may_split=facts.offloadable)
        if self.session_kv is not None:
            self.session_kv = self.session_kv.asked()


@dataclass(slots=True, init=False)
class Choice:
    """The result of a decision: D, P or None, the request's size class and the reason."""

    decode: Candidate
    prefill: Candidate | None
    size: Size
    reason: Reason
    placed: bool
    """D was chosen by placement, not as the session's home."""
    predicted_ttft_s: float
    """Queue, computation and transfer."""
    predicted_transfer_s: float | None
    """Time to move the KV that D lacks from P, None without a P."""
    options: Sequence[PricedOption]
    """A bounded number of alternatives, cheapest first if the policy prices them."""
    mistake: str | None
    """The policy's exception, if the request was placed by load instead."""

    def __init__(
        self,
        decode: Candidate,
        prefill: Candidate | None,
        size: Size,
        reason: Reason,
        *,
        placed: bool,
        predicted_ttft_s: float,
        predicted_transfer_s: float | None,
        options: Sequence[PricedOption],
        mistake: str | None = None,
    ) -> None:
        self.decode, self.prefill, self.size, self.reason = decode, prefill, size, reason
        self.placed, self.options, self.mistake = placed, options, mistake
        self.predicted_ttft_s = predicted_ttft_s
        self.predicted_transfer_s = predicted_transfer_s

    def alternatives(self) -> Alternatives:
        """The part of the choice that is kept for the request log."""
        p = self.prefill
        return Alternatives(self.options, self.decode.instance, p.instance if p else None)


Decide = Callable[[PlacementView], Choice]


def chosen(
    view: PlacementView,
    d: Candidate,
    p: Candidate | None,
    reason: Reason,
    *,
    placed: bool,
    mistake: str | None = None,
) -> Choice:
    """The choice of a policy that prices nothing, with the predictions of the learned times.

    Its options are the first COLOCATIONS_KEPT instances, and D and P.
    """
    ttft_s = ready_s(view, d if p is None else p)
    moved_s = transfer_s(view, p, d) if p is not None else None
    kept = view.free[:COLOCATIONS_KEPT]
    for one in (d, p):
        if one is not None and not any(one is c for c in kept):
            kept.append(one)
    return Choice(
        d,
        p,
        size_on(view, d),
        reason,
        placed=placed,
        predicted_ttft_s=ttft_s if moved_s is None else ttft_s + moved_s,
        predicted_transfer_s=moved_s,
        options=[unpriced(c, ready_s(view, c)) for c in kept],
        mistake=mistake,
    )


def size_on(view: PlacementView, d: Candidate) -> Size:
    """The size class of the request if D computes it."""
    return classify(d.new_tokens, view.config.warm_threshold, view.config.heavy_threshold)


def place_of(view: PlacementView, d: Candidate) -> Place:
    """Why D was chosen, of a first placement."""
    home, free = view.home, view.free
    if view.facts.holder is not None:
        return Place.HOLDER
    if home is not None:
        if d.instance.name == home:
            return Place.HOME
        return Place.HOME_LEFT if home in free.names else Place.HOME_AWAY
    if len(free.names) == 1:
        return Place.ONLY
    return Place.PREFIX if _has_most(d.hit_tokens, free.hit_tokens) else Place.LOAD


def _has_most(hit: int, hits: list[int]) -> bool:
    """Whether a hit is the most, and not all have it: what all have decides nothing."""
    has_more = False
    for other in hits:
        if other > hit:
            return False
        has_more = has_more or other < hit
    return has_more


def peers(view: PlacementView, d: Candidate | None = None) -> list[Candidate]:
    """The instances that may prefill (for D), see `can_prefill`."""
    found = [c for c in view.free if c is not d and can_prefill(view, c)]
    if view.prefill_only is not None:
        found += [c for c in view.prefill_only if c is not d and can_prefill(view, c)]
    return found


def no_peer(view: PlacementView, d: Candidate) -> Reason:
    """The reason for no P: the peers are above a busy threshold, or there are none."""
    busy = [i for i in view.busy_peers if i.name != d.instance.name]
    if any(_can_transfer(view, i) for i in busy) and not peers(view, d):
        return Reason.PEER_PAST_THRESHOLD
    return Reason.NO_PEER


def split(view: PlacementView) -> Choice | None:
    """An offload of a HEAVY request where no instance is free to compute and to decode it.

    D is the session's home where that may decode, else the instance with the fewest ongoing tokens;
    P the one that is ready first.
    """
    ds = [c for c in view.decode_only or () if size_on(view, c) is Size.HEAVY]
    ps = peers(view)
    if not ds or not ps:
        return None
    d = min(ds, key=lambda c: (c.instance.name != view.home, c.load.ongoing_tokens, c.last_placed))
    p = min(ps, key=lambda c: ready_s(view, c))
    if ready_s(view, p) + transfer_s(view, p, d) >= view.config.prefill_timeout_s:
        return None
    return chosen(view, d, p, Reason.SPLIT_ROLES, placed=d.instance.name != view.home)


def _can_transfer(view: PlacementView, instance: Instance) -> bool:
    return not view.transfers.needs_bootstrap or instance.bootstrap_url is not None


def can_prefill(view: PlacementView, c: Candidate) -> bool:
    """Whether an instance may prefill for another: it can transfer KV and has room to pin it.

    Pinned KV is lost to the instance's own streams, so its amount is bounded. A hot one computes
    nothing for others.
    """
    rules = view.transfers
    if not c.helps or not _can_transfer(view, c.instance):
        return False
    if not rules.pins:
        return True
    requests, tokens = c.unreleased
    pinned = c.load.pinned_requests + requests
    if pinned >= rules.max_parallel:
        return False
    if not pinned or c.kv_tokens is None:
        return True
    pinned_tokens = c.load.pinned_tokens + tokens
    return pinned_tokens + view.free.prompt_tokens <= PINNED_RATIO * c.kv_tokens


def route_class(size: Size, *, offloaded: bool) -> RouteClass:
    """The class as logged: for HEAVY it says where the prompt is computed."""
    if size is Size.HEAVY:
        return RouteClass.HEAVY_P2P if offloaded else RouteClass.HEAVY_COLO
    return RouteClass.WARM if size is Size.WARM else RouteClass.MEDIUM


def ready_s(view: PlacementView, c: Candidate) -> float:
    """Seconds until `c` would have computed the prompt, its queue included."""
    load, pace = c.load, c.pace
    wait_s = max(pace.wait_s(view.now_s), c.kv_wait_s, view.fleet.way_s)
    streams = load.decode_requests
    return wait_s + pace.prefill_s(c.new_tokens, c.hit_tokens, streams, load.decode_tokens)


def transfer_s(view: PlacementView, p: Candidate, d: Candidate) -> float:
    """Seconds to move from P the KV that D lacks."""
    return view.fleet.transfers.seconds(p.instance.name, d.instance.name, d.new_tokens)
