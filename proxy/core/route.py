"""What a decision gives: where a request goes and why, with the lease that charges it."""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.core.ledger import Lease
from proxy.core.options import Options
from proxy.core.record import Shadowed
from proxy.core.reuse import Use
from proxy.core.types import Fallback, Instance, Reason, RouteClass


@dataclass(slots=True)
class Hedge:
    """D computes while P is late: since `started_s`, for `work_s` behind what was there before."""

    started_s: float
    work_s: float
    predicted_prefill_s: float
    computes_tokens: int
    waited_for_room: bool
    use: Use | None = None


@dataclass(slots=True)
class Route:
    """The decision for one request, and the lease that charges it.

    `prefill` is None when the request is computed where it decodes. `new_tokens` is what D would
    have to compute, `new_tokens_prefill` what P has to; `predicted_prefill_s` is until the present
    attempt's prompt is computed, queue included; a TTFT beyond `predicted_ttft_bound_s` is late.
    """

    decode: Instance
    prefill: Instance | None
    route_class: RouteClass
    reason: Reason
    policy: str
    prompt_tokens: int
    hit_tokens: int
    new_tokens: int
    new_tokens_prefill: int | None
    lease: Lease
    turn: int
    predicted_ttft_s: float
    predicted_transfer_s: float | None = None
    predicted_prefill_s: float = 0.0
    predicted_ttft_bound_s: float | None = None
    options: Options | None = None
    shadow: Shadowed | None = None
    fallback: Fallback | None = None
    reserved_s: float = 0.0
    computes_tokens: int = 0
    waited_for_room: bool = False
    handed_s: float | None = None
    first_token_s: float | None = None
    tried: set[str] = field(default_factory=set)
    use: Use | None = None
    hedge: Hedge | None = None
