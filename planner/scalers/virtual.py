"""Decisions for another orchestrator, which asks for them and acknowledges them over HTTP.

The founding design's virtual connector: a decision counts as done once an id as large as its own
was acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from planner.config.components import Component
from planner.scalers.base import Applied, Decision, Fleet, Scaler


class UnknownDecisionError(ValueError):
    """An acknowledgement of a decision that is not the current one."""


class VirtualScaler(Scaler):
    """Publishes the current decision; the planner's listener answers for it."""

    name = "virtual"

    def __init__(self) -> None:
        self.current: Decision | None = None
        self._acknowledged = -1
        self._changed = asyncio.Condition()

    async def validate(self, components: Sequence[Component]) -> None:
        """Whoever carries decisions out may come later."""

    async def apply(self, decision: Decision, fleet: Fleet) -> Applied:
        """Publish it; unchanged, it is published once."""
        if self.current is None or self.current.decision_id != decision.decision_id:
            self.current = decision
            async with self._changed:
                self._changed.notify_all()
        if self._acknowledged >= decision.decision_id:
            return Applied()
        return Applied(f"decision {decision.decision_id} is not acknowledged")

    async def after(self, decision_id: int, limit_s: float) -> Decision | None:
        """The current decision once its id is larger; None after `limit_s` seconds."""
        try:
            async with asyncio.timeout(limit_s), self._changed:
                await self._changed.wait_for(lambda: self._is_later(decision_id))
        except TimeoutError:
            return None
        return self.current

    def _is_later(self, decision_id: int) -> bool:
        return self.current is not None and self.current.decision_id > decision_id

    def acknowledge(self, decision_id: int) -> bool:
        """Take it for done; whether that is new. Raises UnknownDecisionError."""
        current = self.current
        if current is None or decision_id != current.decision_id:
            known = "none" if current is None else current.decision_id
            raise UnknownDecisionError(f"decision_id: the current decision is {known}")
        is_new = decision_id > self._acknowledged
        self._acknowledged = decision_id
        return is_new

    async def aclose(self) -> None:
        """Nothing is open."""

    def notes(self) -> Mapping[str, Any]:
        """What was acknowledged."""
        return {"acknowledged": self._acknowledged}

    def recall(self, notes: Mapping[str, Any]) -> None:
        """What was acknowledged before."""
        if notes:
            self._acknowledged = int(notes["acknowledged"])
