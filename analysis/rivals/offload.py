"""Published rules that decide whether another instance prefills: local or remote.

In each project the decode instance is chosen first, then the decider chooses a local or remote
prefill. P is then the best other instance by the project's prefill profile. Every rule returns
local if no peer can prefill or the request cannot be split.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from analysis.rivals.placement import Place, least_requests, requests
from proxy.core.placement.candidates import Candidate
from proxy.core.placement.decision import Choice, PlacementView, chosen, peers
from proxy.core.routing.route import Route
from proxy.core.types import Reason, RequestFacts

Decider = Callable[[PlacementView, Candidate, Candidate], bool]
"""Whether P (third argument) prefills for D (second)."""
NON_CACHED_TOKENS = 512
"""llm-d: 0 (off) by default, 8, 16 and 512 in its samples."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A rule made of a placement, and of a decider if it can offload."""

    place: Place
    remote: Decider | None = None

    def __call__(self, scene: PlacementView) -> Choice:
        """Choose D, then decide whether a P prefills."""
        return placed_on(scene, self.place(scene), self.remote)


def placed_on(scene: PlacementView, d: Candidate, remote: Decider | None) -> Choice:
    """Choice of D, whose prefill is remote where the decider says so of the best P."""
    p = prefill_peer(scene, d) if remote is not None else None
    if remote is None or p is None or not remote(scene, d, p):
        return local(scene, d)
    return chosen(scene, d, p, Reason.NON_CACHED_TOKENS, placed=True)


def local(scene: PlacementView, d: Candidate) -> Choice:
    """Choice to compute on D."""
    return chosen(scene, d, None, Reason.BELOW_THRESHOLD, placed=True)


def able_peers(scene: PlacementView, d: Candidate) -> list[Candidate]:
    """Return the instances that may prefill for D; none if the request or the fleet cannot."""
    can_split = scene.facts.offloadable and scene.transfers.can_offload
    return peers(scene, d) if can_split else []


def prefill_peer(scene: PlacementView, d: Candidate) -> Candidate | None:
    """Return the other instance with the fewest prefill tokens, this request's included."""
    return min(
        able_peers(scene, d),
        key=lambda c: (c.load.prefill_tokens + c.new_tokens, c.last_placed),
        default=None,
    )


def llm_d_decider(scene: PlacementView, d: Candidate, p: Candidate) -> bool:
    """llm-d prefix-based-pd-decider: remote from NON_CACHED_TOKENS new tokens on."""
    del scene, p
    return d.new_tokens >= NON_CACHED_TOKENS


def always_remote(scene: PlacementView, d: Candidate, p: Candidate) -> bool:
    """llm-d always-disagg-pd-decider: remote for every request."""
    del scene, d, p
    return True


class AibrixCombined:
    """AIBrix pd routing on combined pods: both legs unless a combined pod drains fast.

    A pod's drain score is its queue over its requests finished per second in the last minute. One
    below 0.25 is picked whole when some pod is above 1.0. Otherwise P is the lowest of missed
    prefix (10 points per load unit) plus relative load, D the least loaded.
    """

    FREE_SCORE, BUSY_SCORE = 0.25, 1.0
    WINDOW_S = 60.0

    def __init__(self) -> None:
        self._ended: dict[str, deque[float]] = {}

    def __call__(self, scene: PlacementView) -> Choice:
        """Choose D and perhaps a P by drain scores."""
        scores = {c.instance.name: self._drain(c, scene.now_s) for c in scene.free}
        free = [c for c in scene.free if scores[c.instance.name] < self.FREE_SCORE]
        if free and max(scores.values()) > self.BUSY_SCORE:
            return local(scene, min(free, key=lambda c: scores[c.instance.name]))
        d = least_requests(scene)
        able = able_peers(scene, d)
        if not able:
            return local(scene, d)
        most = max(requests(c.load) for c in scene.free) or 1

        def score(c: Candidate) -> tuple[float, int]:
            missed = 100.0 * c.new_tokens / scene.facts.prompt_tokens
            return 0.1 * missed + requests(c.load) / most, c.last_placed

        p = min(able, key=score)
        return chosen(scene, d, p, Reason.POLICY_ALWAYS, placed=True)

    def on_finish(
        self, route: Route, facts: RequestFacts, tokens: int, decode_s: float, now_s: float
    ) -> None:
        """Count a request that D has finished."""
        del facts, tokens, decode_s
        self._ended.setdefault(route.decode.name, deque()).append(now_s)

    def _drain(self, c: Candidate, now_s: float) -> float:
        ended = self._ended.setdefault(c.instance.name, deque())
        while ended and now_s - ended[0] > self.WINDOW_S:
            ended.popleft()
        return c.load.prefill_requests * self.WINDOW_S / max(1, len(ended))
