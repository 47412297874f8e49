"""Time limits of a request's phases: scaled by the prediction, up to a flat cap.

limit = fixed part (sockets, housekeeping) + factor (prediction error) x the prediction's late bound

The late bound includes the queue in front of a prompt, and how far off predictions lately were on
that instance. Seconds everywhere.
"""

from __future__ import annotations

from proxy.core.latency.model import Latency
from proxy.core.routing.route import Route
from proxy.core.types import Load

FIRST_TOKEN_FIXED_S = 5.0
LEG_FIXED_S = 2.0
IDLE_FIXED_S = 60.0
FACTOR = 3.0
AGAIN_S = 1.0
"""A late leg that no other instance would take over now is looked at again after this time."""
IDLE_STEPS = 200.0
"""Steps that a running stream may have to wait while others are preempted, loaded or prefilled."""


def first_token_limit_s(latency: Latency, route: Route, cap_s: float) -> float:
    """Request sent to the first event, computed on D: 5 s + 3 x late bound, at most `cap_s`."""
    late_s = latency.prefill_bound_s(route.decode.name, route.predicted_prefill_s)
    return min(cap_s, FIRST_TOKEN_FIXED_S + FACTOR * late_s)


def look_again_s(late_s: float, cap_s: float) -> float:
    """The next limit of a late leg, if no other instance would take it now."""
    return min(cap_s, late_s + AGAIN_S)


def prefill_limit_s(latency: Latency, route: Route, budget_s: float, cap_s: float) -> float:
    """The prefill leg: 2 s + 3 x late bound, at most `cap_s` and half of `budget_s`.

    `budget_s` is that of the first token: the other half is for computing on D after all.
    """
    name = route.prefill.name if route.prefill else route.decode.name
    late_s = latency.prefill_bound_s(name, route.predicted_prefill_s)
    return min(cap_s, budget_s / 2, LEG_FIXED_S + FACTOR * late_s)


def transfer_limit_s(latency: Latency, route: Route, now_s: float, cap_s: float) -> float:
    """P done to D's first event: 2 s + 3 x (D's queue and the transfer's late bound)."""
    predicted_s = route.predicted_transfer_s or 0.0
    late_s = latency.wait_s(route.decode.name, now_s)
    if route.prefill is not None:
        late_s += latency.transfer_bound_s(route.prefill.name, route.decode.name, predicted_s)
    return min(cap_s, LEG_FIXED_S + FACTOR * late_s)


def idle_limit_s(latency: Latency, route: Route, load: Load, now_s: float, cap_s: float) -> float:
    """Between two pieces of a stream: 60 s + 200 steps + D's prefill queue, at most `cap_s`."""
    pace = latency.of(route.decode.name).pace()
    scaled_s = IDLE_STEPS * pace.step_s(load.decode_tokens) + pace.wait_s(now_s)
    return min(cap_s, IDLE_FIXED_S + scaled_s)
