"""Retries: the next instance of a request that failed before the client's first byte.

Nothing has reached the client, so a second run is invisible. It costs the fleet work, so it is
bounded three times: per request, by a budget over all requests, and by the eligible instances. An
instance whose breaker is open gets no repetition. An instance without a recent failure gets the
first retry at once, outside the budget. So one bad instance among good ones costs clients nothing,
and requests that fail everywhere leave the budget to the others. Any other repetition needs the
budget; so does the one that is left where every instance is in doubt for its client. When
everything fails, every instance has failed lately and soon every breaker is open: the storm ends by
itself.
"""

from __future__ import annotations

import math
from email.utils import parsedate_to_datetime
from enum import Enum

from proxy.core.types import FailureKind, Fallback

MAX_RETRIES = 2
BUDGET_RATIO, BUDGET_MIN = 0.2, 3
"""Most repetitions at a time: this part of the requests in flight, or this number if larger."""
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.025, 0.25
BUSY_MIN_S, BUSY_MAX_S = 1, 30
_D_INNOCENT = {
    FailureKind.PEER_GONE: Fallback.P_GONE,
    FailureKind.TIMEOUT: Fallback.TRANSFER_TIMEOUT,
    FailureKind.LATE: Fallback.TRANSFER_TIMEOUT,
    FailureKind.SERVER_ERROR: Fallback.D_FAILED,
}
_ONCE = frozenset({FailureKind.TIMEOUT, FailureKind.NO_MODEL})
"""Failures repeated once: a second repetition would be as late, or deny the model as well."""
_NEVER = frozenset({FailureKind.NO_ROOM, FailureKind.REDIRECT})
"""Failures that are not repeated: another instance would fail in the same way."""
_SAME_AGAIN = frozenset({FailureKind.CONNECT, FailureKind.UNREACHABLE, FailureKind.RESET})
"""Failures repeated on the same instance for want of another: nothing was computed."""


class Next(Enum):
    """The next step of a failed request."""

    SAME_INSTANCE = "same"
    OTHER_INSTANCE = "other"
    GIVE_UP = "give_up"


def after_failure(kind: FailureKind, *, offloaded: bool, retries: int) -> Next:
    """`offloaded`: D was waiting for KV from a peer. `retries`: runs already repeated."""
    if offloaded and is_innocent(kind):
        return Next.SAME_INSTANCE
    limit = 1 if kind in _ONCE else MAX_RETRIES
    if kind in _NEVER or retries >= limit:
        return Next.GIVE_UP
    return Next.OTHER_INSTANCE


def is_innocent(kind: FailureKind) -> bool:
    """Whether the peer caused this failure of a D that waited for its KV."""
    return kind in _D_INNOCENT


def may_repeat(kind: FailureKind, retries: int) -> bool:
    """Whether the same instance may be tried again, after a pause, without another one."""
    return kind in _SAME_AGAIN and retries == 0


def fallback_reason(kind: FailureKind) -> Fallback:
    """The fallback reason of an offload whose decode leg failed in this way."""
    return _D_INNOCENT.get(kind, Fallback.D_FAILED)


def backoff_s(retries: int, u: float) -> float:
    """The pause before retry number `retries` + 1: full jitter, `u` in 0..1 is random."""
    longest_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** (retries + 2))
    return BACKOFF_MIN_S + u * (longest_s - BACKOFF_MIN_S)


class Budget:
    """Number of running retries, over all requests; `active` requests are in flight."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.active = 0

    def take(self) -> bool:
        """Begin a retry that needs the budget; false when too many run already."""
        if not self.has_room():
            return False
        self.in_flight += 1
        return True

    def has_room(self) -> bool:
        """Whether one more retry may run now."""
        return self.in_flight < max(BUDGET_MIN, BUDGET_RATIO * self.active)

    def give_back(self) -> None:
        """End a retry: it has its answer, or has failed."""
        self.in_flight -= 1


def busy_s(retry_after: str | None, unix_now_s: float) -> int:
    """Pause for an engine that reported busy: its Retry-After, in whole seconds.

    Seconds or an HTTP date, kept within BUSY_MIN_S and BUSY_MAX_S; the least where it says nothing
    that could be read.
    """
    wait_s = _wait_s(retry_after or "", unix_now_s)
    return math.ceil(max(BUSY_MIN_S, min(BUSY_MAX_S, wait_s)))


def _wait_s(text: str, unix_now_s: float) -> float:
    try:
        wait_s = float(text)
    except ValueError:
        try:
            wait_s = parsedate_to_datetime(text).timestamp() - unix_now_s
        except (ValueError, OverflowError):
            return 0.0
    return 0.0 if math.isnan(wait_s) else wait_s
