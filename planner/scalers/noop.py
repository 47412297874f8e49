"""A scaler that does nothing: for a planner whose decisions are only looked at."""

from __future__ import annotations

from collections.abc import Sequence

from planner.config.components import Component
from planner.scalers.base import Applied, Decision, Fleet, Scaler


class NoopScaler(Scaler):
    """Takes every decision for done."""

    name = "noop"

    async def validate(self, components: Sequence[Component]) -> None:
        """Nothing can be wrong."""

    async def apply(self, decision: Decision, fleet: Fleet) -> Applied:
        """Done."""
        return Applied()

    async def aclose(self) -> None:
        """Nothing is open."""
