"""Reports overload: a line on stderr at once and then every ten seconds, a warning in /health."""

from __future__ import annotations

import asyncio
import logging

from proxy.core.admission.overload import WINDOW_S, Overload, cause
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.waiting import Waiting
from proxy.net.timeouts import Clock

MODEL_CHARS = 100
"""Most of a model's name that a line has."""
LOOK_S = 0.5
"""Interval of checks, and the delay of the line after the first refusal."""
_log = logging.getLogger(__name__)


class OverloadWatch:
    """Looks at what is refused and waits, and puts it into words."""

    def __init__(
        self, overload: Overload, known: FleetState, waiting: Waiting, clock: Clock
    ) -> None:
        self._overload, self._known = overload, known
        self._waiting, self._clock = waiting, clock

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Log a line where one is due, and another one when all is over."""
        overload, now_s = self._overload, self._clock.now_s()
        since_s, total = overload.since_s, overload.total
        if overload.look(self._waiting.longest(now_s), now_s):
            _log.warning("%s", self._words(now_s))
        elif since_s is not None and overload.since_s is None:
            lasted_s = now_s - since_s - WINDOW_S
            _log.info(
                "overload is over: it lasted %.1f s, %d requests were refused", lasted_s, total
            )

    @property
    def warning(self) -> tuple[str, float] | None:
        """Refusals in words, and their start on the monotonic clock; None: no overload."""
        since_s = self._overload.since_s
        return None if since_s is None else (self._words(self._clock.now_s()), since_s)

    def _words(self, now_s: float) -> str:
        overload, reject = self._overload, self._overload.reject
        assert reject is not None
        model, fleet = reject.model, self._known.fleet
        is_one_of = len(fleet.models()) > 1 and fleet.serves(model)
        past = reject.past[0].instance if reject.past else None
        limits = self._known.gate.thresholds(model, past)
        why = cause(reject, limits, model[:MODEL_CHARS] if is_one_of else None)
        refused, longest_s = overload.refused_lately(now_s), overload.longest_s
        why += ", the queue is full (--max-queue)" if overload.is_queue_full(now_s) else ""
        counted = f"{refused} refused in {WINDOW_S} s; longest wait {longest_s:.0f} s"
        return f"overload: {why}; {counted}"
