"""Output tokens of a stream: the engine's count, if it agrees with the events.

Mostly an event is a token. It is more of them with speculative decoding, or where a slow client has
steps joined. The fleet's ratio says how many, the median of the instances' own. Who counts more
than that would seem to decode faster than the others, and draw their traffic.
"""

from __future__ import annotations

from proxy.core.accounts.engine_reports import OwnRatio, fleet_ratio
from proxy.core.accounts.instances import InstanceStates

PRIOR = 1.0
LEAST_RATIO, MOST_RATIO = 0.5, 8.0
EXTRA_EVENTS = 2
"""Events of every stream without a token: usage and end."""
ROLE_EVENTS = 6
"""More of them, at most: role, finish reason, comments."""
HELD_BACK = 1.5
"""Above this many times the fleet's ratio a parser, as of tool calls, held output back, or the
count is wrong. Then no time per token is known."""


class OutputTokens:
    """Believes or corrects the engines' counts; the instances' own ratios are in their states."""

    def __init__(self, states: InstanceStates) -> None:
        self._states = states
        self._fleet = PRIOR

    def believed(
        self, instance: str, told: int | None, events: int, asked: int | None
    ) -> int | None:
        """The output tokens of a whole stream, or None where nothing may be learned from it.

        `told`: the engine's count; `events`: those that passed; `asked`: the most tokens that the
        client allowed.
        """
        state, passed = self._states.get(instance), events - EXTRA_EVENTS
        if state is None or told is None or told < 1 or passed < 1:
            return None
        if state.tokens_per_event is None:
            state.tokens_per_event = OwnRatio()
        if state.tokens_per_event.observe(min(MOST_RATIO, max(LEAST_RATIO, told / passed))):
            known = [own for s in self._states if (own := s.tokens_per_event) is not None]
            self._fleet = fleet_ratio(known, PRIOR)
        most = passed * max(1.0, self._fleet)
        is_held_back = told > most * HELD_BACK or (asked is not None and told > asked)
        if is_held_back or told < (passed - ROLE_EVENTS) * LEAST_RATIO:
            return None
        return min(told, round(most))
