"""Where a request goes after an instance failed before the client's first byte.

Nothing has reached the client, so a second run is invisible; it costs the fleet work, so it is
bounded. A first-token timeout is not repeated: the next instance would be as late, and twice as
much would be computed.
"""

from __future__ import annotations

from enum import Enum

from proxy.core.types import FailureKind, Fallback

MAX_RETRIES = 2
_D_INNOCENT = {
    FailureKind.PEER_GONE: Fallback.P_GONE,
    FailureKind.TIMEOUT: Fallback.TRANSFER_TIMEOUT,
    FailureKind.SERVER_ERROR: Fallback.D_FAILED,
}


class Next(Enum):
    """What to do with the request."""

    SAME_INSTANCE = "same"
    OTHER_INSTANCE = "other"
    GIVE_UP = "give_up"


def after_failure(kind: FailureKind, *, offloaded: bool, retries: int) -> Next:
    """`offloaded`: D was waiting for KV from a peer. `retries`: runs already repeated."""
    if offloaded and kind in _D_INNOCENT:
        return Next.SAME_INSTANCE
    if kind is FailureKind.TIMEOUT or retries >= MAX_RETRIES:
        return Next.GIVE_UP
    return Next.OTHER_INSTANCE


def fallback_reason(kind: FailureKind) -> Fallback:
    """What ended the offload when the decode leg failed in this way."""
    return _D_INNOCENT.get(kind, Fallback.D_FAILED)
