"""Wrappers around a policy: failing open, and the shadow policy.

The first places by load if the policy raises; the second computes what another policy would have
chosen (`--shadow-policy`).
"""

from __future__ import annotations

from typing import Final

from proxy.core.placement.alternatives import Shadowed
from proxy.core.placement.decision import Choice, Decide, PlacementView, chosen, route_class
from proxy.core.types import Reason

MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that a defect in a policy can raise.

A policy does no IO, takes no locks and imports nothing while it runs, so its code raises nothing
else. MemoryError, cancellation and the end of the process are not caught.
"""
_WORDS: Final = 200
"""Longest text of an exception that is logged, in characters."""


def failing_open(decide: Decide) -> Decide:
    """`decide`, or placement by load if it raises; the choice then has the exception as text."""

    def guarded(view: PlacementView) -> Choice:
        try:
            return decide(view)
        except MISTAKES as mistake:
            return by_load(view, described(mistake))

    return guarded


def described(mistake: Exception) -> str:
    """The exception and the line that raised it, without anything of the request."""
    trace = mistake.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    words = f"{type(mistake).__name__}: {mistake}"[:_WORDS]
    if trace is None:
        return words
    return f"{words} ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"


def by_load(view: PlacementView, mistake: str) -> Choice:
    """The session's home while it is free, else the instance with the fewest ongoing tokens."""
    at_home = [c for c in view.free if c.instance.name == view.home]
    d = (at_home or [min(view.free, key=lambda c: (c.load.ongoing_tokens, c.last_placed))])[0]
    return chosen(view, d, None, Reason.POLICY_FAILED, placed=not at_home, mistake=mistake)


class Shadow:
    """A policy whose decisions are only recorded."""

    def __init__(self, policy: str, decide: Decide) -> None:
        self.policy = policy
        self._decide = decide

    def look(self, view: PlacementView, made: Choice) -> Shadowed:
        """The shadow policy's decision beside the active policy's `made`."""
        try:
            choice = self._decide(view)
        except MISTAKES as error:
            return Shadowed(self.policy, error=f"{type(error).__name__}: {error}")
        d, p = choice.decode, choice.prefill
        return Shadowed(
            self.policy,
            d is made.decode and p is made.prefill,
            d.instance.name,
            p.instance.name if p else None,
            route_class(choice.size, offloaded=p is not None),
            choice.reason,
            choice.predicted_ttft_s,
        )
