"""Where a request goes after a failure: every kind, offloaded or not, at every count of retries."""

from __future__ import annotations

import pytest

from proxy.core.retry import MAX_RETRIES, Next, after_failure, fallback_reason
from proxy.core.types import FailureKind, Fallback

SAME, OTHER, GIVE_UP = Next.SAME_INSTANCE, Next.OTHER_INSTANCE, Next.GIVE_UP
TABLE = {
    FailureKind.CONNECT: (OTHER, OTHER, Fallback.D_FAILED),
    FailureKind.RESET: (OTHER, OTHER, Fallback.D_FAILED),
    FailureKind.BUSY: (OTHER, OTHER, Fallback.D_FAILED),
    FailureKind.SERVER_ERROR: (OTHER, SAME, Fallback.D_FAILED),
    FailureKind.TIMEOUT: (GIVE_UP, SAME, Fallback.TRANSFER_TIMEOUT),
    FailureKind.MALFORMED: (OTHER, OTHER, Fallback.D_FAILED),
    FailureKind.PEER_GONE: (OTHER, SAME, Fallback.P_GONE),
    FailureKind.WENT_DOWN: (OTHER, OTHER, Fallback.D_FAILED),
}


def test_every_kind_has_its_row() -> None:
    assert set(TABLE) == set(FailureKind)


@pytest.mark.parametrize("kind", FailureKind)
def test_while_retries_are_left(kind: FailureKind) -> None:
    colocated, offloaded, fallback = TABLE[kind]
    for retries in range(MAX_RETRIES):
        assert after_failure(kind, offloaded=False, retries=retries) is colocated
        assert after_failure(kind, offloaded=True, retries=retries) is offloaded
    assert fallback_reason(kind) is fallback


@pytest.mark.parametrize("kind", FailureKind)
@pytest.mark.parametrize("retries", [MAX_RETRIES, MAX_RETRIES + 1])
def test_after_the_last_retry(kind: FailureKind, retries: int) -> None:
    """A D that waited for its peer has not run yet: computing there is not one more attempt."""
    still = after_failure(kind, offloaded=True, retries=retries)
    assert after_failure(kind, offloaded=False, retries=retries) is GIVE_UP
    assert still is (SAME if TABLE[kind][1] is SAME else GIVE_UP)
