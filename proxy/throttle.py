"""Lines of the log that may come with every request: one per cause at most every 10 s."""

from __future__ import annotations

import logging
from collections.abc import Hashable

from proxy.core.record import RequestRecord
from proxy.core.types import FailureKind

LOG_EVERY_S = 10.0
KEYS = 1024
"""Causes remembered; beyond it the one that was said longest ago is forgotten."""
DETAIL_CHARS = 300
_NO_FAULT = frozenset({FailureKind.BUSY, FailureKind.NO_MODEL})
"""Answers to a fleet under load, and to a client that asks for what is not there."""
_log = logging.getLogger(__name__)


class Throttle:
    """When each cause may be said again, and how often it was not."""

    __slots__ = ("_causes",)

    def __init__(self) -> None:
        self._causes: dict[Hashable, tuple[float, int]] = {}

    def turn(self, cause: Hashable, now_s: float) -> int | None:
        """How often `cause` came unsaid since its last line; None: not said now, but counted."""
        until_s, unsaid = self._causes.get(cause, (now_s, 0))
        if now_s < until_s:
            self._causes[cause] = until_s, unsaid + 1
            return None
        self._causes.pop(cause, None)
        if len(self._causes) >= KEYS:
            del self._causes[next(iter(self._causes))]
        self._causes[cause] = now_s + LOG_EVERY_S, 0
        return unsaid


def more(unsaid: int) -> str:
    """The end of a line that stands for others as well."""
    return f"; {unsaid} more since the last line" if unsaid else ""


class FailureLog:
    """Requests that ended badly because of an instance: what their clients saw of it."""

    __slots__ = ("_throttle",)

    def __init__(self) -> None:
        self._throttle = Throttle()

    def note(self, record: RequestRecord, kind: str, detail: str, now_s: float) -> None:
        """One request has failed, for good: it runs nowhere else."""
        if kind in _NO_FAULT:
            return
        name = record.decode_instance or "none"
        unsaid = self._throttle.turn((name, kind), now_s)
        if unsaid is not None:
            said = detail[:DETAIL_CHARS], record.request_id, more(unsaid)
            _log.warning("instance %s: %s: %s (request %s failed%s)", name, kind, *said)
