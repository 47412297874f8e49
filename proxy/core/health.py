"""Is an instance fit to be chosen? A state machine per instance, fed by probes and by traffic.

UP -> DOWN after `FALL` failures in a row, of probes or connections alike; DOWN -> UP after `RISE`
probes in a row succeed. An answer of any kind, also an error status, shows that the server lives:
only failures to connect, resets before an answer and failed probes count.
"""

from __future__ import annotations

from dataclasses import dataclass

FALL = 2
RISE = 2


@dataclass(slots=True)
class Health:
    """One instance. It starts UP: traffic and the first probe, made at once, tell otherwise."""

    is_up: bool = True
    _failures: int = 0
    _successes: int = 0

    def failed(self) -> bool:
        """A probe or a connection failed; true when this one takes the instance down."""
        self._successes = 0
        self._failures += 1
        went_down = self.is_up and self._failures >= FALL
        if went_down:
            self.is_up = False
        return went_down

    def answered(self) -> None:
        """Traffic got an answer: failures start again from none. It does not bring one back up."""
        self._failures = 0

    def probed(self) -> bool:
        """A probe succeeded; true when this one brings the instance back up."""
        self._failures = 0
        self._successes += 1
        came_up = not self.is_up and self._successes >= RISE
        if came_up:
            self.is_up = True
        return came_up
