"""A placement decision: its input (PlacementView, Candidates), its output (Choice), size classes.

A `Decide` is a pure function from a PlacementView to a Choice; `policies.POLICIES` names them. A
choice carries its predictions and the other options.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, overload

from proxy.core.latency.model import Latency, Times
from proxy.core.placement.alternatives import COLOCATIONS_KEPT, Alternatives, PricedOption, unpriced
from proxy.core.types import (
    Candidate,
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


@dataclass(slots=True, init=False)
class Candidates:
    """The instances that a decision may choose, in columns of `Candidate`'s fields.

    A decision reads numbers of every instance but needs few of them as objects, so a Candidate is
    only made on access.
    """

    prompt_tokens: int
    instances: list[Instance]
    names: list[str]
    loads: list[Load]
    hit_tokens: list[int]
    kv_full: list[float]
    kv_wait_s: list[float]
    kv_tokens: list[int | None]
    unreleased: list[tuple[int, int]]
    sessions: list[int]
    last_placed: list[int]
    has_failed: list[bool]
    """Whether something failed there since it last worked."""
    doubts: list[float] | None
    """Doubt by hollow answers, 0 to 1; None without any."""
    helps: list[bool] | None
    """As in `Candidate`; None if all instances are cool."""
    prefill_factors: list[float] | None
    """Price factor of a prefill, 1 on a cool instance; None if all are cool."""
    times: list[Times] | None
    """The instances' learned times; None to look them up by name."""
    key_tokens: list[int]
    is_home_doubted: bool
    """The hit of the session's home is doubtful, see `core.kvcache.trust`."""
    _made: list[Candidate | None]

    def __init__(
        self,
        *,
        prompt_tokens: int,
        instances: list[Instance],
        names: list[str],
        loads: list[Load],
        hit_tokens: list[int],
        kv_full: list[float],
        kv_wait_s: list[float],
        kv_tokens: list[int | None],
        unreleased: list[tuple[int, int]],
        sessions: list[int],
        last_placed: list[int],
        has_failed: list[bool] | None = None,
        doubts: list[float] | None = None,
        helps: list[bool] | None = None,
        prefill_factors: list[float] | None = None,
        times: list[Times] | None = None,
        key_tokens: list[int] | None = None,
        is_home_doubted: bool = False,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.instances, self.names, self.loads = instances, names, loads
        self.hit_tokens, self.kv_full, self.kv_wait_s = hit_tokens, kv_full, kv_wait_s
        self.kv_tokens, self.unreleased = kv_tokens, unreleased
        self.sessions, self.last_placed = sessions, last_placed
        self.has_failed = has_failed or [False] * len(names)
        self.doubts = doubts
        self.helps, self.prefill_factors = helps, prefill_factors
        self.times = times
        self.key_tokens = hit_tokens if key_tokens is None else key_tokens
        self.is_home_doubted = is_home_doubted
        self._made = [None] * len(names)

    @classmethod
    def of(cls, free: Iterable[Candidate], prompt_tokens: int) -> Candidates:
        """Columns of existing candidates."""
        made = list(free)
        self = cls(
            prompt_tokens=prompt_tokens,
            instances=[c.instance for c in made],
            names=[c.instance.name for c in made],
            loads=[c.load for c in made],
            hit_tokens=[c.hit_tokens for c in made],
            kv_full=[c.kv_full for c in made],
            kv_wait_s=[c.kv_wait_s for c in made],
            kv_tokens=[c.kv_tokens for c in made],
            unreleased=[c.unreleased for c in made],
            sessions=[c.sessions for c in made],
            last_placed=[c.last_placed for c in made],
        )
        self._made[:] = made
        return self

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Candidate]:
        return map(self.at, range(len(self.names)))

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> list[Candidate]: ...
    def __getitem__(self, at: int | slice) -> Candidate | list[Candidate]:
        places = range(len(self.names))[at]
        return self.at(places) if isinstance(places, int) else list(map(self.at, places))

    def at(self, at: int) -> Candidate:
        """The candidate at an index, the same object on every call."""
        found = self._made[at]
        if found is None:
            hit = self.hit_tokens[at]
            found = self._made[at] = Candidate(
                instance=self.instances[at],
                load=self.loads[at],
                hit_tokens=hit,
                new_tokens=self.prompt_tokens - hit,
                sessions=self.sessions[at],
                last_placed=self.last_placed[at],
                kv_full=self.kv_full[at],
                kv_wait_s=self.kv_wait_s[at],
                kv_tokens=self.kv_tokens[at],
                unreleased=self.unreleased[at],
                helps=self.helps is None or self.helps[at],
                key_tokens=self.key_tokens[at],
            )
        return found

    def place_of(self, name: str | None) -> int | None:
        """The index of an instance; None if it may not be chosen."""
        return self.names.index(name) if name is not None and name in self.names else None


@dataclass(slots=True, init=False)
class PlacementView:
    """Everything that a decision may read."""

    config: RouterConfig
    facts: RequestFacts
    home: str | None
    """Name of the session's instance, free or not."""
    free: Candidates
    """Eligible instances, at least one."""
    up_loads: Callable[[], Sequence[Load]]
    """Loads of all instances that are up, busy ones included."""
    now_s: float
    latency: Latency
    """The learned times, read only."""
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
        up_loads: Callable[[], Sequence[Load]],
        now_s: float,
        latency: Latency,
        transfers: TransferRules,
        slo_pressure: float = 1.0,
        prefill_only: Candidates | None = None,
        decode_only: Candidates | None = None,
        busy_peers: Sequence[Instance] = (),
        session_kv: SessionKv | None = None,
    ) -> None:
        self.config, self.facts, self.home, self.free = config, facts, home, free
        self.up_loads = up_loads
        self.now_s, self.latency = now_s, latency
        self.transfers, self.slo_pressure = transfers, slo_pressure
        self.prefill_only, self.decode_only = prefill_only, decode_only
        self.busy_peers = busy_peers
        self.session_kv = session_kv

    @property
    def mean_ongoing_tokens(self) -> float:
        """Mean of the ongoing tokens of all instances that are up."""
        loads = self.up_loads()
        return sum([load.ongoing_tokens for load in loads]) / len(loads) if loads else 0.0


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
    return pinned_tokens + view.facts.prompt_tokens <= PINNED_RATIO * c.kv_tokens


def route_class(size: Size, *, offloaded: bool) -> RouteClass:
    """The class as logged: for HEAVY it says where the prompt is computed."""
    if size is Size.HEAVY:
        return RouteClass.HEAVY_P2P if offloaded else RouteClass.HEAVY_COLO
    return RouteClass.WARM if size is Size.WARM else RouteClass.MEDIUM


def ready_s(view: PlacementView, c: Candidate) -> float:
    """Seconds until `c` would have computed the prompt, its queue included."""
    load, times = c.load, view.latency.of(c.instance.name)
    way_s = view.latency.way_s(view.facts.prompt_tokens)
    wait_s = max(times.wait_s(view.now_s), c.kv_wait_s, way_s)
    streams = load.decode_requests
    return wait_s + times.prefill_s(c.new_tokens, c.hit_tokens, streams, load.decode_tokens)


def transfer_s(view: PlacementView, p: Candidate, d: Candidate) -> float:
    """Seconds to move from P the KV that D lacks."""
    return view.latency.transfer_s(p.instance.name, d.instance.name, d.new_tokens)
