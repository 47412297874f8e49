"""Retries of a 503: their number, and the wait before each."""

from dataclasses import dataclass

RETRY_AFTER_CAP_S = 60.0
UNKNOWN_S = 1.0
"""The wait where an answer names no seconds."""
BACKOFF_CAP_S = 60.0
BACKOFF_TRIES = 5


@dataclass(frozen=True, slots=True)
class Retries:
    """At most `most` repetitions of a request, each after an answer with status 503.

    The wait is the answer's Retry-After; with `is_backoff` min(60, 2**attempt + U(0,1)) seconds of
    a target whose time runs `time_scale` times faster than real time.
    """

    most: int = 0
    is_backoff: bool = False
    time_scale: float = 1.0

    @classmethod
    def backoff(cls, time_scale: float = 1.0) -> "Retries":
        """Make the exponential back-off that Dynamo's 'Request Rejection' asks of clients."""
        return cls(BACKOFF_TRIES - 1, is_backoff=True, time_scale=time_scale)

    def wait_s(self, attempt: int, retry_after_s: float | None, uniform: float) -> float:
        """Return the real seconds between attempt number `attempt`, from 0, and the next one.

        `uniform`: a random number in [0, 1).
        """
        if self.is_backoff:
            # Beyond attempt 6 the cap holds, and 2.0**1024 would overflow.
            return min(BACKOFF_CAP_S, 2.0 ** min(attempt, 6) + uniform) / self.time_scale
        return min(UNKNOWN_S if retry_after_s is None else retry_after_s, RETRY_AFTER_CAP_S)


NEVER = Retries()
