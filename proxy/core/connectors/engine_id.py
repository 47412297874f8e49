"""What is known of an engine's id, which D needs to fetch from it.

The server that tells it may hang, fail or babble while the engine serves: its last word holds for
`KEEP_S`, and one that failed `BREAK_AFTER` times in a row is left alone for a while, so that no
request waits for it. An engine that has none yet says so; that holds at once.
"""

from __future__ import annotations

KEEP_S = 30.0
BREAK_AFTER = 3
OPEN_MIN_S, OPEN_MAX_S = 5.0, 30.0


class EngineId:
    """One engine's. Times on any one clock, seconds."""

    __slots__ = ("_failures", "_heard_s", "_id", "_last", "_open_until_s")

    def __init__(self) -> None:
        self._id: str | None = None
        self._last: str | None = None
        self._heard_s = 0.0
        self._failures = 0
        self._open_until_s = 0.0

    def known(self, now_s: float) -> str | None:
        """The id, while it may be used."""
        return self._id if now_s - self._heard_s <= KEEP_S else None

    def may_ask(self, now_s: float) -> bool:
        """Whether a request may wait for the server's answer."""
        return now_s >= self._open_until_s

    def answered(self, engine_id: str | None, now_s: float) -> bool:
        """The server has answered, with None where no engine is registered.

        True when the id is another than the last one: the engine is another process.
        """
        self._failures, self._open_until_s = 0, 0.0
        self._id, self._heard_s = engine_id, now_s
        last, self._last = self._last, engine_id or self._last
        return last is not None and engine_id is not None and engine_id != last

    def failed(self, now_s: float) -> None:
        """The server could not be asked, or what it said could not be understood."""
        self._failures += 1
        beyond = self._failures - BREAK_AFTER
        if beyond >= 0:
            self._open_until_s = now_s + min(OPEN_MAX_S, OPEN_MIN_S * 2.0 ** min(beyond, 8))

    def forget(self) -> None:
        """It made a hand-over fail: it is asked again before the next one."""
        self._id = None

    def renew(self) -> None:
        """The instance went down: whoever comes back is somebody else."""
        self._id = self._last = None
        self._failures, self._open_until_s = 0, 0.0
