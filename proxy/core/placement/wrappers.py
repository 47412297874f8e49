"""Wrappers around a policy: failing open, and the shadow policy.

One places by load where the policy raises an error; the other computes what a second policy would
have chosen (`--shadow-policy`).
"""

from __future__ import annotations

from proxy.core.placement.alternatives import Shadowed
from proxy.core.placement.scene import Choice, Decide, PlacementView, chosen, route_class
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
"""What a defect in a pure function raises.

A policy has neither IO nor locks, and imports nothing while it runs, so nothing else can come of
its code. What is not of its making passes: MemoryError, and what ends a task or the process.
"""
_WORDS = 200
"""Of a mistake's own text, characters."""


def failing_open(decide: Decide) -> Decide:
    """`decide`, or the least loaded instance where it raises; the choice says what that was."""

    def guarded(view: PlacementView) -> Choice:
        try:
            return decide(view)
        except MISTAKES as mistake:
            return by_load(view, described(mistake))

    return guarded


def described(mistake: Exception) -> str:
    """What was raised, and at which line; not by whose request."""
    trace = mistake.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    words = f"{type(mistake).__name__}: {mistake}"[:_WORDS]
    if trace is None:
        return words
    return f"{words} ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"


def by_load(view: PlacementView, mistake: str) -> Choice:
    """The home while it is free, else who has the fewest ongoing tokens."""
    at_home = [c for c in view.free if c.instance.name == view.home]
    d = (at_home or [min(view.free, key=lambda c: (c.load.ongoing_tokens, c.last_placed))])[0]
    return chosen(view, d, None, Reason.POLICY_FAILED, placed=not at_home, mistake=mistake)


class Shadow:
    """A policy that only looks."""

    def __init__(self, policy: str, decide: Decide) -> None:
        self.policy = policy
        self._decide = decide

    def look(self, view: PlacementView, made: Choice) -> Shadowed:
        """What it would have done where `made` was done."""
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
