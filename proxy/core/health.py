"""Is an instance fit to be chosen? A state machine per instance, fed by probes and by traffic.

UP -> DOWN after `FALL` failures in a row, of probes or connections alike; DOWN -> UP after `RISE`
probes in a row succeed. One that was never seen goes either way at the first sign. An answer of any
kind, also an error status, shows that the server lives: only failures to connect, resets before an
answer and failed probes count.
"""

from __future__ import annotations

from dataclasses import dataclass

FALL = 2
RISE = 2


@dataclass(slots=True)
class Health:
    """One instance. It counts as UP until told otherwise, but one never seen falls at once."""

    is_up: bool = True
    was_seen: bool = False
    last_error: str | None = None
    _failures: int = 0
    _successes: int = 0

    def failed(self, error: str) -> bool:
        """A probe or a connection failed; true when this one takes the instance down."""
        self.last_error = error
        self._successes = 0
        self._failures += 1
        went_down = self.is_up and (self._failures >= FALL or not self.was_seen)
        if went_down:
            self.is_up = False
        return went_down

    def answered(self) -> None:
        """Traffic got an answer: failures start again from none. It does not bring one back up."""
        self.was_seen = True
        self._failures = 0

    def probed(self) -> bool:
        """A probe succeeded; true when this one brings the instance back up."""
        first, self.was_seen = not self.was_seen, True
        self._failures = 0
        self._successes += 1
        came_up = not self.is_up and (self._successes >= RISE or first)
        if came_up:
            self.is_up = True
        return came_up
