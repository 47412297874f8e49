"""Wrappers around a policy: failing open, and the shadow policy.

One places by load where the policy raises an error; the other computes what a second policy would
have chosen (`--shadow-policy`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from proxy.core.config import RouterConfig
from proxy.core.placement.alternatives import Shadowed
from proxy.core.placement.scene import (
    Choice,
    Decide,
    PlacementView,
    predicted_ttft_s,
    route_class,
    size_on,
)
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


def failing_open(decide: Decide, note: Callable[[str], None]) -> Decide:
    """`decide`, or the least loaded instance where it raises; the reason says so, counted.

    `note` hears what was raised.
    """

    def guarded(scene: PlacementView) -> Choice:
        try:
            return decide(scene)
        except MISTAKES as mistake:
            note(described(mistake))
            return by_load(scene)

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


def by_load(scene: PlacementView) -> Choice:
    """The home while it is free, else who has the fewest ongoing tokens."""
    at_home = [c for c in scene.free if c.instance.name == scene.home]
    d = (at_home or [min(scene.free, key=lambda c: (c.load.ongoing_tokens, c.last_placed))])[0]
    return Choice(d, None, size_on(scene, d), Reason.POLICY_FAILED, placed=not at_home)


class Shadow:
    """A policy that only looks; `decide` is asked with `policy` in the place of the real one."""

    def __init__(self, policy: str, decide: Decide, config: RouterConfig) -> None:
        self.policy = policy
        self._decide = decide
        self._config = replace(config, offload_policy=policy)

    def look(self, scene: PlacementView, made: Choice) -> Shadowed:
        """What it would have done where `made` was done."""
        try:
            choice = self._decide(replace(scene, config=self._config))
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
            predicted_ttft_s(scene, choice),
        )
