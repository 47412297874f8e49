"""The result of a decision: instances, reasons, and the lease that charges them."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.accounts.lease import Lease
from proxy.core.kvcache.claims import Claim
from proxy.core.kvcache.engine_cache import Use
from proxy.core.kvcache.sessions import Stay
from proxy.core.latency.model import Measured, Times
from proxy.core.placement.alternatives import Alternatives, Shadowed
from proxy.core.types import Fallback, Instance, Place, Reason, RouteClass


@dataclass(slots=True)
class Hedge:
    """D computes while P is late: from `started_s`, for `work_s` after D's earlier prefills.

    `times`: D's, which have the reservation.
    """

    times: Times
    started_s: float
    work_s: float
    predicted_prefill_s: float
    computes_tokens: int
    waited_for_room: bool
    beside_step_s: float
    use: Use | None = None


@dataclass(slots=True, init=False)
class Route:
    """The decision for one request, and the lease that charges it."""

    decode: Instance
    prefill: Instance | None
    """P; None if the request is computed where it decodes."""
    route_class: RouteClass
    reason: Reason
    policy: str
    prompt_tokens: int
    hit_tokens: int
    reachable_hit_tokens: int
    """The largest hit of any instance that might have been D."""
    new_tokens: int
    """Tokens that D would compute."""
    new_tokens_prefill: int | None
    """Tokens that P computes."""
    lease: Lease
    turn: int | None
    """None if the request is not a turn of its session."""
    predicted_ttft_s: float
    predicted_transfer_s: float | None
    predicted_prefill_s: float
    """Time until the present attempt's prompt is computed, queue included."""
    predicted_ttft_bound_s: float | None
    """A later first token is late."""
    options: Alternatives | None
    shadow: Shadowed | None
    mistake: str | None
    """The policy's exception; this attempt was then placed by load."""
    home: str | None
    """The session's instance before, None without one."""
    place: Place
    """The reason for D."""
    stay: Stay | None
    """The session's life on D, which includes this request until it ends."""
    fallback: Fallback | None
    times: Times | None
    """The computing instance's times, which have the reservation; None once it is over."""
    reserved_s: float
    beside_step_s: float
    computes_tokens: int
    waited_for_room: bool
    is_queued: bool
    """Other prompts, or KV in use, were before it."""
    measured: Measured | None
    """Time of its prefill, until the answer reports its cached tokens."""
    handed_s: float | None
    first_token_s: float | None
    tried: set[str]
    use: Use | None
    hedge: Hedge | None
    key_tokens: int
    """Hit on D predicted by the prompt's key, see `core.kvcache.trust`."""
    claim: Claim | None
    """Claims of D's KV events on the prompt."""

    def __init__(
        self,
        decode: Instance,
        prefill: Instance | None,
        route_class: RouteClass,
        reason: Reason,
        policy: str,
        prompt_tokens: int,
        hit_tokens: int,
        new_tokens: int,
        new_tokens_prefill: int | None,
        lease: Lease,
        turn: int | None,
        predicted_ttft_s: float,
        predicted_transfer_s: float | None = None,
        predicted_ttft_bound_s: float | None = None,
        options: Alternatives | None = None,
    ) -> None:
        self.decode, self.prefill = decode, prefill
        self.route_class, self.reason, self.policy = route_class, reason, policy
        self.prompt_tokens = prompt_tokens
        self.hit_tokens, self.new_tokens = hit_tokens, new_tokens
        self.reachable_hit_tokens = hit_tokens
        self.new_tokens_prefill = new_tokens_prefill
        self.lease, self.turn = lease, turn
        self.predicted_ttft_s = predicted_ttft_s
        self.predicted_transfer_s = predicted_transfer_s
        self.predicted_prefill_s = 0.0
        self.predicted_ttft_bound_s = predicted_ttft_bound_s
        self.options = options
        self.shadow = None
        self.mistake = None
        self.home = None
        self.place = Place.LOAD
        self.stay = None
        self.times = None
        self.fallback = None
        self.reserved_s = self.beside_step_s = 0.0
        self.computes_tokens = 0
        self.waited_for_room = self.is_queued = False
        self.measured = None
        self.handed_s = self.first_token_s = None
        self.tried = set()
        self.use = None
        self.hedge = None
        self.key_tokens = hit_tokens
        self.claim = None
