"""A thread that acts when what is under way takes too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LOOK_S = 1.0


class Watchdog:
    """Looks once a second, so that to set it costs nothing: no thread is started or woken."""

    def __init__(self) -> None:
        self._due: tuple[float, Callable[[], object]] | None = None
        self._thread: threading.Thread | None = None

    def set(self, limit_s: float | None, act: Callable[[], object] = lambda: None) -> None:
        """Act in so many seconds, in place of what was set before; None: never."""
        self._due = None if limit_s is None else (time.monotonic() + limit_s, act)
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        pause = threading.Event()
        while not pause.wait(LOOK_S):
            due = self._due
            if due is not None and time.monotonic() > due[0]:
                self._due = None
                due[1]()
