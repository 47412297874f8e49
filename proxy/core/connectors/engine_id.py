"""The engine id of a P, which D needs to fetch KV from it.

P's bootstrap server may hang, fail or answer nonsense while the engine serves. So its last answer
holds for `KEEP_S`, and after `BREAK_AFTER` failures in a row it is not asked for a while, so that
no request waits for it. The answer that no engine is registered holds at once.
"""

from __future__ import annotations

KEEP_S = 30.0
BREAK_AFTER = 3
OPEN_MIN_S, OPEN_MAX_S = 5.0, 30.0


class EngineId:
    """The id of one engine. Times on any one clock, seconds."""

    __slots__ = ("_failures", "_heard_s", "_id", "_last", "_open_until_s")

    def __init__(self) -> None:
        self._id: str | None = None
        self._last: str | None = None
        self._heard_s = 0.0
        self._failures = 0
        self._open_until_s = 0.0

    def known(self, now_s: float) -> str | None:
        """The id; None if it is unknown or older than KEEP_S."""
        return self._id if now_s - self._heard_s <= KEEP_S else None

    def may_ask(self, now_s: float) -> bool:
        """Whether a request may wait for the server's answer."""
        return now_s >= self._open_until_s

    def answered(self, engine_id: str | None, now_s: float) -> bool:
        """Note the server's answer; `engine_id` is None if no engine is registered.

        True if the id differs from the last one: the engine is another process.
        """
        self._failures, self._open_until_s = 0, 0.0
        self._id, self._heard_s = engine_id, now_s
        last, self._last = self._last, engine_id or self._last
        return last is not None and engine_id is not None and engine_id != last

    def failed(self, now_s: float) -> None:
        """Note a missing or unreadable answer of the server."""
        self._failures += 1
        beyond = self._failures - BREAK_AFTER
        if beyond >= 0:
            self._open_until_s = now_s + min(OPEN_MAX_S, OPEN_MIN_S * 2.0 ** min(beyond, 8))

    def forget(self) -> None:
        """Note a failed hand-over: the server is asked again before the next one."""
        self._id = None

    def renew(self) -> None:
        """Forget everything when the instance goes down: another process may take its address."""
        self._id = self._last = None
        self._failures, self._open_until_s = 0, 0.0
