"""Where a request goes when its session has no home (or its home is busy): the lowest score wins.

A scorer gives one number for one candidate; SCORERS holds them by name. Equal scores go to the
instance with fewer ongoing tokens, then fewer sessions, then the longest wait for a placement.
"""

from __future__ import annotations

from collections.abc import Callable

from proxy.core.types import Candidate

Scorer = Callable[[Candidate], float]


def affinity(c: Candidate) -> float:
    """Tokens the instance computes before this request's first: its backlog and the new tokens."""
    return c.load.prefill_tokens + c.new_tokens


def least_tokens(c: Candidate) -> float:
    """Ongoing tokens, blind to prefixes."""
    return c.load.ongoing_tokens


def round_robin(c: Candidate) -> float:
    """The instance that has waited longest for a placement."""
    return c.last_placed


SCORERS: dict[str, Scorer] = {
    "affinity": affinity,
    "least-tokens": least_tokens,
    "round-robin": round_robin,
}

STICKY = frozenset({"affinity", "least-tokens"})
"""Placements that keep a session on its home."""
