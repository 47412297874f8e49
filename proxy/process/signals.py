"""Signals that are kept while the process starts: by themselves they would end it."""

from __future__ import annotations

import signal
from typing import Final

KEPT: Final = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def keep() -> None:
    """Let these wait until `let_in`. Call it first of all, before any thread starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, KEPT)


def let_in() -> None:
    """Have what waits handled, and what comes: each has a handler by now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, KEPT)
