"""What the commands about a trace count: spreads of numbers, and which session a request is of."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from replayer.trace.loaders import TraceRequest


def spread(values: Sequence[float], *percents: int) -> dict[str, float]:
    """Return nearest-rank percentiles and the maximum, by name; empty where there are no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    found = {f"p{one}": ordered[math.ceil(one / 100 * len(ordered)) - 1] for one in percents}
    return found | {"max": ordered[-1]}


@dataclass(slots=True)
class Sessions:
    """The turns of each session; a request without a name of one is of that which it waits for."""

    turns: dict[str, int] = field(default_factory=dict)
    _of: dict[str, str] = field(default_factory=dict)

    def add(self, request: TraceRequest) -> str:
        """Count a turn; returns the session's name."""
        session = request.session_id
        if session is None:
            before = (self._of[one] for one in request.wait_for if one in self._of)
            session = self._of[request.request_id] = next(before, request.request_id)
        self.turns[session] = self.turns.get(session, 0) + 1
        return session

    @property
    def several(self) -> bool:
        """Whether any session has a second turn."""
        return max(self.turns.values(), default=0) > 1
